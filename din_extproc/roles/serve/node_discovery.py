"""The nodes that are found where they already are: the accounting process follows their sources and reports changes.

Rule: a listed node and a registered node of a pool win over one found at the same address, which comes back when they go.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from ipaddress import IPv6Address, ip_address
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.membership import MembershipDelta, NodeState, Registration
from din_extproc.domain.node import Discovery, DnsName, Endpoint, Node, Pool
from din_extproc.edge.discovery.dns import DnsSource
from din_extproc.edge.discovery.kubernetes import KubernetesSource
from din_extproc.edge.discovery.source import FoundEndpoint, SourceAnswer
from din_extproc.edge.registry.auth import is_own
from din_extproc.edge.registry.forms import NodeForm
from din_extproc.registry.claims import is_link_local
from din_extproc.registry.joining import find_mismatch
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_NO_NODES: Mapping[str, tuple[Node, ...]] = {}
_AFTER_FAULT_S = 1.0


class NodeSource(Protocol):
    """A place at which nodes of a pool are found."""

    def follow(self) -> AsyncGenerator[SourceAnswer, None]:
        """Yield the state of the source, at first and whenever it may have changed. It does not end, and raises nothing for failures."""


class FoundNode(Struct, frozen=True):
    """A node that was found, and whether it takes requests."""

    node: Node
    state: NodeState
    source: str


class DiscoveryStatus(Struct, frozen=True):
    """The state of a pool's source, for the admin page."""

    source: str
    nodes: int
    """Nodes of the last good answer that are ready."""
    problem: str
    """Reason why the source fails, or has no node; "": it does not."""
    remedy: str
    refused: Mapping[str, str]
    """Reasons why endpoints that were found are no nodes, by address."""


class NodeDiscovery:
    """Looks for the nodes of pools that have `discover`.

    Args:
        on_membership: Called with the nodes that were found or are gone.
        registered: Returns the registered nodes that are routed to, by pool.
        env: The environment variables, which name the API server of a pod's own cluster.
    """

    def __init__(
        self,
        on_membership: Callable[[MembershipDelta], None],
        registered: Callable[[], Mapping[str, tuple[Node, ...]]] = lambda: _NO_NODES,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._on_membership = on_membership
        self._registered = registered
        self._env = env
        self._own: frozenset[Endpoint] = frozenset()
        """Addresses on which the gateway itself listens."""
        self._pools: dict[str, Pool] = {}
        self._tasks: dict[str, tuple[Discovery, asyncio.Task[None]]] = {}
        self._answers: dict[str, SourceAnswer] = {}
        self._found: dict[str, tuple[FoundNode, ...]] = {}
        """The nodes of each pool's source, also those at addresses of other nodes."""
        self._refused: dict[str, dict[str, str]] = {}
        """Reasons by pool and address."""
        self._routed: dict[str, dict[str, Node]] = {}
        """The nodes that were passed on, by pool and node id."""

    def reload(self, settings: Settings) -> None:
        """Look for the nodes of this configuration's pools. A source that stays keeps what it found."""
        self._own = frozenset(settings.own_addresses)
        self._pools = {pool.name: pool for pool in settings.pools}
        wanted = {pool.name: pool.discover for pool in settings.pools if pool.discover is not None}
        for name, (discovery, task) in list(self._tasks.items()):
            if wanted.get(name) != discovery:
                task.cancel()
                for known in (self._tasks, self._answers, self._found, self._refused):
                    known.pop(name, None)
        for name, discovery in wanted.items():
            if name not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._follow(name, discovery), name=f"looking for nodes of {name}")
                self._tasks[name] = (discovery, task)
            elif name in self._answers:
                self._read_answer(name, discovery)
        self._pass_on()

    async def stop(self) -> None:
        """Stop looking."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def snapshot(self) -> MembershipDelta | None:
        """Return all nodes that were passed on as additions; None: there are none."""
        joined = {pool: tuple(nodes.values()) for pool, nodes in self._routed.items() if nodes}
        return MembershipDelta(joined=joined, left={}) if joined else None

    def with_found(self, pools: Iterable[Pool]) -> Iterator[Pool]:
        """Yield these pools with the nodes that were found, and take requests, beside those that are listed."""
        for pool in pools:
            found = self._routed.get(pool.name)
            yield replace(pool, nodes=(*pool.nodes, *found.values())) if found else pool

    def get_found(self) -> dict[str, tuple[FoundNode, ...]]:
        """Return all nodes that were found and have no other node at their address, by pool."""
        return {pool: tuple(self._without_taken(pool, self._registered())) for pool in self._found}

    def status(self) -> dict[str, DiscoveryStatus]:
        """Return the state of every source, by pool."""
        return {pool: self._get_status(pool, discovery) for pool, (discovery, _) in self._tasks.items()}

    def _get_status(self, pool: str, discovery: Discovery) -> DiscoveryStatus:
        answer = self._answers.get(pool, SourceAnswer({}))
        ready = sum(each.state is NodeState.READY for each in self._found.get(pool, ()))
        return DiscoveryStatus(discovery.source.title, ready, answer.problem, answer.remedy, self._refused.get(pool, {}))

    async def _follow(self, pool: str, discovery: Discovery) -> None:
        """Follow a pool's source until cancelled."""
        wanted = discovery.source
        source: NodeSource = DnsSource(wanted) if isinstance(wanted, DnsName) else KubernetesSource(wanted, self._env)
        while True:
            try:
                async with aclosing(source.follow()) as answers:
                    async for answer in answers:
                        self._take_answer(pool, discovery, answer)
            except Exception as error:  # noqa: BLE001 - last guard: a source that fails must not end the search
                _log.exception("looking for nodes of pool %s failed", pool)
                self._take_answer(
                    pool, discovery, replace(self._answers.get(pool, SourceAnswer({})), problem=str(error), remedy="see the log")
                )
            await asyncio.sleep(_AFTER_FAULT_S)

    def _take_answer(self, pool: str, discovery: Discovery, answer: SourceAnswer) -> None:
        before = self._answers.get(pool)
        self._answers[pool] = answer
        if before is None or before.endpoints != answer.endpoints:
            self._read_answer(pool, discovery)
        self._log_problem(pool, "" if before is None else before.problem, answer)
        self._pass_on()

    def _read_answer(self, pool: str, discovery: Discovery) -> None:
        """Make nodes of what the source found, as far as they may be nodes of this pool."""
        endpoints = self._answers[pool].endpoints
        most = max((found.weight for found in endpoints.values()), default=0)
        nodes, refused = [], {}
        for endpoint, found in endpoints.items():
            try:
                check_endpoint(endpoint, found, self._own)
                node = make_found_node(self._pools[pool], discovery, endpoint, found, most)
            except ValueError as error:
                refused[str(endpoint)] = str(error)
            else:
                nodes.append(FoundNode(node, found.state, discovery.source.title))
        for address, reason in refused.items():
            if self._refused.get(pool, {}).get(address) != reason:
                _log.warning("pool %s: %s at %s is refused as a node: %s", pool, address, discovery.source.title, reason)
        self._found[pool], self._refused[pool] = tuple(nodes), refused

    def _log_problem(self, pool: str, before: str, answer: SourceAnswer) -> None:
        """Log a problem once, and its end."""
        if answer.problem and answer.problem != before:
            _log.warning("nodes of pool %s: %s; %s (%d nodes)", pool, answer.problem, answer.remedy, len(self._found[pool]))
        elif before and not answer.problem:
            _log.info("nodes of pool %s are found again", pool)

    def _pass_on(self) -> None:
        delta = self.take_changes()
        if delta is not None:
            self._on_membership(delta)

    def take_changes(self) -> MembershipDelta | None:
        """Return what has changed since the last call; None: nothing."""
        if not self._found and not self._routed:
            return None
        registered = self._registered()
        joined: dict[str, tuple[Node, ...]] = {}
        left: dict[str, tuple[str, ...]] = {}
        for pool in self._found.keys() | self._routed.keys():
            before = self._routed.get(pool, {})
            ready = (found.node for found in self._without_taken(pool, registered) if found.state is NodeState.READY)
            after = {node.id: node for node in ready}
            new = tuple(node for node_id, node in after.items() if before.get(node_id) != node)
            gone = tuple(node_id for node_id, node in before.items() if after.get(node_id) != node)
            if new:
                joined[pool] = new
                _log.info("pool %s: found %s", pool, ", ".join(node.id for node in new))
            if gone:
                left[pool] = gone
                _log.info("pool %s: no longer found: %s", pool, ", ".join(gone))
            self._routed[pool] = after
        return MembershipDelta(joined=joined, left=left) if joined or left else None

    def _without_taken(self, pool: str, registered: Mapping[str, tuple[Node, ...]]) -> Iterator[FoundNode]:
        """Yield what was found for a pool, except at addresses of its listed and registered nodes."""
        listed = self._pools[pool].nodes if pool in self._pools else ()
        taken = {node.endpoint for node in (*listed, *registered.get(pool, ()))}
        return (found for found in self._found.get(pool, ()) if found.node.endpoint not in taken)


def check_endpoint(endpoint: Endpoint, found: FoundEndpoint, own: Iterable[Endpoint]) -> None:
    """Check that a node may be where a source found one.

    Raises:
        ValueError: the source has found a problem, the address is unspecified, link-local or multicast, or the gateway listens there.
    """
    if found.problem:
        raise ValueError(found.problem)
    host = ip_address(endpoint.host)
    plain = (host.ipv4_mapped if isinstance(host, IPv6Address) else None) or host
    if plain.is_unspecified:
        raise ValueError("an unspecified address can't be connected to")
    if plain.is_multicast:
        raise ValueError("it is a multicast address")
    if is_link_local(endpoint):
        raise ValueError("it is a link-local address, such as a cloud's metadata service")
    if is_own(endpoint, own):
        raise ValueError("the gateway itself listens there")


def make_found_node(pool: Pool, discovery: Discovery, endpoint: Endpoint, found: FoundEndpoint, most: int) -> Node:
    """Return the node of an endpoint. Its id is the pool and the address; its slots are in proportion to its weight.

    Args:
        pool: Its pool.
        discovery: What is not stated about it.
        endpoint: Its address.
        found: What the source says of it.
        most: The highest weight of the source's endpoints.

    Raises:
        ValueError: what the source states is malformed, or the pool takes no such node.
    """
    template = discovery.versions.get(found.stated.get("version", ""), discovery.template)
    slots = max(1, round(template.max_concurrency * found.weight / most)) if most else template.max_concurrency
    node_id = f"{pool.name}-{endpoint.host.replace(':', '-')}-{endpoint.port}"
    node = replace(template, **{"id": node_id, "endpoint": endpoint, "max_concurrency": slots, **found.stated})
    registration = Registration(node=node, engine=pool.engine, pool=pool.name)
    NodeForm.of(registration).to_registration()
    mismatch = find_mismatch(registration, pool)
    if mismatch:
        raise ValueError(mismatch)
    return node

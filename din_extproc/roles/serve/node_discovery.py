"""The nodes that are found where they already are: the accounting process looks for them and reports changes.

Rule: a listed node and a registered node of a pool win over one found at the same address, which comes back when they go.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Discovery, Endpoint, Node, Pool
from din_extproc.edge.discovery.dns import DnsSource
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_NO_NODES: Mapping[str, tuple[Node, ...]] = {}


class DiscoveryStatus(Struct, frozen=True):
    """The state of a pool's source, for the admin page."""

    source: str
    nodes: int
    """Nodes of the last good answer."""
    problem: str
    """Reason why the last look-up failed; "": it succeeded."""


class NodeDiscovery:
    """Looks for the nodes of pools that have `discover`.

    Args:
        on_membership: Called with the nodes that were found or are gone.
        registered: Returns the registered nodes that are routed to, by pool.
    """

    def __init__(
        self, on_membership: Callable[[MembershipDelta], None], registered: Callable[[], Mapping[str, tuple[Node, ...]]] = lambda: _NO_NODES
    ) -> None:
        self._on_membership = on_membership
        self._registered = registered
        self._pools: dict[str, Pool] = {}
        self._tasks: dict[str, tuple[Discovery, asyncio.Task[None]]] = {}
        self._found: dict[str, tuple[Node, ...]] = {}
        """The nodes found by each pool's source, also at addresses of other nodes."""
        self._routed: dict[str, dict[str, Node]] = {}
        """The nodes that were passed on, by pool and node id."""
        self._problems: dict[str, str] = {}

    def reload(self, settings: Settings) -> None:
        """Look for the nodes of this configuration's pools. A source that stays keeps what it found."""
        self._pools = {pool.name: pool for pool in settings.pools}
        wanted = {pool.name: pool.discover for pool in settings.pools if pool.discover is not None}
        for name, (discovery, task) in list(self._tasks.items()):
            if wanted.get(name) != discovery:
                task.cancel()
                for known in (self._tasks, self._found, self._problems):
                    known.pop(name, None)
        for name, discovery in wanted.items():
            if name not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._follow(name, discovery), name=f"looking for nodes of {name}")
                self._tasks[name] = (discovery, task)
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
        """Yield these pools with the nodes that were found beside those that are listed."""
        for pool in pools:
            found = self._routed.get(pool.name)
            yield replace(pool, nodes=(*pool.nodes, *found.values())) if found else pool

    def status(self) -> dict[str, DiscoveryStatus]:
        """Return the state of every source, by pool."""
        return {
            pool: DiscoveryStatus(discovery.dns.name, len(self._found.get(pool, ())), self._problems.get(pool, ""))
            for pool, (discovery, _) in self._tasks.items()
        }

    async def _follow(self, pool: str, discovery: Discovery) -> None:
        """Look for a pool's nodes until cancelled."""
        source = DnsSource(discovery.dns)
        while True:
            try:
                answer = await source.look()
                self._found[pool] = tuple(make_found_nodes(pool, discovery.template, answer.weights))
                pause_s, problem = answer.pause_s, answer.problem
            except Exception as error:  # noqa: BLE001 - last guard: a source that fails must not end the search
                _log.exception("looking for nodes of pool %s failed", pool)
                pause_s, problem = discovery.dns.every_s, str(error)
            self._report(pool, problem)
            self._pass_on()
            await asyncio.sleep(pause_s)

    def _report(self, pool: str, problem: str) -> None:
        """Log a problem once, and its end."""
        before = self._problems.get(pool, "")
        self._problems[pool] = problem
        if problem and problem != before:
            _log.warning(
                "nodes of pool %s: %s; the last good answer stays in use (%d nodes)", pool, problem, len(self._found.get(pool, ()))
            )
        elif before and not problem:
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
            listed = self._pools[pool].nodes if pool in self._pools else ()
            taken = {node.endpoint for node in (*listed, *registered.get(pool, ()))}
            after = {node.id: node for node in self._found.get(pool, ()) if node.endpoint not in taken}
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


def make_found_nodes(pool: str, template: Node, weights: Mapping[Endpoint, int]) -> Iterator[Node]:
    """Yield a node per endpoint. Its id is the pool and the address; its slots are in proportion to its weight."""
    most = max(weights.values(), default=0)
    for endpoint, weight in weights.items():
        slots = max(1, round(template.max_concurrency * weight / most)) if most else template.max_concurrency
        yield replace(template, id=f"{pool}-{endpoint.host.replace(':', '-')}-{endpoint.port}", endpoint=endpoint, max_concurrency=slots)

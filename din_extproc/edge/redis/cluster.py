"""Client for Redis Cluster: one link per master; each command goes to the master that owns the slot of its key.

Invariant: redis-py reads the slot map, the links carry the commands, and MOVED and ASK redirects are transparent to the caller.
"""

import asyncio
import contextlib
import logging
from typing import Any, Final

from redis.asyncio.cluster import RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.connection import Argument, CommandRetry, LuaScript
from din_extproc.edge.redis.link import Link, LinkState, Locate

_log = logging.getLogger(__name__)

_REFRESH_S: Final = 1.0
_QUERY_TIMEOUT_S: Final = 1.0
_OTHER_MASTER: Final = ("MOVED", "ASK")


class ClusterLinks:
    """Links to all masters of a cluster. Call `start` before use and `close` at the end.

    Args:
        seeds: Some cluster members; the connection options of the first apply to all.
        scripts: Scripts to load on every new connection.
        timeout_ms: Time without a reply after which a link is closed.
        max_in_flight: Maximum unanswered commands per master.
    """

    def __init__(
        self, seeds: tuple[Address, ...], scripts: tuple[LuaScript, ...], *, timeout_ms: int = 50, max_in_flight: int = 4096
    ) -> None:
        self._seeds = seeds
        self._scripts = scripts
        self._timeout_ms = timeout_ms
        self._max_in_flight = max_in_flight
        self._links: dict[tuple[str, int], Link] = {}
        self._owners: dict[int, Link] = {}
        """The link of each slot."""
        self._stale = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reason = "the cluster's masters are not known yet"

    @property
    def state(self) -> LinkState:
        """Return the state of a link that is down or has a warning, if there is one; otherwise `up`."""
        states = [link.state for link in self._links.values()]
        down = [state for state in states if not state.up]
        if states:
            return next((state for state in (*down, *states) if not state.up or state.warning), states[0])
        return LinkState(up=False, since=0.0, reason=self._reason, address=str(self._seeds[0]))

    async def start(self, wait_s: float = 1.0) -> bool:
        """Find the masters and connect to each. Return whether all are connected within about `wait_s` seconds; attempts continue."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._refresh()
        self._task = asyncio.get_running_loop().create_task(self._keep_fresh(), name="redis cluster")
        return self.state.up

    async def close(self) -> None:
        """Close every link."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        links, self._links, self._owners = self._links, {}, {}
        for link in links.values():
            await link.close()

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command whose second word is its key. Raise as `Link.call` does."""
        key = command[1]
        return self._find_owner(key if isinstance(key, bytes) else str(key).encode()).call(*command)

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script on the master of its first key. Raise as `Link.run` does."""
        start = tail.index(b"\n", tail.index(b"\n", tail.index(b"\n") + 1) + 1) + 1
        return self._find_owner(tail[start : tail.index(b"\r", start)]).run(script, count, tail)

    def _find_owner(self, key: bytes) -> Link:
        owner = self._owners.get(key_slot(key))
        if owner is None:
            self._stale.set()
            raise LimitsUnavailable(self._reason)
        return owner

    def _redirect(self, error: str, future: asyncio.Future[Any], deadline: float, run: CommandRetry) -> bool:
        """Follow a redirect such as `MOVED 3999 10.0.0.7:6379`, and refresh the slot map."""
        kind, *rest = error.split(" ")
        if kind == "CLUSTERDOWN":
            self._stale.set()
        if kind not in _OTHER_MASTER or len(rest) < 2:  # noqa: PLR2004 - slot and address
            return False
        if kind == "MOVED":
            self._stale.set()
        host, _, port = rest[1].rpartition(":")
        link = self._links.get((host, int(port)))
        if link is None or not link.state.up:
            return False
        link.resume(future, deadline, run, asking=kind == "ASK")
        return True

    def _on_change(self, state: LinkState) -> None:
        if not state.up:
            self._stale.set()

    async def _keep_fresh(self) -> None:
        while True:
            if self.state.up:
                await self._stale.wait()
            await asyncio.sleep(_REFRESH_S / 2)
            self._stale.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        """Update the slot map from the first reachable member."""
        for seed in (*self._seeds, *(self._seeds[0].with_host(*place) for place in self._links)):
            try:
                async with asyncio.timeout(_QUERY_TIMEOUT_S):
                    owners = await _owners(seed)
            except (RedisError, RedisClusterException, OSError) as error:
                self._reason = f"no member of the cluster says who owns what: {str(error) or type(error).__name__}"
            else:
                await self._apply_owners(owners)
                return
        _log.info("redis cluster: %s", self._reason)

    async def _apply_owners(self, owners: dict[int, tuple[str, int]]) -> None:
        places = set(owners.values())
        fresh = {place: self._get_link(place) for place in places - self._links.keys()}
        gone = [self._links.pop(place) for place in self._links.keys() - places]
        self._links |= fresh
        await asyncio.gather(*(link.start() for link in fresh.values()))
        self._owners = {number: self._links[place] for number, place in owners.items()}
        for link in gone:
            await link.close()

    def _get_link(self, place: tuple[str, int]) -> Link:
        return Link(
            _make_fixed_locator(self._seeds[0].with_host(*place)),
            self._scripts,
            timeout_ms=self._timeout_ms,
            max_in_flight=self._max_in_flight,
            redirect=self._redirect,
            on_change=self._on_change,
        )


def _make_fixed_locator(address: Address) -> Locate:
    async def locate() -> Address:
        return address

    return locate


async def _owners(seed: Address) -> dict[int, tuple[str, int]]:
    """Return the master of every slot, as reported by one member."""
    cluster = RedisCluster(
        host=seed.host,
        port=seed.port,
        username=seed.username or None,
        password=seed.password or None,
        socket_timeout=_QUERY_TIMEOUT_S,
        socket_connect_timeout=_QUERY_TIMEOUT_S,
    )
    try:
        await cluster.initialize()
        slots = cluster.nodes_manager.slots_cache
        return {number: (str(nodes[0].host), int(nodes[0].port)) for number, nodes in slots.items()}
    finally:
        closing = asyncio.ensure_future(cluster.aclose())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # half closed, its connections would stay open
            raise

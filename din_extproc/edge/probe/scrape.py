"""Scraper of the metrics of nodes without an agent, for the scheduler's load model.

Invariant: one scrape per node and a limited number in total run at a time, independently of each other. Nodes without usable metrics are
scraped with increasing intervals.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

import aiohttp
from msgspec import Struct

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.node.engine_probe import EngineProbe
from din_extproc.southbound.load import SOURCES, EngineLoad, add_adapters, add_load

_AT_ONCE = 32
_JITTER = 0.2
_LONGEST_PAUSE_S = 60.0
_NOTHING = EngineLoad()


class ScrapeTarget(Struct, frozen=True):
    """A node and its metrics page."""

    node_id: str
    engine: str
    url: str
    models_url: str = ""
    """Base URL of its list of models; "": the list is not read."""

    @classmethod
    def of(cls, node: Node, pool: Pool) -> "ScrapeTarget":
        """Return the default metrics page of the pool's kind of engine, and the list of models if the pool has adapters."""
        source = SOURCES[pool.engine]
        url = f"http://{Endpoint(node.endpoint.host, source.port or node.endpoint.port)}{source.path}"
        return cls(node.id, pool.engine, url, f"http://{node.endpoint}" if pool.adapters.names else "")


class Scraper:
    """Scrapes nodes periodically.

    Args:
        on_load: Called with the reading of a node.
    """

    def __init__(self, on_load: Callable[[dict[str, HeartbeatReading]], None]) -> None:
        self._every_s = 0.0
        self._on_load = on_load
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[ScrapeTarget, asyncio.Task[None]] = {}
        self.latest: dict[str, HeartbeatReading] = {}
        """Latest readings by node id."""

    def set_targets(self, targets: Iterable[ScrapeTarget], every_s: float) -> None:
        """Replace the targets.

        Args:
            targets: New targets.
            every_s: Interval per node, with 20 % jitter. 0: no node is scraped.
        """
        self._every_s = every_s
        wanted = set(targets) if every_s else set()
        for target in self._tasks.keys() - wanted:
            self._tasks.pop(target).cancel()
            self.latest.pop(target.node_id, None)
        if wanted and self._session is None:
            self._session = aiohttp.ClientSession()
        for target in wanted - self._tasks.keys():
            assert self._session is not None  # noqa: S101 - made two lines above
            task = self._scrape(target, self._session)
            self._tasks[target] = asyncio.get_running_loop().create_task(task, name=f"reading {target.url}")

    async def stop(self) -> None:
        """Stop scraping."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _scrape(self, target: ScrapeTarget, session: aiohttp.ClientSession) -> None:
        probe = EngineProbe(session, target.engine, target.url, SystemClock.monotonic)
        sequence, pause = 0, self._every_s
        await asyncio.sleep(self._every_s * random.random())  # noqa: S311 - so that nodes are not asked in step
        while True:
            async with self._slots:
                look = await (probe.read_with_adapters(target.models_url) if target.models_url else probe.read())
            if look.problem or (look.load == _NOTHING and look.names is None):
                pause = min(2 * pause, max(_LONGEST_PAUSE_S, self._every_s))
            else:
                sequence, pause = sequence + 1, self._every_s
                own = Heartbeat(state=NodeState.READY, sequence=sequence)
                beat = add_load(look.load, look.rates, add_adapters(look.names, target.engine, own))
                self.latest[target.node_id] = HeartbeatReading(beat, look.at)
                self._on_load({target.node_id: self.latest[target.node_id]})
            await asyncio.sleep(pause * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - likewise

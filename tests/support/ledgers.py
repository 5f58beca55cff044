"""Ledgers for tests: the in-memory ledger and real Redis servers, on a clock that the test moves."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from din_extproc.admit.ledger import Claim, Denied, Granted, Ledger
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis import address
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from tests.support.servers import RedisServer

NOON_MS = 1_767_268_800_000
"""A whole minute, 2026-01-01T12:00:00Z."""


class Counter:
    """A ledger and its clock, with short methods for the usual claim."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._now_ms = NOON_MS
        self._requests = 0

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @now_ms.setter
    def now_ms(self, value: int) -> None:
        self._now_ms = value
        if isinstance(self.ledger, RedisLedger):
            self.ledger.read_clock(value)

    async def ask(
        self, *limits: RateLimits, tokens: int = 1, tenant: str = "finance", request_id: str = "", lease_ms: int = 30_000
    ) -> Granted | Denied:
        """Reserve against `tenant`, `model:m`, `key:k` with these limits."""
        self._requests += 1
        budgets = tuple(Budget(scope, limit) for scope, limit in zip(("tenant", "model:m", "key:k"), limits, strict=False))
        return await self.ledger.reserve(Claim(request_id or f"r{self._requests}", tenant, budgets, tokens, lease_ms))

    async def granted(self, count: int, *limits: RateLimits, **claim: Any) -> int:
        """Return how many of `count` requests are granted."""
        return sum([isinstance(await self.ask(*limits, **claim), Granted) for _ in range(count)])


@contextlib.asynccontextmanager
async def linked(url: str, **options: Any) -> AsyncIterator[Link]:
    """Return a link that is up."""
    where = address.parse_redis_url(url)

    async def locate() -> address.Address:
        return where

    link = Link(locate, SCRIPTS, **{"timeout_ms": 5000, **options})
    assert await link.start(wait_s=5), link.state.reason
    try:
        yield link
    finally:
        await link.close()


@contextlib.asynccontextmanager
async def counter(kind: str, servers: dict[str, RedisServer]) -> AsyncIterator[Counter]:
    """Return the in-memory ledger, or an emptied Redis of that flavour."""
    if kind == "twin":
        subject = Counter(LocalLedger(lambda: subject.now_ms))
        yield subject
        return
    async with linked(servers[kind].url) as link:
        await link.call("FLUSHALL")
        subject = Counter(RedisLedger(link))
        subject.now_ms = NOON_MS
        yield subject

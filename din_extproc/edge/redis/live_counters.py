"""Current usage of tenants' budgets, read from the counters in Redis.

Invariant: it is read-only, reads many tenants in one write, and uses the clock of Redis.
"""

import asyncio
import struct
from collections.abc import Iterable

from msgspec import Struct

from din_extproc.admit.budget import UNITS_PER_TOKEN, WINDOW_SECONDS, BudgetCounters
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.ledger import Runner

_HEADER = struct.Struct(">ddII")
_SLOT_BYTES = 3


class BudgetUsage(Struct, frozen=True):
    """Usage of one budget."""

    requests: int
    """Requests in the window."""
    tokens: int
    """Tokens charged and not yet drained."""
    streams: int


class LiveCounters:
    """Reader of the counters of one network. Every method may raise `LimitsUnavailable`.

    Args:
        runner: The started client.
        names: Prefixes of keys.
    """

    def __init__(self, runner: Runner, names: Names) -> None:
        self._runner = runner
        self._names = names

    async def read_usage(self, budgets: Iterable[tuple[str, Budget]]) -> list[BudgetUsage]:
        """Return the usage of budgets, each given with its tenant."""
        seconds, micros = await self._runner.call("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        readings = [(budget, *self._read_budget(tenant, budget, now_ms)) for tenant, budget in budgets]
        return [_make_usage(budget, await counted, await held, now_ms) for budget, counted, held in readings]

    def _read_budget(self, tenant: str, budget: Budget, now_ms: int) -> tuple[asyncio.Future[bytes | None], asyncio.Future[int]]:
        prefix, scope = self._names.shared if budget.shared else self._names.of(tenant), budget.scope.encode()
        counted = self._runner.call("GET", prefix + b"count:" + scope)
        return counted, self._runner.call("ZCOUNT", prefix + b"lease:" + scope, f"({now_ms}", "+inf")


def read_counters(value: bytes) -> BudgetCounters:
    """Decode a counter in the format of `lua/admit.lua`."""
    used, at_ms, head, _ = _HEADER.unpack_from(value)
    ring = value[_HEADER.size :]
    seconds = range(head - WINDOW_SECONDS + 1, head + 1) if ring else ()
    counts = [(second, int.from_bytes(ring[second % WINDOW_SECONDS * _SLOT_BYTES :][:_SLOT_BYTES], "big")) for second in seconds]
    return BudgetCounters(int(used), int(at_ms), tuple([pair for pair in counts if pair[1]]))


def _make_usage(budget: Budget, value: bytes | None, streams: int, now_ms: int) -> BudgetUsage:
    counters = (BudgetCounters() if value is None else read_counters(value)).slide_window(now_ms)
    tpm = budget.limits.tpm
    used = 0 if tpm is None else counters.drain(tpm, now_ms).used
    return BudgetUsage(counters.total, -(-used // UNITS_PER_TOKEN), streams)

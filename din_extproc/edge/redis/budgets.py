"""The counters of budgets in Redis, as operators and tenants see them. Requests change them by the scripts of the ledger.

Invariant: reading changes nothing, and the clock of Redis decides which period is current.
"""

import asyncio
import struct
from collections.abc import Sequence
from typing import Final

from din_extproc.admit.spending import SpendingCounters
from din_extproc.domain.spending import SpendingWindow
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load_script

TOP_UP: Final = load_script("top_up")
_FIELDS: Final = struct.Struct(">14d")
_ALERT_MS: Final = 40 * 86_400_000


class BudgetStore:
    """Reader and operator of one network's budgets. Every method may raise `LimitsUnavailable`.

    Args:
        runner: The started client.
        names: Prefixes of keys.
    """

    def __init__(self, runner: Runner, names: Names) -> None:
        self._runner = runner
        self._names = names

    async def read(self, windows: Sequence[tuple[str, SpendingWindow]]) -> list[tuple[SpendingCounters, int]]:
        """Return the counters in their current period, each given with its tenant, and the time of Redis in milliseconds."""
        seconds, micros = await self._runner.call("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        values: list[bytes | None] = await asyncio.gather(*[self._runner.call("GET", self._key(*each)) for each in windows])
        decoded = (SpendingCounters() if value is None else SpendingCounters(*map(int, _FIELDS.unpack(value))) for value in values)
        return [(counters.advance(window, now_ms), now_ms) for (_, window), counters in zip(windows, decoded, strict=True)]

    async def top_up(self, tenant: str, window: SpendingWindow, *, tokens: int, cost: int, reset: bool) -> None:
        """Add to what may be spent in the current period. `reset`: what was spent is added as well."""
        key, starts = self._key(tenant, window), struct.pack(">3d", *window.starts)
        await self._runner.run(TOP_UP, *bulks(1, key, "", starts, tokens, cost, int(reset)))

    async def claim_alert(self, tenant: str, window: SpendingWindow, start_ms: int, level: int) -> bool:
        """Return whether this call is the first of all replicas for the level in this period and with this limit."""
        key = b"%b:alert:%d:%d:%d:%d" % (self._key(tenant, window), level, start_ms, window.tokens, window.cost)
        return await self._runner.call("SET", key, "1", "NX", "PX", _ALERT_MS) is not None

    def _key(self, tenant: str, window: SpendingWindow) -> bytes:
        prefix = self._names.shared if window.shared else self._names.of(tenant)
        return b"%bspend:%b" % (prefix, window.scope.encode())

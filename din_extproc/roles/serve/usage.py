"""The usage of tenants, from finished exchanges to charge-back.

Rule: counts go to Redis every second in numbered split_by_day; while Redis can't be reached they are kept and sent again.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.price import PriceList, format_money
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.edge.redis.usage import KEPT_DAYS, USAGE, UsagePortion, UsageStore, split_by_day
from din_extproc.observe.usage_book import SUMS, UsageBook, UsageKey, UsageTotals, group_usage
from din_extproc.roles.operate.unknown_tenant import UnknownTenant, unknown_tenant_message
from din_extproc.settings.settings import Settings

_TIMEOUT_MS = 5000


class UsageRecorder:
    """Writes the usage that this replica counts to Redis.

    Args:
        link: Runs Redis commands.
        network: The network of the usage.
    """

    def __init__(self, link: Runner, network: str) -> None:
        self._book = UsageBook()
        self._store = UsageStore(link, network)
        self._replica = f"{socket.gethostname()}:{os.getpid()}:{time.time_ns():x}"
        self._unsaid: deque[UsagePortion] = deque()
        self._number = 1
        self._publishing = asyncio.Lock()

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Count a settled exchange."""
        self._book.on_exchange(record)

    async def flush(self) -> None:
        """Write the counts to Redis. What fails is sent again under the same number, so that it counts once."""
        async with self._publishing:
            if not self._unsaid:
                self._unsaid.extend(split_by_day(self._book.take_totals(), self._number))
                self._number += len(self._unsaid)
            with contextlib.suppress(LimitsUnavailable):
                while self._unsaid:
                    await self._store.add(self._replica, self._unsaid[0])
                    self._unsaid.popleft()


USAGE_COLUMNS = (*(name for name in SUMS if name not in {"cost", "saved"}), "cost", "saved", "currency")
"""Columns of a row, after those that it is grouped by."""


def fetch_usage_rows(settings: Settings, first: date, last: date, tenant: str, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per group, both days included. `tenant` "": all tenants. `by`: names of `DIMENSIONS`.

    Raises:
        LimitsUnavailable: Redis does not answer.
        UnknownTenant: neither the configuration nor the usage has this tenant.
    """
    used = asyncio.run(_fetch_usage(settings, first, last, tenant))
    if tenant and not used and tenant not in {each.id for each in settings.tenants}:
        raise UnknownTenant(unknown_tenant_message(settings, tenant))
    return [dict(zip(by, group, strict=True)) | priced_sums(sums, settings.prices) for group, sums in group_usage(used, by).items()]


def priced_sums(sums: UsageTotals, prices: PriceList) -> dict[str, Any]:
    """Return sums as plain values, with amounts of money as decimal numbers in a text."""
    money = {"cost": format_money(sums.cost), "saved": format_money(sums.saved), "currency": prices.currency}
    return msgspec.structs.asdict(sums) | money


async def _fetch_usage(settings: Settings, first: date, last: date, tenant: str) -> list[tuple[UsageKey, UsageTotals]]:
    link = make_carrier(settings.store.url.get_secret_value(), (USAGE,), timeout_ms=_TIMEOUT_MS)
    try:
        if not await link.start():
            raise LimitsUnavailable(link.state.reason)
        store = UsageStore(link, settings.network)
        days = [await store.read_day(day.isoformat()) for day in _list_days(first, last)]
        return [row for day in days for row in day.items() if tenant in {"", row[0].tenant}]
    finally:
        await link.close()


def _list_days(first: date, last: date) -> Iterable[date]:
    """Return the days of the range for which usage can exist; clocks of replicas may be a day ahead."""
    today = datetime.now(UTC).date()
    first, last = max(first, today - timedelta(days=KEPT_DAYS + 1)), min(last, today + timedelta(days=1))
    return (first + timedelta(days=number) for number in range((last - first).days + 1))

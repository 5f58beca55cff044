"""The usage of tenants, from finished exchanges to charge-back.

Rule: counts go to Redis every second in numbered portions; while Redis can't be reached they are kept and sent again.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.topology import carrier
from din_extproc.edge.redis.usage import COLUMNS, KEPT_DAYS, KEY_COLUMNS, USAGE, UsagePortion, UsageStore, as_dict, portions, sum_over_keys
from din_extproc.observe.usage_book import UsageBook
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
        self._saying = asyncio.Lock()

    def finished(self, record: ExchangeRecord) -> None:
        """Count a settled exchange."""
        self._book.finished(record)

    async def flush(self) -> None:
        """Write the counts to Redis. What fails is sent again under the same number, so that it counts once."""
        async with self._saying:
            if not self._unsaid:
                self._unsaid.extend(portions(self._book.take(), self._number))
                self._number += len(self._unsaid)
            with contextlib.suppress(LimitsUnavailable):
                while self._unsaid:
                    await self._store.add(self._replica, self._unsaid[0])
                    self._unsaid.popleft()


def usage_rows(settings: Settings, first: date, last: date, tenant: str, *, by_key: bool = False) -> list[dict[str, Any]]:
    """Return rows per day, tenant and model, both days included. `tenant` "": all tenants. `by_key`: a row per API key.

    Raises:
        LimitsUnavailable: Redis does not answer.
        UnknownTenant: neither the configuration nor the usage has this tenant.
    """
    rows = asyncio.run(_used(settings, first, last, tenant, by_key=by_key))
    if tenant and not rows and tenant not in {each.id for each in settings.tenants}:
        raise UnknownTenant(unknown_tenant_message(settings, tenant))
    return rows


async def _used(settings: Settings, first: date, last: date, tenant: str, *, by_key: bool) -> list[dict[str, Any]]:
    link = carrier(settings.store.url.get_secret_value(), (USAGE,), timeout_ms=_TIMEOUT_MS)
    try:
        if not await link.start():
            raise LimitsUnavailable(link.state.reason)
        store = UsageStore(link, settings.network)
        found: list[dict[str, Any]] = []
        for day in _days(first, last):
            sums = await store.day(day.isoformat())
            rows = sorted((sums if by_key else sum_over_keys(sums)).items(), key=lambda row: (row[0].tenant, row[0].model, row[0].key_id))
            columns = KEY_COLUMNS if by_key else COLUMNS
            whole = (as_dict(line, each) for line, each in rows if tenant in {"", line.tenant})
            found += [{column: row[column] for column in columns} for row in whole]
        return found
    finally:
        await link.close()


def _days(first: date, last: date) -> Iterable[date]:
    """Return the days of the range for which usage can exist; clocks of replicas may be a day ahead."""
    today = datetime.now(UTC).date()
    first, last = max(first, today - timedelta(days=KEPT_DAYS + 1)), min(last, today + timedelta(days=1))
    return (first + timedelta(days=number) for number in range((last - first).days + 1))

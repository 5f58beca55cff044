"""The report of a tenant about itself: `GET /v1/usage`.

Rule: a tenant sees its own numbers and what all share of its budgets, never another tenant's.
"""

import time
from datetime import UTC, date, datetime, timedelta
from typing import Any

from din_extproc.admit.budget_status import budget_status
from din_extproc.admit.keys import Authenticated
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.budgets import BudgetStore
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.live_counters import LiveCounters
from din_extproc.edge.redis.usage import UsageStore
from din_extproc.observe.usage_book import UsageKey, UsageTotals, group_usage
from din_extproc.roles.serve.usage import priced_sums
from din_extproc.settings.settings import Settings

_KEPT_S = 5.0
"""Time that a day's usage is cached, so that frequent requests of tenants cost Redis little."""
_COLUMNS = ("day", "key", "identity", "model")


class TenantReports:
    """Builds reports, for the worker of this process.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
    """

    def __init__(self, settings: Settings, link: Runner) -> None:
        names = Names(settings.network, settings.store.one_slot)
        self._live, self._budgets, self._usage = LiveCounters(link, names), BudgetStore(link, names), UsageStore(link, settings.network)
        self._days: dict[date, tuple[float, dict[UsageKey, UsageTotals]]] = {}
        self.settings = settings

    async def report(self, who: Authenticated, account: str, days: int) -> dict[str, Any]:
        """Return limits, budgets and usage of the last days as plain values.

        Raises:
            LimitsUnavailable: Redis does not answer.
        """
        limits, currency = who.tenant.limits, self.settings.prices.currency
        [used] = await self._live.read_usage([(account, Budget("tenant", limits))])
        today = datetime.now(UTC).date()
        used_days = [await self._day(today - timedelta(days=number)) for number in range(days)]
        rows = [row for day in used_days for row in day.items() if row[0].tenant == account]
        return {
            "object": "usage",
            "tenant": account,
            "key": who.key.id,
            "limits": {
                "requests_per_minute": {"limit": limits.rpm, "used": used.requests},
                "tokens_per_minute": {"limit": limits.tpm, "used": used.tokens},
                "requests_in_flight": {"limit": limits.max_streams, "used": used.streams},
            },
            "budgets": await self._budget_rows(who, account, currency),
            "usage": [
                dict(zip(_COLUMNS, group, strict=True)) | priced_sums(sums, self.settings.prices)
                for group, sums in group_usage(rows, _COLUMNS).items()
            ],
        }

    async def _budget_rows(self, who: Authenticated, account: str, currency: str) -> list[Any]:
        budgets, at = self.settings.budgets, time.time()
        if budgets is None:
            return []
        models = sorted({model for pool in self.settings.pools for model in pool.models if who.tenant.may_use(model)})
        found = {
            scope: (budget, budget.window(scope, at))
            for model in models
            for budget in budgets.budgets
            if (scope := budget.scope_of(account, who.key.id, model)) is not None
        }
        counters = await self._budgets.read([(account, window) for _, window in found.values()])
        return [
            budget_status(budget, account, window, held, now_ms=now_ms, currency=currency)
            for (budget, window), (held, now_ms) in zip(found.values(), counters, strict=True)
        ]

    async def _day(self, day: date) -> dict[UsageKey, UsageTotals]:
        kept = self._days.get(day)
        now = time.monotonic()
        if kept is not None and now - kept[0] < _KEPT_S:
            return kept[1]
        self._days = {each: found for each, found in self._days.items() if now - found[0] < _KEPT_S}
        sums = await self._usage.read_day(day.isoformat())
        self._days[day] = (now, sums)
        return sums

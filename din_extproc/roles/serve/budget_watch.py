"""Watches the counters of budgets: metrics, warnings at 80 % and 100 %, and the orders of operators.

Rule: a warning is given once per period, by one replica; the request path knows nothing of it.
"""

import itertools
import logging
from collections.abc import Callable, Iterator

import msgspec

from din_extproc.admit.budget_status import budget_status
from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.admit.spending import SpendingCounters
from din_extproc.audit.records import BudgetOrder, Event
from din_extproc.domain.budget_status import BudgetStatus, counter_name
from din_extproc.domain.spending import EACH, SpendingBudget, SpendingWindow
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.http.budget_orders import BudgetForm
from din_extproc.edge.http.webhook import Webhook
from din_extproc.edge.redis.budgets import BudgetStore
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.ledger import Runner
from din_extproc.observe import instruments as of
from din_extproc.observe.families import Counts, Family
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_MOST = 10_000
"""Counters that are watched."""
LEVELS = (80, 100)
"""Per cent."""

Watched = tuple[SpendingBudget, str, SpendingWindow]
"""A budget, a tenant and the counter of its requests."""


class BudgetWatch:
    """The budgets of one network.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
        record_event: Records an event in the audit log.
    """

    def __init__(self, settings: Settings, link: Runner, record_event: Callable[[Event], None]) -> None:
        self._store = BudgetStore(link, Names(settings.network, settings.store.one_slot))
        self._record_event = record_event
        self._background: Background | None = None
        self._alerts = Counts(of.BUDGET_ALERTS)
        self._alerted: set[tuple[str, str, int, int]] = set()
        """Tenant, counter, period and level of the warnings that some replica has given."""
        self._rows: list[BudgetStatus] = []
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Watch the budgets of this configuration."""
        self._settings = settings
        self._callers = set[tuple[str, str, str]]()
        """Tenant, key and model of requests, those that are configured first."""
        hook = settings.budget_webhook
        self._webhook = None if hook is None else Webhook(hook.url, hook.secret.get_secret_value(), SystemClock.wall)
        if settings.budgets is None:
            return
        listed = [(tenant.id, [key.id for key in keys]) for tenant, keys in settings.keys]
        each_key = any(budget.key == EACH for budget in settings.budgets.budgets)
        models = sorted({model for pool in settings.pools for model in pool.models})
        named = [budget.key for budget in settings.budgets.budgets if budget.key not in {"", EACH}]
        callers = ((tenant, key, model) for tenant, keys in listed for key in (keys if each_key else named) or [""] for model in models)
        self._callers.update(itertools.islice(callers, _MOST))

    def start(self, background: Background) -> None:
        """Look at the counters periodically."""
        self._background = background
        background.every(_LOOK_S, "looking at budgets", self.look)

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Watch the counters of this exchange, too."""
        if record.tenant and record.model and self._settings.budgets is not None and len(self._callers) < _MOST:
            self._callers.add((record.tenant, record.key_id, record.model))

    async def look(self) -> None:
        """Read the counters and give warnings."""
        try:
            for watched, counters, row in await self._read(""):
                await self._warn(watched, counters, row)
        except LimitsUnavailable as error:
            _log.info("budgets can't be read: %s", error)

    async def collect_rows(self, tenant: str) -> list[BudgetStatus]:
        """Return how the budgets stand; those of one tenant, which are its own and those that all share, or all ("")."""
        return [row for _, _, row in await self._read(tenant)]

    async def apply_order(self, form: BudgetForm, operator: str) -> BudgetStatus | None:
        """Add to a budget. Return how it stands; None: there is no such counter."""
        for (_, tenant, window), _, _ in await self._read(""):
            if counter_name(window) == form.budget and form.tenant in {"", tenant}:
                await self._store.top_up(tenant, window, tokens=form.tokens, cost=form.cost, reset=form.reset)
                self._record_event(
                    BudgetOrder(
                        at=SystemClock.wall(),
                        budget=form.budget,
                        tenant="" if window.shared else tenant,
                        order="reset" if form.reset else "top-up",
                        tokens=form.tokens,
                        cost=form.cost,
                        operator=operator,
                        reason=form.reason,
                    )
                )
                return next(row for row in await self.collect_rows("") if row.budget == form.budget)
        return None

    def collect_families(self) -> Iterator[Family]:
        """Yield the metrics of budgets."""
        yield Family(of.BUDGET_USED, [((row.budget, row.tenant), row.used) for row in self._rows])
        yield self._alerts.family()

    def _watched(self, tenant: str) -> list[Watched]:
        """Return every counter once, with the tenant that it belongs to."""
        budgets, at = self._settings.budgets, SystemClock.wall()
        if budgets is None:
            return []
        found: dict[tuple[str, str], Watched] = {}
        for caller in sorted(self._callers):
            if tenant in {"", caller[0]}:
                for budget in budgets.budgets:
                    scope = budget.scope_of(*caller)
                    if scope is not None:
                        window = budget.window(scope, at)
                        found.setdefault(("" if window.shared else caller[0], scope), (budget, caller[0], window))
        return list(found.values())

    async def _read(self, tenant: str) -> list[tuple[Watched, SpendingCounters, BudgetStatus]]:
        watched = self._watched(tenant)
        if not watched:
            return []
        counters = await self._store.read([(owner, window) for _, owner, window in watched])
        currency = self._settings.prices.currency
        found = [
            (each, held, budget_status(*each, held, now_ms=now_ms, currency=currency))
            for each, (held, now_ms) in zip(watched, counters, strict=True)
        ]
        if not tenant:
            self._rows = [row for _, _, row in found]
        return found

    async def _warn(self, watched: Watched, counters: SpendingCounters, row: BudgetStatus) -> None:
        _, tenant, window = watched
        for level in LEVELS:
            if (row.used * 100 < level and not (level == max(LEVELS) and row.exceeded)) or not counters.start:
                continue
            known = (row.tenant, row.budget, counters.start, level)
            if known in self._alerted:
                continue
            self._alerted.add(known)
            if await self._store.claim_alert(tenant, window, counters.start, level):
                self._alerts.add((row.budget, row.tenant, str(level)))
                _log.warning("budget %s: %d %% of its %s is spent, until %s", row.budget, row.used * 100, row.period, row.ends.isoformat())
                if self._webhook is not None and self._background is not None:
                    event = {
                        "id": f"{row.tenant}/{row.budget}/{counters.start}/{level}",
                        "event": "budget_exceeded" if level == max(LEVELS) else "budget_warning",
                        "level": level,
                        "network": self._settings.network,
                        **msgspec.structs.asdict(row),
                    }
                    self._background.run("telling the webhook of a budget", self._webhook.deliver(event))

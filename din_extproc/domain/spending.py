"""Budgets: tokens and money that may be spent in a day, a week or a month, and the counters that a request is charged to.

Periods begin at midnight in the budget's time zone; a week begins on Monday.
"""

from datetime import date, datetime, timedelta, tzinfo
from enum import StrEnum

from msgspec import Struct

SCOPE = "budget:"
"""The scope of a budget's counter begins with it, before the budget's name."""
EACH = "*"
"""Every tenant, key or model has a counter of its own."""
_MOST_CLOCK_SKEW_S = 3600.0
"""The process that names a period and Redis, which decides when it begins, may differ by so much."""


class BudgetPeriod(StrEnum):
    """How long a budget lasts."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class SpendingWindow(Struct, frozen=True, eq=False, gc=False):
    """One counter of a budget in its current period. The ledger's clock decides which of two periods is current.

    Windows are made once per period and compared by identity, which costs a request nothing.
    """

    scope: str
    starts: tuple[int, int, int]
    """Starts of the period, the next one, and the one after that, in milliseconds since the epoch."""
    tokens: int = 0
    """The most tokens of a period; 0: not limited."""
    cost: int = 0
    """The most money of a period, in 10**-9 of the currency; 0: not limited."""
    shared: bool = False
    """All tenants of the network share the counter."""
    enforced: bool = True
    """False: a soft budget, counted and reported."""

    def period_at(self, now_ms: int) -> tuple[int, int]:
        """Return the beginning and the end of the current period."""
        return self.starts[:2] if now_ms < self.starts[1] else self.starts[1:]


class SpendingBudget(Struct, frozen=True, kw_only=True):
    """One entry of `budgets.limits`."""

    name: str
    period: BudgetPeriod
    zone: tzinfo
    tokens: int = 0
    """0: not limited."""
    cost: int = 0
    """In 10**-9 of the currency; 0: not limited."""
    hard: bool = True
    tenant: str = ""
    """The tenant that it is for; "": all of them together; `EACH`."""
    key: str = ""
    """The id of the key or identity that it is for; "": all of them together; `EACH`."""
    model: str = ""
    """The physical model that it is for; "": all of them together; `EACH`."""

    def scope_of(self, tenant: str, key_id: str, model: str) -> str | None:
        """Return the scope of the counter that a request is charged to; None: the budget is not for it.

        Parts are joined by colons, and those inside them encoded as in URLs: `budget:per_key:jwt%3Aalice`.
        """
        names = [SCOPE + self.name]
        for wanted, value in ((self.tenant, tenant), (self.key, key_id), (self.model, model)):
            if wanted == EACH:
                names.append(value.replace("%", "%25").replace(":", "%3A"))
            elif wanted and wanted != value:
                return None
        return ":".join(names)

    def window(self, scope: str, at: float) -> SpendingWindow:
        """Return a counter of this budget for the periods around a moment in seconds since the epoch."""
        starts = self.starts_at(at - _MOST_CLOCK_SKEW_S)
        return SpendingWindow(scope, starts, self.tokens, self.cost, shared=not self.tenant, enforced=self.hard)

    def starts_at(self, at: float) -> tuple[int, int, int]:
        """Return when the period of a moment begins, and the two after it, in milliseconds since the epoch."""
        first = _first_day(datetime.fromtimestamp(at, self.zone).date(), self.period)
        second = _next_day(first, self.period)
        return self._midnight(first), self._midnight(second), self._midnight(_next_day(second, self.period))

    def _midnight(self, day: date) -> int:
        return int(datetime(day.year, day.month, day.day, tzinfo=self.zone).timestamp() * 1000)


def _first_day(day: date, period: BudgetPeriod) -> date:
    if period is BudgetPeriod.MONTH:
        return day.replace(day=1)
    return day if period is BudgetPeriod.DAY else day - timedelta(days=day.weekday())


def _next_day(first: date, period: BudgetPeriod) -> date:
    if period is BudgetPeriod.MONTH:
        return (first + timedelta(days=31)).replace(day=1)
    return first + timedelta(days=1 if period is BudgetPeriod.DAY else 7)


class SpendingBudgets:
    """All budgets of a configuration.

    Args:
        budgets: In the order of the configuration.
    """

    __slots__ = ("_from", "_until", "_windows", "budgets")

    def __init__(self, budgets: tuple[SpendingBudget, ...]) -> None:
        self.budgets = budgets
        self._windows: dict[tuple[str, str, str], tuple[SpendingWindow, ...]] = {}
        """Those found since the period of any budget began."""
        self._from = self._until = 0.0

    def windows(self, tenant: str, key_id: str, model: str, at: float) -> tuple[SpendingWindow, ...]:
        """Return the counters that a request at this moment is charged to."""
        if not self._from <= at < self._until or len(self._windows) >= _MOST_REMEMBERED:
            self._forget(at)
        who = (tenant, key_id, model)
        found = self._windows.get(who)
        if found is None:
            scopes = ((budget, budget.scope_of(*who)) for budget in self.budgets)
            found = self._windows[who] = tuple([budget.window(scope, at) for budget, scope in scopes if scope is not None])
        return found

    def _forget(self, at: float) -> None:
        """Begin again with the periods of this moment."""
        self._windows = {}
        starts = [budget.starts_at(at - _MOST_CLOCK_SKEW_S) for budget in self.budgets]
        self._from = max(start[0] for start in starts) / 1000 + _MOST_CLOCK_SKEW_S
        self._until = min(start[1] for start in starts) / 1000 + _MOST_CLOCK_SKEW_S


_MOST_REMEMBERED = 16_384

"""The status of a budget: one row for operators, tenants and webhooks."""

from datetime import datetime

from msgspec import Struct

from din_extproc.domain.spending import SCOPE, SpendingBudget, SpendingWindow


class AmountStatus(Struct, frozen=True):
    """Tokens, or money as decimal numbers in texts."""

    limit: int | str
    """The limit of this period, additions included."""
    spent: int | str
    reserved: int | str
    """By requests in flight."""


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """One counter of a budget."""

    budget: str
    """The budget's name, and after colons whose counter it is where there is one for each."""
    tenant: str
    """"" where all tenants share it."""
    period: str
    starts: datetime
    ends: datetime
    """The end of the period, when the next one begins."""
    hard: bool
    used: float
    """The larger share of its limits that is spent."""
    exceeded: bool
    """A request was refused in this period, or would have been; or everything is spent."""
    tokens: AmountStatus | None
    money: AmountStatus | None
    currency: str = ""


def period_times(budget: SpendingBudget, window: SpendingWindow, now_ms: int) -> tuple[datetime, datetime]:
    """Return the beginning and the end of the current period, in the budget's zone."""
    start, end = window.period_at(now_ms)
    return datetime.fromtimestamp(start / 1000, budget.zone), datetime.fromtimestamp(end / 1000, budget.zone)


def counter_name(window: SpendingWindow) -> str:
    """Return the name of a counter as operators write it."""
    return window.scope.removeprefix(SCOPE)

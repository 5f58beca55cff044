"""From a counter to how its budget stands."""

from din_extproc.admit.spending import SpendingCounters
from din_extproc.domain.budget_status import AmountStatus, BudgetStatus, counter_name, period_times
from din_extproc.domain.price import format_money
from din_extproc.domain.spending import SpendingBudget, SpendingWindow


def budget_status(
    budget: SpendingBudget, tenant: str, window: SpendingWindow, counters: SpendingCounters, *, now_ms: int, currency: str
) -> BudgetStatus:
    """Return how one counter stands."""
    starts, ends = period_times(budget, window, now_ms)
    tokens, cost = counters.token_limit(window), counters.cost_limit(window)
    shares = [spent / limit for spent, limit in ((counters.tokens, tokens), (counters.cost, cost)) if limit]
    money = (cost, counters.cost, counters.used_cost - counters.cost)
    return BudgetStatus(
        budget=counter_name(window),
        tenant="" if window.shared else tenant,
        period=budget.period.value,
        starts=starts,
        ends=ends,
        hard=window.enforced,
        used=round(max(shares, default=0.0), 6),
        exceeded=bool(counters.refused) or max(shares, default=0.0) >= 1,
        tokens=AmountStatus(tokens, counters.tokens, counters.used_tokens - counters.tokens) if tokens else None,
        money=AmountStatus(*map(format_money, money)) if cost else None,
        currency=currency if cost else "",
    )

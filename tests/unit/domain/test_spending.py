"""Which counters a request is charged to, and when their periods begin."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.spending import BudgetPeriod, SpendingBudget, SpendingBudgets

names = st.text("a:%3A", min_size=1, max_size=4)
BERLIN = ZoneInfo("Europe/Berlin")


def budget(name: str = "b", period: BudgetPeriod = BudgetPeriod.MONTH, zone=UTC, **fields) -> SpendingBudget:
    return SpendingBudget(name=name, period=period, zone=zone, tokens=100, **fields)


def seconds(text: str, zone=UTC) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("period", "at", "starts"),
    [
        (BudgetPeriod.DAY, "2027-01-31T23:59:59", ("2027-01-31", "2027-02-01", "2027-02-02")),
        (BudgetPeriod.WEEK, "2027-01-03T12:00:00", ("2026-12-28", "2027-01-04", "2027-01-11")),
        (BudgetPeriod.MONTH, "2027-01-31T23:59:59", ("2027-01-01", "2027-02-01", "2027-03-01")),
        (BudgetPeriod.MONTH, "2026-12-01T00:00:00", ("2026-12-01", "2027-01-01", "2027-02-01")),
    ],
)
@pytest.mark.parametrize("zone", [UTC, BERLIN, ZoneInfo("Asia/Kolkata")])
def test_periods_begin_at_midnight_of_the_zone(period, at, starts, zone):
    expected = tuple(int(seconds(day, zone) * 1000) for day in starts)
    assert budget(period=period, zone=zone).starts_at(seconds(at, zone)) == expected


def test_a_day_on_which_the_clock_is_set_has_23_or_25_hours():
    start, end, _ = budget(period=BudgetPeriod.DAY, zone=BERLIN).starts_at(seconds("2027-03-28T12:00:00", BERLIN))
    assert end - start == 23 * 3_600_000
    start, end, _ = budget(period=BudgetPeriod.DAY, zone=BERLIN).starts_at(seconds("2027-10-31T12:00:00", BERLIN))
    assert end - start == 25 * 3_600_000


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({}, "budget:b"),
        ({"tenant": "t"}, "budget:b"),
        ({"tenant": "other"}, None),
        ({"tenant": "*"}, "budget:b:t"),
        ({"tenant": "t", "key": "k", "model": "m"}, "budget:b"),
        ({"tenant": "t", "key": "another"}, None),
        ({"tenant": "*", "key": "*", "model": "*"}, "budget:b:t:k:m"),
        ({"model": "*"}, "budget:b:m"),
        ({"model": "n"}, None),
    ],
)
def test_a_request_is_charged_to_the_budgets_that_it_fits(fields, scope):
    assert budget(**fields).scope_of("t", "k", "m") == scope


def test_only_a_budget_of_all_tenants_together_is_shared():
    found = SpendingBudgets((budget("all"), budget("each", tenant="*"), budget("mine", tenant="t", hard=False)))
    windows = found.windows("t", "k", "m", seconds("2027-01-15"))
    assert [(window.scope, window.shared, window.enforced) for window in windows] == [
        ("budget:all", True, True),
        ("budget:each:t", False, True),
        ("budget:mine", False, False),
    ]
    assert [window.scope for window in found.windows("u", "k", "m", seconds("2027-01-15"))] == ["budget:all", "budget:each:u"]


@given(st.lists(st.tuples(names, names, names), min_size=2, max_size=6, unique=True))
def test_different_tenants_keys_and_models_never_share_a_counter(callers):
    """Identities such as `jwt:alice` and models such as `llama3:8b` hold the separator themselves."""
    scopes = [budget(tenant="*", key="*", model="*").scope_of(*caller) for caller in callers]
    assert len(set(scopes)) == len(callers)


def test_a_clock_that_is_an_hour_off_still_names_the_period_of_redis():
    budgets = SpendingBudgets((budget(),))
    change = seconds("2027-02-01")
    for clock in (change - 3599, change + 3599, change - 3599):
        (window,) = budgets.windows("t", "k", "m", clock)
        assert window.period_at(int(change * 1000) - 1)[1] == change * 1000
        assert window.period_at(int(change * 1000)) == (change * 1000, seconds("2027-03-01") * 1000)

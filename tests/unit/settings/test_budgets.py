"""What `budgets:` takes."""

from pathlib import Path

import pytest

from din_extproc.domain.spending import BudgetPeriod
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from tests.support.configs import read

PRICES = "prices: {currency: EUR, models: {small: {input: 1}}}\n"


def budgets(folder: Path, limits: str, more: str = PRICES) -> Settings | ConfigRejected:
    return read(folder, f"{more}budgets: {{time_zone: Europe/Berlin, limits: [{limits}]}}")


def test_a_budget_has_tokens_money_or_both_in_a_zone(tmp_path):
    loaded = budgets(
        tmp_path, "{name: a, period: month, tokens: 1000, money: 0.5}, {name: b, period: day, money: 2, tenant: t, soft: true}"
    )
    assert isinstance(loaded, Settings)
    assert loaded.budgets is not None
    first, second = loaded.budgets.budgets
    assert (first.period, first.tokens, first.cost, first.hard, str(first.zone)) == (
        BudgetPeriod.MONTH,
        1000,
        500_000_000,
        True,
        "Europe/Berlin",
    )
    assert (second.tenant, second.tokens, second.cost, second.hard) == ("t", 0, 2 * 10**9, False)


def test_without_budgets_there_is_nothing_to_look_up(tmp_path):
    loaded = read(tmp_path, "budgets: {time_zone: UTC}")
    assert isinstance(loaded, Settings)
    assert loaded.budgets is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{name: a, period: year, tokens: 1}", "'year' is not a period: day, week, month"),
        ("{name: a, period: day}", "give `tokens`, `money` or both"),
        ("{name: a, period: day, tokens: 0}", "more than 0 is expected"),
        ("{name: a, period: day, money: 0}", "more than 0 is expected"),
        ("{name: a, period: day, money: 4000001}", "at most 4000000 is expected"),
        ("{name: a, period: day, tokens: 1, key: k}", "keys belong to a tenant"),
        ("{name: a, period: day, tokens: 1}, {name: a, period: day, tokens: 1}", "two budgets are called 'a'"),
        ("{name: 'a b', period: day, tokens: 1}", "is not a name"),
        ("{name: a, period: day, tokens: 1, tenant: tt}", "there is no tenant 'tt'"),
        ("{name: a, period: day, tokens: 1, model: smal}", "there is no model 'smal'"),
    ],
)
def test_what_is_no_budget_is_reported(tmp_path, limits, message):
    rejected = budgets(tmp_path, limits)
    assert isinstance(rejected, ConfigRejected)
    assert message in str(rejected)


def test_money_needs_prices_and_a_zone_that_exists(tmp_path):
    rejected = budgets(tmp_path, "{name: a, period: day, money: 1}", more="")
    assert "without prices, requests have no cost" in str(rejected)
    assert "'Berlin' is not a time zone" in str(read(tmp_path, "budgets: {time_zone: Berlin}"))


def test_in_a_cluster_a_budget_of_all_tenants_needs_one_slot(tmp_path):
    cluster = "store: {{url: 'redis+cluster://r:6379', one_slot: {}}}\n"
    shared, own = "{name: a, period: day, tokens: 1}", "{name: a, period: day, tokens: 1, tenant: t}"
    assert "in a Redis Cluster" in str(budgets(tmp_path, shared, cluster.format("false")))
    assert isinstance(budgets(tmp_path, own, cluster.format("false")), Settings)
    assert isinstance(budgets(tmp_path, shared, cluster.format("true")), Settings)

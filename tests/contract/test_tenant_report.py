"""`GET /v1/usage` shows a tenant its own limits, budgets and usage, and nothing of others."""

import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import ApiKey, Budget, RateLimits, Tenant
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.edge.redis.usage import UsageStore, split_by_day
from din_extproc.observe.usage_book import UsageKey, UsageTotals
from din_extproc.roles.serve.tenant_report import TenantReports
from din_extproc.settings.settings import Settings
from tests.support.configs import read
from tests.support.ledgers import linked

MORE = """
prices: {currency: EUR, models: {small: {input: 1}}}
budgets:
  limits:
    - {name: all, period: month, money: 100}
    - {name: own, period: day, tokens: 500, tenant: t}
    - {name: each-key, period: day, tokens: 50, tenant: t, key: "*", soft: true}
    - {name: others, period: day, tokens: 50, tenant: u}
"""
LIMITS = RateLimits(rpm=10, tpm=1000)
WHO = Authenticated(
    Tenant(id="t", models=("*",), priority=Priority.STANDARD, limits=LIMITS, per_model={}), ApiKey(id="k", salt=b"", digest=b"")
)


@pytest.fixture
async def reports(redis_servers, tmp_path):
    settings = read(tmp_path, MORE.replace("tenant: u", "tenant: t, key: another"))
    assert isinstance(settings, Settings), str(settings)
    assert settings.budgets is not None
    today = datetime.now(UTC).date()
    async with linked(redis_servers["valkey8"].url) as link:
        await link.call("FLUSHALL")
        spending = settings.budgets.windows("t", "k", "small", time.time())
        claim = Claim("r", "t", (Budget("tenant", LIMITS),), 60, 30_000, spending, 60_000)
        await RedisLedger(link).reserve(claim)
        store = UsageStore(link, "")
        used = {
            UsageKey(str(today), "t", "small", "k"): UsageTotals(requests=2, prompt_tokens=7, cost=1500),
            UsageKey(str(today), "another", "small", "x"): UsageTotals(requests=9),
            UsageKey(str(today - timedelta(days=3)), "t", "small", "jwt:eve"): UsageTotals(requests=1),
        }
        for portion in split_by_day(used, 1):
            await store.add("replica", portion)
        yield TenantReports(settings, link)


async def test_a_tenant_sees_its_limits_budgets_and_usage(reports):
    usage_report = msgspec.to_builtins(await reports.report(WHO, "t", 1))
    assert (usage_report["tenant"], usage_report["key"]) == ("t", "k")
    assert usage_report["limits"] == {
        "requests_per_minute": {"limit": 10, "used": 1},
        "tokens_per_minute": {"limit": 1000, "used": 60},
        "requests_in_flight": {"limit": None, "used": 0},
    }
    rows = {row["budget"]: row for row in usage_report["budgets"]}
    assert set(rows) == {"all", "own", "each-key:k"}
    assert rows["own"]["tokens"] == {"limit": 500, "spent": 0, "reserved": 60}
    assert (rows["all"]["money"], rows["all"]["currency"]) == ({"limit": "100.00", "spent": "0.00", "reserved": "0.00006"}, "EUR")
    assert (rows["each-key:k"]["hard"], rows["each-key:k"]["exceeded"]) == (False, True)
    [row] = usage_report["usage"]
    assert (row["key"], row["model"], row["requests"], row["prompt_tokens"], row["cost"]) == ("k", "small", 2, 7, "0.0000015")


async def test_more_days_are_shown_when_they_are_asked_for(reports):
    usage_report = msgspec.to_builtins(await reports.report(WHO, "t", 7))
    assert [(row["identity"], row["requests"]) for row in usage_report["usage"]] == [("jwt:eve", 1), ("", 2)]

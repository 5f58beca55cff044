"""What may be spent in a period, on the in-memory ledger and on real Redis servers, by a clock that the test moves."""

import time
from collections.abc import AsyncIterator

import pytest

from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.admit.spending import SLOT_MS
from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.budgets import TOP_UP, BudgetStore
from din_extproc.edge.redis.calls import Names
from tests.support.ledgers import NOON_MS, Counter, counter
from tests.support.servers import FLAVOURS

DAY_MS = 86_400_000
MIDNIGHT_MS = NOON_MS // DAY_MS * DAY_MS


@pytest.fixture(params=["twin", *FLAVOURS])
async def ledger(request, redis_servers) -> AsyncIterator[Counter]:
    async with counter(request.param, redis_servers) as subject:
        yield subject


def window(tokens: int = 0, cost: int = 0, scope: str = "budget:b", **fields) -> SpendingWindow:
    return SpendingWindow(scope, (MIDNIGHT_MS, MIDNIGHT_MS + DAY_MS, MIDNIGHT_MS + 2 * DAY_MS), tokens, cost, **fields)


async def ask(
    ledger: Counter, request_id: str, *windows: SpendingWindow, tokens: int = 10, cost: int = 0, tenant: str = "finance", **claim
):
    budgets = claim.pop("budgets", (Budget("tenant", RateLimits()),))
    return await ledger.ledger.reserve(Claim(request_id, tenant, budgets, tokens, 30_000, windows, cost))


async def spent(ledger: Counter, *windows: SpendingWindow) -> tuple[str, int]:
    """Return dimension and limit of the denial of a claim that no budget can hold."""
    answer = await ask(ledger, "probe", *windows, tokens=10**12, cost=10**12)
    assert isinstance(answer, Denied)
    return answer.dimension, answer.status.remaining_tokens


async def test_a_spent_budget_refuses_until_the_next_period_begins(ledger):
    budget = window(100)
    for number in range(10):
        assert isinstance(await ask(ledger, f"r{number}", budget), Granted)
    denied = await ask(ledger, "late", budget)
    assert isinstance(denied, Denied)
    assert (denied.scope, denied.dimension, denied.limit) == ("budget:b", "token_budget", 100)
    assert denied.retry_after_ms == MIDNIGHT_MS + DAY_MS - NOON_MS
    for number in range(10):
        assert await ledger.ledger.settle("finance", f"r{number}", 10)
    ledger.now_ms += denied.retry_after_ms - 1
    assert isinstance(await ask(ledger, "later", budget), Denied)
    ledger.now_ms += 1
    assert isinstance(await ask(ledger, "next", budget), Granted)


async def test_the_settlement_replaces_what_was_reserved(ledger):
    budget = window(100)
    assert isinstance(await ask(ledger, "r", budget, tokens=90), Granted)
    assert isinstance(await ask(ledger, "s", budget, tokens=20), Denied)
    assert await ledger.ledger.settle("finance", "r", 30)
    assert not await ledger.ledger.settle("finance", "r", 30), "once"
    assert await spent(ledger, budget) == ("token_budget", 70)
    assert isinstance(await ask(ledger, "t", budget, tokens=70), Granted)
    assert await ledger.ledger.settle("finance", "t", None)
    assert await spent(ledger, budget) == ("token_budget", 70)


async def test_money_is_counted_besides_tokens(ledger):
    budget = window(cost=1000)
    assert isinstance(await ask(ledger, "r", budget, cost=900), Granted)
    denied = await ask(ledger, "s", budget, cost=101)
    assert isinstance(denied, Denied)
    assert (denied.dimension, denied.limit, denied.status.limit_tokens) == ("cost_budget", 1000, None)
    await ledger.ledger.settle("finance", "r", 5, 899)
    assert isinstance(await ask(ledger, "s", budget, cost=101), Granted)


async def test_all_or_nothing_is_charged(ledger):
    own, common = window(100), window(15, scope="budget:all", shared=True)
    assert isinstance(await ask(ledger, "r", own, common), Granted)
    assert isinstance(await ask(ledger, "s", own, common), Denied)
    assert await spent(ledger, own) == ("token_budget", 90)
    limited = (Budget("tenant", RateLimits(rpm=1)),)
    assert isinstance(await ask(ledger, "t", own, budgets=limited), Granted)
    assert isinstance(await ask(ledger, "u", own, budgets=limited), Denied)
    assert await spent(ledger, own) == ("token_budget", 80)


async def test_tenants_share_a_shared_counter_only(ledger):
    own, common = window(10), window(25, scope="budget:all", shared=True)
    answers = [await ask(ledger, tenant, own, common, tenant=tenant) for tenant in ("a", "b", "c")]
    assert [type(answer) for answer in answers] == [Granted, Granted, Denied]
    assert answers[2].scope == "budget:all"


async def test_a_soft_budget_is_reported_and_refuses_nothing(ledger):
    soft = window(15, enforced=False)
    first, second = [await ask(ledger, name, soft) for name in ("r", "s")]
    assert (first.status.exceeded, first.shadow_denial) == ("", None)
    assert second.status.exceeded == "budget:b"
    assert second.shadow_denial.dimension == "token_budget"
    assert second.status.limit_tokens is None, "it limits nothing"


async def test_a_request_counts_in_the_period_in_which_it_was_admitted(ledger):
    budget = window(100)
    ledger.now_ms = MIDNIGHT_MS + DAY_MS - 1
    assert isinstance(await ask(ledger, "old", budget, tokens=100), Granted)
    ledger.now_ms += 1
    assert isinstance(await ask(ledger, "new", budget, tokens=60), Granted)
    assert await ledger.ledger.settle("finance", "old", 90)
    assert await spent(ledger, budget) == ("token_budget", 40), "what belongs to yesterday leaves today alone"
    assert await ledger.ledger.settle("finance", "new", 50)
    assert await spent(ledger, budget) == ("token_budget", 50)


async def test_a_reservation_that_nobody_settles_is_forgotten_and_a_late_settlement_is_not(ledger):
    budget = window(100)
    assert isinstance(await ask(ledger, "orphan", budget, tokens=100), Granted)
    ledger.now_ms += SLOT_MS
    assert isinstance(await ask(ledger, "r", budget), Denied)
    ledger.now_ms += SLOT_MS
    assert isinstance(await ask(ledger, "s", budget), Granted)
    assert await ledger.ledger.settle("finance", "orphan", 80)
    assert await spent(ledger, budget) == ("token_budget", 10)


async def test_a_released_request_is_remembered_until_its_settlement(ledger):
    budget = window(100)
    assert isinstance(await ask(ledger, "r", budget, tokens=100), Granted)
    await ledger.ledger.release("finance", "r")
    ledger.now_ms += 3 * SLOT_MS
    assert await ledger.ledger.settle("finance", "r", 60)
    assert await spent(ledger, budget) == ("token_budget", 40)


async def test_the_tightest_of_limits_and_budgets_is_in_the_status(ledger):
    limited = (Budget("tenant", RateLimits(tpm=1000)),)
    wide = await ask(ledger, "r", window(5000), budgets=limited)
    assert (wide.status.limit_tokens, wide.status.remaining_tokens) == (1000, 990)
    tight = await ask(ledger, "s", window(50, scope="budget:tight"), budgets=limited)
    assert (tight.status.limit_tokens, tight.status.remaining_tokens) == (50, 40)
    assert tight.status.reset_tokens_ms == MIDNIGHT_MS + DAY_MS - NOON_MS


async def test_a_top_up_lasts_until_the_next_period_and_what_is_spent_stays(redis_servers):
    async with counter("valkey8", redis_servers) as ledger:
        link = ledger.ledger._runner
        await link.call("SCRIPT", "LOAD", TOP_UP.source)
        now = int(time.time() * 1000)
        today = SpendingWindow("budget:b", (now - 1000, now + DAY_MS, now + 2 * DAY_MS), 100, 0)
        ledger.now_ms = now
        store = BudgetStore(link, Names())
        assert isinstance(await ask(ledger, "r", today, tokens=100), Granted)
        assert isinstance(await ask(ledger, "s", today), Denied)
        await ledger.ledger.settle("finance", "r", 100)
        await store.top_up("finance", today, tokens=15, cost=0, reset=False)
        assert isinstance(await ask(ledger, "t", today), Granted)
        assert isinstance(await ask(ledger, "u", today), Denied)
        await ledger.ledger.settle("finance", "t", 10)
        await store.top_up("finance", today, tokens=0, cost=0, reset=True)
        [(counters, _)] = await store.read([("finance", today)])
        assert (counters.tokens, counters.token_limit(today), counters.refused) == (110, 210, 0)
        ledger.now_ms = now + DAY_MS
        assert isinstance(await ask(ledger, "v", today, tokens=101), Denied)
        assert isinstance(await ask(ledger, "w", today, tokens=100), Granted)

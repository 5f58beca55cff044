"""What every ledger promises, on the twin and on real Redis servers, by a clock that the test moves."""

from collections.abc import AsyncIterator

import pytest

from din_extproc.admit.ledger import Claim, Denied, Granted, RateLimitStatus
from din_extproc.domain.tenant import Budget, RateLimits
from tests.support.ledgers import NOON_MS, Counter, counter
from tests.support.servers import FLAVOURS


@pytest.fixture(params=["twin", *FLAVOURS])
async def limits(request, redis_servers) -> AsyncIterator[Counter]:
    async with counter(request.param, redis_servers) as subject:
        yield subject


async def rate_limit_status(limits: Counter, *ceilings: RateLimits) -> RateLimitStatus:
    """Where the budgets stand: asked with a claim that no bucket holds, which changes nothing."""
    answer = await limits.ask(*ceilings, tokens=10**9)
    assert isinstance(answer, Denied)
    return answer.status


async def test_refused_requests_leave_the_bucket_as_it_was(limits):
    ceiling = RateLimits(tpm=1000)
    assert await limits.granted(100, ceiling, tokens=900) == 1
    assert await limits.ledger.settle("finance", "r1", 50)
    assert isinstance(await limits.ask(ceiling, tokens=950), Granted)
    assert isinstance(await limits.ask(ceiling, tokens=1), Denied)


async def test_a_refusal_for_one_dimension_charges_no_other(limits):
    ceiling = RateLimits(rpm=10, max_streams=1)
    await limits.ask(RateLimits(max_streams=1), request_id="busy")
    assert await limits.granted(10, ceiling) == 0
    await limits.ledger.release("finance", "busy")
    answer = await limits.ask(ceiling)
    assert isinstance(answer, Granted)
    assert answer.status.remaining_requests == 9


async def test_a_refusal_by_the_model_charges_no_tenant(limits):
    tenant, model = RateLimits(rpm=10, tpm=10_000, max_streams=5), RateLimits(tpm=100)
    await limits.ask(tenant, model, tokens=100)
    for _ in range(20):
        answer = await limits.ask(tenant, model, tokens=50)
        assert isinstance(answer, Denied)
        assert (answer.scope, answer.dimension, answer.limit) == ("model:m", "tpm", 100)
    after = await rate_limit_status(limits, tenant)
    assert (after.remaining_requests, after.remaining_tokens) == (9, 9900)
    assert await limits.granted(10, tenant) == 4


async def test_an_enormous_request_changes_nothing(limits):
    ceiling = RateLimits(tpm=10_000)
    await limits.ask(ceiling, tokens=9800)
    answer = await limits.ask(ceiling, tokens=1_000_000)
    assert isinstance(answer, Denied)
    assert answer.status.remaining_tokens == 200
    assert isinstance(await limits.ask(ceiling, tokens=100), Granted)


async def test_larger_than_the_whole_bucket_is_called_oversize_and_charges_no_request(limits):
    ceiling = RateLimits(rpm=10, tpm=8000)
    answer = await limits.ask(ceiling, tokens=9000)
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.dimension, answer.limit, answer.retry_after_ms) == ("tenant", "oversize", 8000, 0)
    assert answer.status.remaining_requests == 10
    assert isinstance(await limits.ask(ceiling, tokens=8000), Granted)


async def test_oversize_is_reported_even_when_another_dimension_is_exhausted(limits):
    await limits.ask(RateLimits(rpm=1))
    answer = await limits.ask(RateLimits(rpm=1), RateLimits(tpm=100), tokens=101)
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.dimension) == ("model:m", "oversize")


@pytest.mark.parametrize("pause_ms", [61_000, 3_600_000, 86_400_000])
async def test_yesterday_does_not_count(limits, pause_ms):
    ceiling = RateLimits(rpm=5, tpm=500)
    assert await limits.granted(10, ceiling, tokens=100) == 5
    limits.now_ms += pause_ms
    assert await limits.granted(10, ceiling, tokens=100) == 5


async def test_a_minute_boundary_is_no_boundary(limits):
    ceiling = RateLimits(rpm=6)
    limits.now_ms = NOON_MS + 59_900
    assert await limits.granted(6, ceiling) == 6
    limits.now_ms = NOON_MS + 60_100
    assert await limits.granted(6, ceiling) == 0


async def test_a_raised_limit_helps_at_once_and_a_lowered_one_clamps_at_zero(limits):
    assert await limits.granted(20, RateLimits(rpm=10)) == 10
    assert await limits.granted(10, RateLimits(rpm=20)) == 10
    answer = await limits.ask(RateLimits(rpm=5))
    assert isinstance(answer, Denied)
    assert answer.status.remaining_requests == 0
    assert 1 <= answer.retry_after_ms <= 61_000
    limits.now_ms += answer.retry_after_ms
    assert isinstance(await limits.ask(RateLimits(rpm=5)), Granted)


async def test_a_changed_token_limit_applies_to_what_was_charged(limits):
    await limits.ask(RateLimits(tpm=10_000), tokens=10_000)
    raised = await limits.ask(RateLimits(tpm=15_000), tokens=5000)
    assert isinstance(raised, Granted)
    lowered = await limits.ask(RateLimits(tpm=1000), tokens=1000)
    assert isinstance(lowered, Denied)
    assert lowered.status.remaining_tokens == 0
    assert lowered.retry_after_ms <= 120_000
    limits.now_ms += lowered.retry_after_ms
    assert isinstance(await limits.ask(RateLimits(tpm=1000), tokens=1000), Granted)


async def test_parallel_requests_can_not_pass_the_check_together(limits):
    ceiling = RateLimits(tpm=10_000)
    assert await limits.granted(50, ceiling, tokens=2000) == 5
    for number in range(1, 6):
        assert await limits.ledger.settle("finance", f"r{number}", 2100)
    answer = await limits.ask(ceiling, tokens=1)
    assert isinstance(answer, Denied)
    assert answer.retry_after_ms == 501 * 60_000 // 10_000


@pytest.mark.parametrize("moment_ms", [0, 1, 999, 59_999, 60_000])
@pytest.mark.parametrize(
    ("ceiling", "tokens"), [(RateLimits(rpm=3), 1), (RateLimits(tpm=7001), 2334), (RateLimits(max_streams=2), 1), (RateLimits(rpm=1), 1)]
)
async def test_a_client_that_sleeps_exactly_retry_after_is_admitted(limits, moment_ms, ceiling, tokens):
    limits.now_ms = NOON_MS + moment_ms
    while isinstance(answer := await limits.ask(ceiling, tokens=tokens, lease_ms=5000), Granted):
        limits.now_ms += 333
    assert answer.retry_after_ms >= 1
    limits.now_ms += answer.retry_after_ms - 1
    assert isinstance(await limits.ask(ceiling, tokens=tokens), Denied)
    limits.now_ms += 1
    assert isinstance(await limits.ask(ceiling, tokens=tokens), Granted)


async def test_the_longest_of_several_waits_is_reported(limits):
    tenant, model = RateLimits(rpm=1), RateLimits(tpm=60_000, max_streams=1)
    await limits.ask(tenant, model, tokens=60_000, lease_ms=1000)
    answer = await limits.ask(tenant, model, tokens=2000)
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.dimension, answer.retry_after_ms) == ("tenant", "rpm", 61_000)
    limits.now_ms += answer.retry_after_ms
    assert isinstance(await limits.ask(tenant, model, tokens=2000), Granted)


async def test_no_more_than_the_limit_in_any_sixty_seconds_and_a_place_returns_within_a_second(limits):
    ceiling = RateLimits(rpm=20)
    passed = []
    for step in range(600):
        limits.now_ms = NOON_MS + step * 317
        if isinstance(await limits.ask(ceiling), Granted):
            passed.append(limits.now_ms)
    assert max(sum(start <= moment < start + 60_000 for moment in passed) for start in passed) == 20
    assert all(later - earlier <= 61_000 + 317 for earlier, later in zip(passed, passed[20:], strict=False))


async def test_the_bucket_refills_evenly(limits):
    ceiling = RateLimits(tpm=600)
    await limits.ask(ceiling, tokens=600)
    for second in range(1, 60):
        limits.now_ms = NOON_MS + second * 1000
        assert (await rate_limit_status(limits, ceiling)).remaining_tokens == second * 10


async def test_the_status_tells_the_tightest_budget_of_each_dimension(limits):
    answer = await limits.ask(RateLimits(rpm=100, tpm=500), RateLimits(rpm=3, tpm=90_000), RateLimits(tpm=400), tokens=100)
    assert answer == Granted(
        RateLimitStatus(
            limit_requests=3,
            remaining_requests=2,
            reset_requests_ms=61_000,
            limit_tokens=400,
            remaining_tokens=300,
            reset_tokens_ms=15_000,
        ),
        roomy=True,
    )


async def test_no_limit_no_status(limits):
    assert await limits.ask(RateLimits(), RateLimits()) == Granted(RateLimitStatus(), roomy=True, recorded=False)
    assert await limits.ask() == Granted(RateLimitStatus(), roomy=True, recorded=False)
    assert await limits.ask(RateLimits(max_streams=2)) == Granted(RateLimitStatus())


async def test_slots_are_roomy_until_half_of_them_are_taken_and_never_where_there_are_few(limits):
    wide, narrow = RateLimits(max_streams=10), RateLimits(max_streams=7)
    assert not (await limits.ask(narrow)).roomy
    assert [(await limits.ask(wide)).roomy for _ in range(6)] == [True] * 4 + [False] * 2
    assert not (await limits.ask(RateLimits(max_streams=100), narrow)).roomy


async def test_reserving_twice_charges_once_and_answers_the_same(limits):
    ceiling = RateLimits(rpm=10, tpm=1000, max_streams=2)
    first = await limits.ask(ceiling, tokens=300, request_id="same")
    limits.now_ms += 5000
    assert await limits.ask(ceiling, tokens=300, request_id="same") == first
    answer = await limits.ask(ceiling, tokens=300)
    assert isinstance(answer, Granted)
    assert (answer.status.remaining_requests, answer.status.remaining_tokens) == (8, 483)


async def test_a_refused_request_may_ask_again_under_its_id(limits):
    ceiling = RateLimits(tpm=1000)
    await limits.ask(ceiling, tokens=1000)
    answer = await limits.ask(ceiling, tokens=500, request_id="patient")
    assert isinstance(answer, Denied)
    limits.now_ms += answer.retry_after_ms
    assert isinstance(await limits.ask(ceiling, tokens=500, request_id="patient"), Granted)


async def test_the_same_request_id_of_another_tenant_is_another_request(limits):
    ceiling = RateLimits(rpm=1, tpm=100)
    for tenant in ("a", "b", "a:b", "a}", "{a", "", "a b", "ü", "%41", "A" * 300):
        assert isinstance(await limits.ask(ceiling, tokens=100, tenant=tenant, request_id="r"), Granted)
        assert isinstance(await limits.ask(ceiling, tokens=1, tenant=tenant, request_id="s"), Denied)


@pytest.mark.parametrize(("actual", "left"), [(100, 900), (500, 500), (900, 100), (0, 1000), (1500, 0)])
async def test_settling_corrects_both_ways_and_once(limits, actual, left):
    ceiling = RateLimits(tpm=1000)
    await limits.ask(ceiling, tokens=500, request_id="r")
    assert await limits.ledger.settle("finance", "r", actual)
    assert not await limits.ledger.settle("finance", "r", actual)
    assert (await rate_limit_status(limits, ceiling)).remaining_tokens == left


async def test_settling_corrects_every_budget_of_the_request(limits):
    ceilings = RateLimits(tpm=1000), RateLimits(tpm=2000), RateLimits(rpm=5)
    await limits.ask(*ceilings, tokens=500, request_id="r")
    assert await limits.ledger.settle("finance", "r", 100)
    assert (await rate_limit_status(limits, ceilings[0])).remaining_tokens == 900
    assert (await rate_limit_status(limits, RateLimits(), ceilings[1])).remaining_tokens == 1900


async def test_a_bucket_below_zero_is_full_again_within_two_windows(limits):
    ceiling = RateLimits(tpm=1000)
    await limits.ask(ceiling, tokens=1000, request_id="r")
    assert await limits.ledger.settle("finance", "r", 10**9)
    after = await rate_limit_status(limits, ceiling)
    assert (after.remaining_tokens, after.reset_tokens_ms) == (0, 120_000)
    limits.now_ms += 120_000
    assert (await rate_limit_status(limits, ceiling)).remaining_tokens == 1000


async def test_a_refund_does_not_overfill_the_bucket(limits):
    ceiling = RateLimits(tpm=1000)
    await limits.ask(ceiling, tokens=1000, request_id="r")
    limits.now_ms += 50_000
    assert await limits.ledger.settle("finance", "r", 0)
    assert await limits.granted(20, ceiling, tokens=100) == 10


async def test_an_extra_charge_counts_from_the_moment_it_is_known(limits):
    ceiling = RateLimits(tpm=1000)
    await limits.ask(ceiling, tokens=100, request_id="r")
    limits.now_ms += 100_000
    assert await limits.ledger.settle("finance", "r", 700)
    assert (await rate_limit_status(limits, ceiling)).remaining_tokens == 400


async def test_settling_needs_a_reservation(limits):
    assert not await limits.ledger.settle("finance", "never", 10)
    await limits.ask(RateLimits(tpm=1000), tokens=10, request_id="r")
    assert not await limits.ledger.settle("other", "r", 10)


async def test_settling_after_the_record_is_gone_says_so(limits):
    await limits.ask(RateLimits(tpm=1000), tokens=10, request_id="r")
    limits.now_ms += 120_000
    assert not await limits.ledger.settle("finance", "r", 500)
    assert (await rate_limit_status(limits, RateLimits(tpm=1000))).remaining_tokens == 1000


@pytest.mark.parametrize("order", ["release first", "settle first"])
async def test_release_and_settle_come_in_any_order(limits, order):
    ceiling = RateLimits(tpm=1000, max_streams=1)
    await limits.ask(ceiling, tokens=500, request_id="r")
    if order == "release first":
        await limits.ledger.release("finance", "r")
    assert await limits.ledger.settle("finance", "r", 200)
    await limits.ledger.release("finance", "r")
    await limits.ledger.release("finance", "r")
    assert not await limits.ledger.settle("finance", "r", 200)
    answer = await limits.ask(ceiling, tokens=100)
    assert isinstance(answer, Granted)
    assert answer.status.remaining_tokens == 700


async def test_a_settlement_gives_back_the_slots_that_nobody_released(limits):
    ceiling = RateLimits(tpm=1000, max_streams=1)
    await limits.ask(ceiling, tokens=500, request_id="r")
    assert isinstance(await limits.ask(ceiling, tokens=100), Denied)
    assert await limits.ledger.settle("finance", "r", 200)
    assert isinstance(await limits.ask(ceiling, tokens=100), Granted)


async def test_a_slot_is_given_back_once(limits):
    ceiling = RateLimits(max_streams=2)
    assert await limits.granted(3, ceiling) == 2
    await limits.ledger.release("finance", "r1")
    await limits.ledger.release("finance", "r1")
    await limits.ledger.release("finance", "never")
    assert await limits.granted(3, ceiling) == 1


async def test_slots_come_back_when_their_lease_runs_out(limits):
    ceiling = RateLimits(max_streams=20)
    assert await limits.granted(21, ceiling, lease_ms=30_000) == 20
    limits.now_ms += 29_999
    assert await limits.granted(1, ceiling) == 0
    limits.now_ms += 1
    assert await limits.granted(21, ceiling) == 20


async def test_a_renewed_slot_stays_taken_and_its_record_stays_known(limits):
    ceiling = RateLimits(tpm=1000, max_streams=1)
    await limits.ask(ceiling, tokens=400, request_id="long", lease_ms=30_000)
    for _ in range(30):
        limits.now_ms += 20_000
        await limits.ledger.renew("finance", "long", 30_000)
        assert isinstance(await limits.ask(ceiling), Denied)
    await limits.ledger.release("finance", "long")
    assert await limits.ledger.settle("finance", "long", 1000)
    answer = await limits.ask(ceiling, tokens=1)
    assert isinstance(answer, Granted)
    assert answer.status.remaining_tokens == 399


async def test_renewing_does_not_bring_back_what_was_released(limits):
    ceiling = RateLimits(max_streams=1)
    await limits.ask(ceiling, request_id="r")
    await limits.ledger.release("finance", "r")
    await limits.ledger.renew("finance", "r", 30_000)
    await limits.ledger.renew("finance", "never", 30_000)
    assert await limits.granted(2, ceiling) == 1


async def test_a_stream_that_was_not_renewed_in_time_takes_its_slot_again(limits):
    ceiling = RateLimits(max_streams=1)
    await limits.ask(ceiling, request_id="r", lease_ms=10_000)
    limits.now_ms += 15_000
    await limits.ledger.renew("finance", "r", 10_000)
    assert await limits.granted(1, ceiling) == 0


async def test_a_lowered_number_of_slots_waits_for_enough_of_them(limits):
    for number in range(4):
        await limits.ask(RateLimits(max_streams=4), request_id=f"s{number}", lease_ms=1000 * (number + 1))
    answer = await limits.ask(RateLimits(max_streams=2))
    assert isinstance(answer, Denied)
    assert answer.retry_after_ms == 3000


async def test_scopes_of_one_tenant_count_apart_and_a_shared_scope_together(limits):
    tenant, key = RateLimits(rpm=3), RateLimits(rpm=2)

    async def ask(request_id, key_id):
        budgets = (Budget("tenant", tenant), Budget(f"key:{key_id}", key))
        return await limits.ledger.reserve(Claim(request_id, "finance", budgets, 1, 1000))

    assert [isinstance(await ask(f"a{n}", "a"), Granted) for n in range(3)] == [True, True, False]
    assert [isinstance(await ask(f"b{n}", "b"), Granted) for n in range(3)] == [True, False, False]


# Limits that tenants share, and limits that are only counted


def of(tenant: str, request_id: str, *budgets: Budget, tokens: int = 1) -> Claim:
    return Claim(request_id, tenant, budgets, tokens, 30_000)


async def test_what_all_tenants_share_is_counted_for_all_and_their_own_for_each(limits):
    own, common = Budget("tenant", RateLimits(rpm=4)), Budget("network", RateLimits(rpm=6, tpm=600, max_streams=6), shared=True)
    answers = [await limits.ledger.reserve(of(tenant, f"{tenant}{n}", own, common, tokens=10)) for n in range(4) for tenant in ("a", "b")]
    assert [isinstance(answer, Granted) for answer in answers] == [True] * 6 + [False] * 2
    assert isinstance(answers[-1], Denied)
    assert (answers[-1].scope, answers[-1].dimension) == ("network", "rpm")
    assert await limits.ledger.settle("a", "a0", 110)
    again = await limits.ledger.reserve(of("c", "c", Budget("network", RateLimits(tpm=600, max_streams=6), shared=True), tokens=440))
    assert isinstance(again, Granted), "one slot and no more than 100 tokens went with the settlement"
    assert again.status.remaining_tokens == 0


async def test_a_refusal_by_what_tenants_share_charges_no_tenant(limits):
    own, full = Budget("tenant", RateLimits(rpm=10, tpm=1000, max_streams=2)), Budget("network", RateLimits(max_streams=1), shared=True)
    assert isinstance(await limits.ledger.reserve(of("other", "busy", full)), Granted)
    for number in range(20):
        assert isinstance(await limits.ledger.reserve(of("finance", f"r{number}", own, full, tokens=100)), Denied)
    await limits.ledger.release("other", "busy")
    answer = await limits.ledger.reserve(of("finance", "last", own, full, tokens=100))
    assert isinstance(answer, Granted)
    assert (answer.status.remaining_requests, answer.status.remaining_tokens) == (9, 900)


async def test_a_limit_that_is_not_enforced_counts_and_tells_and_refuses_nothing(limits):
    shadow = Budget("tenant", RateLimits(rpm=2, tpm=100, max_streams=3), enforced=False)
    answers = [await limits.ledger.reserve(of("finance", f"r{n}", shadow, tokens=30)) for n in range(5)]
    assert all(isinstance(answer, Granted) for answer in answers)
    denials = [answer.shadow_denial and (answer.shadow_denial.scope, answer.shadow_denial.dimension) for answer in answers]
    assert denials == [None, None, ("tenant", "rpm"), ("tenant", "rpm"), ("tenant", "rpm")]
    assert (answers[-1].status.remaining_requests, answers[-1].status.remaining_tokens) == (0, 0)
    huge = await limits.ledger.reserve(of("finance", "huge", shadow, tokens=101))
    assert isinstance(huge, Granted)
    assert huge.shadow_denial is not None
    assert (huge.shadow_denial.dimension, huge.shadow_denial.retry_after_ms) == ("oversize", 0)
    for name in ("r0", "r1", "r2", "r3", "r4", "huge"):
        assert await limits.ledger.settle("finance", name, 0)
    enforced = await limits.ledger.reserve(of("finance", "now", Budget("tenant", RateLimits(tpm=100, max_streams=1)), tokens=100))
    assert isinstance(enforced, Granted), "all of it has come back"


async def test_an_enforced_limit_refuses_beside_one_that_is_not(limits):
    shadow, enforced = Budget("tenant", RateLimits(rpm=1), enforced=False), Budget("key:k", RateLimits(rpm=2))
    assert isinstance(await limits.ledger.reserve(of("finance", "a", shadow, enforced)), Granted)
    second = await limits.ledger.reserve(of("finance", "b", shadow, enforced))
    assert isinstance(second, Granted)
    assert second.shadow_denial is not None
    third = await limits.ledger.reserve(of("finance", "c", shadow, enforced))
    assert isinstance(third, Denied)
    assert (third.scope, third.dimension, third.status.remaining_requests) == ("key:k", "rpm", 0)


@pytest.mark.parametrize("back_s", [1, 30, 60])
async def test_a_clock_that_is_set_back_by_less_than_a_window_opens_no_limit_and_adds_no_more_than_that_to_a_wait(limits, back_s):
    ceiling = RateLimits(rpm=5, tpm=1000)
    assert await limits.granted(5, ceiling, tokens=100) == 5
    limits.now_ms -= back_s * 1000
    refused = await limits.ask(ceiling, tokens=100)
    assert isinstance(refused, Denied), "what was counted still counts"
    assert refused.retry_after_ms <= (61 + back_s) * 1000
    limits.now_ms += refused.retry_after_ms
    assert await limits.granted(6, ceiling, tokens=100) == 5


@pytest.mark.parametrize("back_s", [61, 7200, 86_400])
async def test_a_clock_that_is_set_back_by_hours_keeps_nobody_waiting_for_hours(limits, back_s):
    ceiling = RateLimits(rpm=5, tpm=1000)
    assert await limits.granted(6, ceiling, tokens=100) == 5
    limits.now_ms -= back_s * 1000
    assert await limits.granted(6, ceiling, tokens=100) == 5, "one window begins anew"
    limits.now_ms += 61_000
    assert await limits.granted(6, ceiling, tokens=100) == 5


async def test_the_largest_ceilings_of_a_configuration_are_counted_to_the_token(limits):
    largest = 10**10
    ceilings = RateLimits(rpm=largest, tpm=largest, max_streams=largest)
    for tokens, left in ((largest - 2, 2), (1, 1)):
        answer = await limits.ask(ceilings, tokens=tokens)
        assert isinstance(answer, Granted)
        assert answer.status.remaining_tokens == left
    answer = await limits.ask(ceilings, tokens=2)
    assert isinstance(answer, Denied)
    assert answer.dimension == "tpm"


async def test_a_request_that_reached_no_node_gives_back_its_place_in_the_window_once(limits):
    tenant, model = RateLimits(rpm=2), RateLimits(rpm=3, tpm=1000)
    await limits.ask(tenant, model, tokens=100, request_id="kept")
    limits.now_ms += 2000
    await limits.ask(tenant, model, tokens=100, request_id="lost")
    assert await limits.ledger.settle("finance", "lost", None)
    assert not await limits.ledger.settle("finance", "lost", None)
    after = await rate_limit_status(limits, tenant, model)
    assert (after.remaining_requests, after.reset_requests_ms) == (1, 59_000)
    after = await rate_limit_status(limits, RateLimits(rpm=2, tpm=10**6), model)
    assert after.remaining_tokens == 1000 - 100 + 33
    assert await limits.granted(5, tenant, model) == 1


async def test_a_settled_request_of_no_tokens_keeps_its_place_in_the_window(limits):
    ceiling = RateLimits(rpm=2, tpm=1000)
    await limits.ask(ceiling, request_id="answered")
    assert await limits.ledger.settle("finance", "answered", 0)
    assert await limits.granted(5, ceiling) == 1


async def test_a_place_given_back_late_frees_nothing_in_a_later_window(limits):
    ceiling = RateLimits(rpm=2)
    await limits.ask(ceiling, request_id="slow", lease_ms=600_000)
    limits.now_ms += 61_000
    assert await limits.granted(5, ceiling) == 2
    assert await limits.ledger.settle("finance", "slow", None)
    assert await limits.granted(5, ceiling) == 0

"""What only Redis can show: its clock, its keys and their lifetimes, and who else settles."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.calls import make_hash_tag
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.edge.redis.link import Link
from tests.support.ledgers import linked
from tests.support.servers import FLAVOURS
from tests.support.waiting import turns, until

NAMES = ["a:b", "a", "a}", "{a}", "{", "}", "", " ", "a b", "ü", "%C3%BC", "t=a", "A" * 300, "A" * 301, "a\r\nb", "\ud800"]


@pytest.fixture(params=FLAVOURS)
async def link(request, redis_servers) -> AsyncIterator[Link]:
    async with linked(redis_servers[request.param].url) as link:
        await link.call("FLUSHALL")
        yield link


def claim(request_id: str, limits: RateLimits, tokens: int = 1, tenant: str = "finance", lease_ms: int = 30_000) -> Claim:
    return Claim(request_id, tenant, (Budget("tenant", limits), Budget("model:m", limits)), tokens, lease_ms)


async def now_ms(link: Link) -> float:
    seconds, micros = await link.call("TIME")
    return int(seconds) * 1000 + int(micros) / 1000


async def reached(link: Link, time_ms: float) -> bool:
    return await now_ms(link) >= time_ms


@pytest.mark.parametrize("ceiling", [RateLimits(tpm=60_000), RateLimits(max_streams=1)])
async def test_sleeping_for_retry_after_is_enough_by_redis_time(link, ceiling):
    ledger = RedisLedger(link)
    await ledger.reserve(claim("first", ceiling, 60_000, lease_ms=70))
    answer = await ledger.reserve(claim("second", ceiling, 50))
    assert isinstance(answer, Denied)
    retry_at_ms = await now_ms(link) + answer.retry_after_ms
    await until(lambda: reached(link, retry_at_ms))
    assert isinstance(await ledger.reserve(claim("second", ceiling, 50)), Granted)


async def test_every_key_goes_by_itself_and_refusals_do_not_keep_it(link):
    ledger = RedisLedger(link)
    ceiling = RateLimits(rpm=10, tpm=1000, max_streams=10)
    await ledger.reserve(claim("a", ceiling, 900, lease_ms=5000))
    keys = await link.call("KEYS", "*")
    assert len(keys) == 5
    for key in keys:
        assert 0 < await link.call("PTTL", key) <= (10_000 if b"}:lease:" in key else 120_000)
    await ledger.settle("finance", "a", 10**9)
    assert {key for key in keys if b"}:lease:" not in key} == set(await link.call("KEYS", "*"))
    for key in await link.call("KEYS", "*"):
        assert 0 < await link.call("PTTL", key) <= 120_000
    await link.call("PEXPIRE", "din:{t=finance}:count:tenant", 50_000)
    assert isinstance(await ledger.reserve(claim("b", ceiling, 1_000_000)), Denied)
    assert isinstance(await ledger.reserve(claim("c", ceiling, 100)), Denied)
    assert await link.call("PTTL", "din:{t=finance}:count:tenant") <= 50_000


async def test_a_longer_lease_is_not_cut_short_by_a_later_shorter_one(link):
    ledger = RedisLedger(link)
    await ledger.reserve(claim("long", RateLimits(max_streams=9), lease_ms=60_000))
    await ledger.reserve(claim("short", RateLimits(max_streams=9), lease_ms=1000))
    assert await link.call("PTTL", "din:{t=finance}:lease:tenant") > 50_000


async def test_a_finished_request_is_soon_forgotten(link):
    ledger = RedisLedger(link)
    await ledger.reserve(claim("a", RateLimits(tpm=1000, max_streams=1)))
    await ledger.settle("finance", "a", 1)
    await ledger.release("finance", "a")
    assert 0 < await link.call("PTTL", "din:{t=finance}:request:a") <= 10_000


async def test_all_keys_of_a_tenant_share_one_tag_and_no_two_tenants_share_any(link):
    ledger = RedisLedger(link)
    for number, name in enumerate(NAMES):
        await ledger.reserve(claim(f"r{number}", RateLimits(rpm=5, max_streams=5), tenant=name))
    keys = [key.decode() for key in await link.call("KEYS", "*")]
    assert len(keys) == 5 * len(NAMES)
    tags = [key[key.index("{") + 1 : key.index("}")] for key in keys]
    assert all(tags)
    assert len(set(tags)) == len(NAMES)


@given(st.text(), st.text())
def test_a_tag_is_forged_by_no_name(one, other):
    assert (make_hash_tag(one) == make_hash_tag(other)) == (one == other)
    inner = make_hash_tag(one)[1:-1]
    assert inner
    assert not set("{}:") & set(inner)
    assert len(inner) <= 66


async def test_another_replica_renews_releases_and_settles(link):
    here, there = RedisLedger(link), RedisLedger(link)
    ceiling = RateLimits(tpm=1000, max_streams=1)
    await here.reserve(claim("a", ceiling, 900))
    await there.renew("finance", "a", 60_000)
    assert await link.call("PTTL", "din:{t=finance}:lease:tenant") > 30_000
    await there.release("finance", "a")
    assert await there.settle("finance", "a", 100)
    assert not await here.settle("finance", "a", 100)
    assert isinstance(await here.reserve(claim("b", ceiling, 890)), Granted)


async def test_a_repetition_under_other_budgets_changes_nothing_about_the_first(link):
    ledger, other = RedisLedger(link), RedisLedger(link)
    first = await ledger.reserve(claim("a", RateLimits(tpm=1000), 900))
    changed = Claim("a", "finance", (Budget("key:k", RateLimits(tpm=50)),), 10, 1000)
    repeated = await other.reserve(changed)
    assert isinstance(repeated, Granted)
    assert repeated.status == first.status
    assert await other.settle("finance", "a", 0)
    answer = await ledger.reserve(claim("b", RateLimits(tpm=1000), 1000))
    assert isinstance(answer, Granted)


async def test_more_open_requests_than_are_remembered_are_still_settled(link, monkeypatch):
    monkeypatch.setattr("din_extproc.edge.redis.ledger._REMEMBERED", 10)
    ledger = RedisLedger(link)
    for number in range(30):
        await ledger.reserve(claim(f"r{number}", RateLimits(tpm=10_000), 100))
    assert len(ledger._held) == 10
    assert all([await ledger.settle("finance", f"r{number}", 1) for number in range(30)])
    assert ledger._held == {}


async def test_a_waiter_that_is_cancelled_takes_nothing_and_disturbs_nobody(link):
    ledger = RedisLedger(link)
    ceiling = RateLimits(tpm=10_000, max_streams=100)
    waiters = [asyncio.ensure_future(ledger.reserve(claim(f"r{n}", ceiling, 100))) for n in range(40)]
    await turns()
    for waiter in waiters[::2]:
        waiter.cancel()
    answers = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(isinstance(answer, Granted) for answer in answers[1::2])
    assert await link.call("ZCARD", "din:{t=finance}:lease:tenant") == 20
    answer = await ledger.reserve(claim("last", ceiling, 100))
    assert isinstance(answer, Granted)
    assert 7900 <= answer.status.remaining_tokens <= 8000


async def test_a_coroutine_driven_by_hand_is_enough(link):
    """No task, no timeout block: whoever drives it needs only the futures it yields."""
    ledger = RedisLedger(link)
    steps = ledger.reserve(claim("a", RateLimits(rpm=5)))
    future = steps.send(None)
    done = asyncio.get_running_loop().create_future()

    def go_on(_: object) -> None:
        try:
            steps.send(None)
        except StopIteration as stop:
            done.set_result(stop.value)

    future.add_done_callback(go_on)
    assert isinstance(await done, Granted)


async def test_a_coroutine_closed_half_way_gives_back_what_it_took(link):
    ledger = RedisLedger(link)
    steps = ledger.reserve(claim("a", RateLimits(max_streams=1)))
    steps.send(None)
    steps.close()
    assert isinstance(await ledger.reserve(claim("b", RateLimits(max_streams=1))), Granted)


async def test_parallel_streams_from_two_replicas_never_overshoot(link):
    replicas = [RedisLedger(link), RedisLedger(link)]
    ceiling = RateLimits(tpm=10_000)
    answers = await asyncio.gather(*(replicas[n % 2].reserve(claim(f"r{n}", ceiling, 2000)) for n in range(50)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 5


async def test_a_record_from_before_there_was_a_time_of_admission_is_settled_without_its_place(link):
    ceiling = RateLimits(rpm=2, tpm=1000)
    await RedisLedger(link).reserve(claim("old", ceiling, 1000))
    (key,) = await link.call("KEYS", "*request:old")
    record = await link.call("GET", key)
    await link.call("SET", key, record[:65] + record[73:], "PX", 60_000)
    assert await RedisLedger(link).settle("finance", "old", None)
    answer = await RedisLedger(link).reserve(claim("new", ceiling, 900))
    assert isinstance(answer, Granted)
    assert answer.status.remaining_requests == 0

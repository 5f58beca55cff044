"""Redis paused, killed, restarted and made to forget, under load: every request is decided, by the policy, and counted once."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.guard import GuardedLedger, OnError
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from tests.support.ledgers import linked
from tests.support.servers import RedisServer

pytestmark = pytest.mark.chaos
ROOM = RateLimits(rpm=10**6, tpm=10**9, max_streams=10**6)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@contextlib.asynccontextmanager
async def guarded(
    url: str, on_error: OnError, name: str = "here", timeout_ms: int = 300, **sidecar: Any
) -> AsyncIterator[tuple[GuardedLedger, Link]]:
    async with linked(url, timeout_ms=timeout_ms) as link:
        local = LocalLedger(lambda: time.monotonic_ns() // 1_000_000)
        guard = GuardedLedger(link, RedisLedger(link), local, on_error, name, **sidecar)
        await guard.start()
        yield guard, link
        await guard.close()


def claim(request_id: str, limits: RateLimits = ROOM, tokens: int = 10) -> Claim:
    return Claim(request_id, "finance", (Budget("tenant", limits),), tokens, 30_000)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is anybody's state
            await asyncio.sleep(0.01)


async def test_a_paused_redis_holds_nobody_up(server):
    async with guarded(server.url, OnError.LOCAL_SHARE, timeout_ms=50) as (guard, link):
        assert isinstance(await guard.reserve(claim("before")), Granted)
        with server.paused():
            first = [asyncio.ensure_future(guard.reserve(claim(f"first{n}"))) for n in range(50)]
            long_after = asyncio.ensure_future(asyncio.sleep(20))
            await asyncio.wait([*first, long_after], return_when=asyncio.FIRST_COMPLETED)
            assert not long_after.done()
            await asyncio.gather(*first)
            long_after.cancel()
            assert not link.state.up
            assert "no answer within 50 ms" in guard.state.reason
            for number in range(1000):
                decided_at_once = guard.reserve(claim(f"later{number}"))
                with pytest.raises(StopIteration):
                    decided_at_once.send(None)
            assert len(asyncio.all_tasks()) < 10
        await until(lambda: link.state.up)
        assert isinstance(await guard.reserve(claim("after")), Granted)
        await until(lambda: guard.state.shared)


def test_the_same_on_the_loop_that_production_uses():
    async def story() -> None:
        with RedisServer() as server:
            async with linked(server.unix_url, timeout_ms=50) as link:
                ledger = RedisLedger(link)
                with server.paused():
                    answers = await asyncio.gather(*(ledger.reserve(claim(f"r{n}")) for n in range(50)), return_exceptions=True)
                    assert all(isinstance(answer, LimitsUnavailable) for answer in answers)
                await until(lambda: link.state.up)
                assert isinstance(await ledger.reserve(claim("after")), Granted)

    uvloop.run(story())


async def test_a_late_loop_is_not_taken_for_a_silent_redis(server):
    async with linked(server.unix_url, timeout_ms=20) as link:
        answers = [link.call("ECHO", n) for n in range(100)]
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is held up on purpose
        assert len(await asyncio.gather(*answers)) == 100
        assert link.state.up


async def test_what_a_paused_redis_still_counted_is_given_back(server):
    async with guarded(server.url, OnError.LOCAL_SHARE) as (guard, link):
        with server.paused():
            assert isinstance(await guard.reserve(claim("r", RateLimits(tpm=1000, max_streams=1), 1000)), Granted)
        await until(lambda: link.state.up and guard.state.shared)
        assert isinstance(await RedisLedger(link).reserve(claim("s", RateLimits(tpm=1000, max_streams=1), 1000)), Granted)


async def test_flushing_scripts_and_restarting_under_load_is_seen_by_no_client(server):
    async with guarded(server.url, OnError.LOCAL_SHARE) as (guard, link):
        stop = asyncio.Event()

        async def client(name: int) -> int:
            count = 0
            while not stop.is_set():
                count += 1
                request_id = f"{name}-{count}"
                assert isinstance(await guard.reserve(claim(request_id)), Granted)
                await guard.release("finance", request_id)
                await guard.settle("finance", request_id, 7)
                await asyncio.sleep(0.002)
            return count

        clients = [asyncio.ensure_future(client(n)) for n in range(10)]
        for _ in range(20):
            await link.call("SCRIPT", "FLUSH")
            await asyncio.sleep(0.01)
        assert guard.state.shared
        await asyncio.to_thread(server.restart)
        await until(lambda: link.state.up and guard.state.shared)
        stop.set()
        assert min(await asyncio.gather(*clients)) > 10
        assert await link.call("ZCARD", "din:{t=finance}:lease:tenant") == 0


async def test_every_replica_enforces_its_share_and_nobody_is_refunded_twice(server):
    ceiling = RateLimits(max_streams=6, tpm=6000)
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(guarded(server.url, OnError.LOCAL_SHARE, f"replica {n}")) for n in range(3)]
        guards = [guard for guard, _ in replicas]
        await until(lambda: all(guard.state.replicas == 3 for guard in guards))
        for number in range(6):
            assert isinstance(await guards[number % 3].reserve(claim(f"before{number}", ceiling, 500)), Granted)
        server.pause()
        try:
            granted = {}
            for number in range(12):
                granted[number] = isinstance(await guards[number % 3].reserve(claim(f"away{number}", ceiling, 500)), Granted)
            assert sum(granted.values()) == 6
            for number in range(6):
                assert await guards[number % 3].settle("finance", f"before{number}", 100)
                await guards[number % 3].release("finance", f"before{number}")
        finally:
            server.resume()
        await until(lambda: all(link.state.up and guard.state.shared for guard, link in replicas))
        for number, passed in granted.items():
            if passed:
                assert await guards[number % 3].settle("finance", f"away{number}", 0)
                await guards[number % 3].release("finance", f"away{number}")
        link = replicas[0][1]
        assert await link.call("ZCARD", "din:{t=finance}:lease:tenant") == 0
        answer = await guards[0].reserve(claim("after", ceiling, 1))
        assert isinstance(answer, Granted)
        assert 5399 <= answer.status.remaining_tokens <= 5999


async def test_closed_refuses_and_open_lets_everything_pass(server):
    async with guarded(server.url, OnError.CLOSED, "a") as (closed, _), guarded(server.url, OnError.OPEN, "b") as (open_, link):
        with server.paused():
            for number in range(20):
                with pytest.raises(LimitsUnavailable):
                    await closed.reserve(claim(f"c{number}", RateLimits(rpm=1)))
                assert await open_.reserve(claim(f"o{number}", RateLimits(rpm=1))) == Granted(RateLimitStatus(), roomy=True, recorded=False)
        await until(lambda: link.state.up and open_.state.shared)
        assert not await open_.settle("finance", "o1", 100)
        await open_.release("finance", "o1")


async def test_one_line_per_transition_and_none_per_request(server, caplog):
    with caplog.at_level(logging.WARNING):
        async with guarded(server.url, OnError.LOCAL_SHARE) as (guard, link):
            with server.paused():
                for number in range(200):
                    await guard.reserve(claim(f"r{number}"))
            await until(lambda: link.state.up and guard.state.shared)
    assert [record.name.rpartition(".")[2] for record in caplog.records] == ["link", "guard", "link"]
    away, shares, back = [record.getMessage() for record in caplog.records]
    assert "disconnected: no answer" in away
    assert "local_share among 1 processes" in shares
    assert back.endswith(": connected")


@pytest.mark.parametrize("how", ["ended", "paused"])
async def test_a_lost_subscription_is_logged_once_with_its_reason_and_once_when_it_is_restored(server, how, caplog, monkeypatch):
    monkeypatch.setattr("din_extproc.edge.redis.subscription._SILENCE_S", 0.2)
    monkeypatch.setattr("din_extproc.edge.redis.subscription._CONNECT_S", 0.5)
    tries, began = [], asyncio.Event()
    locate = make_locator(server.url)

    async def counted():
        tries.append(time.monotonic())
        return await locate()

    listening = asyncio.create_task(ChannelSubscription(counted, "din:a", lambda _: None, began.set).run())
    try:
        with caplog.at_level(logging.INFO):
            await asyncio.wait_for(began.wait(), 20)
            began.clear()
            if how == "ended":
                await asyncio.to_thread(server.end)
            else:
                server.pause()
            await until(lambda: len(tries) > 5)
            if how == "ended":
                await asyncio.to_thread(server.start)
            else:
                server.resume()
            await asyncio.wait_for(began.wait(), 30)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[0].startswith("redis: subscription to din:a interrupted: ")
    assert warnings[0].removeprefix("redis: subscription to din:a interrupted: ")
    assert warnings[1:] == ["redis: subscription to din:a restored"]
    pauses = [after - before for before, after in itertools.pairwise(tries[1:6])]
    assert sum(pauses[2:]) > 2 * pauses[0], "attempts become rare"


async def test_a_replica_that_leaves_is_no_longer_counted(server):
    async with guarded(server.url, OnError.LOCAL_SHARE, "stays") as (guard, _):
        async with guarded(server.url, OnError.LOCAL_SHARE, "goes"):
            await until(lambda: guard.state.replicas == 2)
        await until(lambda: guard.state.replicas != 2)
        assert guard.state.replicas == 1


async def test_a_process_that_only_keeps_accounts_takes_no_share_but_knows_how_many_do_and_whether_limits_are_shared(server):
    async with (
        guarded(server.url, OnError.LOCAL_SHARE, "worker 0", workers=2) as (one, _),
        guarded(server.url, OnError.LOCAL_SHARE, "worker 1", workers=2) as (other, _),
        guarded(server.url, OnError.LOCAL_SHARE, "accounts", workers=2, decides=False) as (accounts, link),
    ):
        for _ in range(2):
            await one._count_replicas()
            await accounts._count_replicas()
        assert [guard.state.replicas for guard in (one, other, accounts)] == [2, 2, 2]
        with server.paused():
            await until(lambda: not accounts.state.shared)
        await until(lambda: link.state.up and accounts.state.shared)


async def nowhere():
    raise LimitsUnavailable("no such place")


async def test_workers_that_start_without_redis_share_the_limit_among_themselves():
    link = Link(nowhere, ())
    await link.start(wait_s=0.05)
    workers = [
        GuardedLedger(link, RedisLedger(link), LocalLedger(lambda: 0), OnError.LOCAL_SHARE, f"worker {n}", workers=4) for n in range(4)
    ]
    for worker in workers:
        await worker.start()
    answers = [await worker.reserve(claim(f"{n}", RateLimits(rpm=8))) for worker in workers for n in range(5)]
    assert sum(isinstance(answer, Granted) for answer in answers) == 8
    assert {worker.state.replicas for worker in workers} == {4}
    for worker in workers:
        await worker.close()
    await link.close()


async def test_a_gateway_that_starts_without_redis_follows_its_policy():
    link = Link(nowhere, ())
    await link.start(wait_s=0.05)
    guard = GuardedLedger(link, RedisLedger(link), LocalLedger(lambda: 0), OnError.LOCAL_SHARE, "here")
    await guard.start()
    assert isinstance(await guard.reserve(claim("a", RateLimits(rpm=1))), Granted)
    assert isinstance(await guard.reserve(claim("b", RateLimits(rpm=1))), Denied)
    assert guard.state.reason == "no such place"
    await guard.close()
    await link.close()

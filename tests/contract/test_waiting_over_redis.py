"""Requests that wait in one replica for slots that another one releases: woken by the scripts, on every flavour of Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from din_extproc.admit import queue
from din_extproc.admit.ledger import Claim, Granted
from din_extproc.admit.queue import QueueState
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Budget, Queueing, RateLimits
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.ledger import RedisLedger
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from din_extproc.edge.redis.wakeup_channel import RedisWakeupChannel
from tests.support.ledgers import linked
from tests.support.servers import FLAVOURS
from tests.support.waiting import LIMIT_S, until

OWN = Budget("tenant", RateLimits(max_streams=1))
COMMON = Budget("network", RateLimits(tpm=1000, max_streams=1), shared=True)


class Replica:
    """One process's ledger and waiting room."""

    def __init__(self, link, url: str) -> None:
        self.link = link
        self.ledger = RedisLedger(link)
        bell = RedisWakeupChannel(link, Names())
        self.room = AdmissionQueue(self.ledger, bell, lambda: True, SystemClock.monotonic_ms, Background().start, QueueState())
        self.listening = asyncio.Event()
        self.granted: list[tuple[str, float]] = []
        listener = bell.make_listener(self.room.on_freed, lambda *grant: self.granted.append(grant))
        self._subscription = ChannelSubscription(make_locator(url), Names().channel, listener, self.listening.set)
        self._task = asyncio.create_task(self._subscription.run())

    def wait(self, name: str, tenant: str, *budgets: Budget):
        claim = Claim(name, tenant, budgets, 10, 60_000)
        return asyncio.ensure_future(self.room.wait(claim, Priority.STANDARD, Queueing(20_000), 20_000))

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.room.close()


@pytest.fixture(params=FLAVOURS)
async def replicas(request, redis_servers, monkeypatch) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two that hear of what comes back by the bell alone."""
    monkeypatch.setattr(queue, "RECHECK_MS", 60_000)
    url = redis_servers[request.param].url
    async with linked(url) as one, linked(url) as other:
        await one.call("FLUSHALL")
        pair = Replica(one, url), Replica(other, url)
        for each in pair:
            await each.listening.wait()
        yield pair
        for each in pair:
            await each.close()


async def asked(replica: Replica) -> None:
    await until(lambda: replica.link.call("EXISTS", "din:{t=finance}:waiting"))


@pytest.mark.parametrize("end", ["release", "settle"])
async def test_what_one_replica_gives_back_wakes_whoever_waits_for_it_in_another(replicas, end):
    here, there = replicas
    assert isinstance(await here.ledger.reserve(Claim("busy", "finance", (OWN,), 10, 60_000)), Granted)
    waiting = there.wait("next", "finance", OWN)
    await asked(there)
    if end == "release":
        await here.ledger.release("finance", "busy")
    else:
        await here.ledger.settle("finance", "busy", 10)
    async with asyncio.timeout(LIMIT_S):
        assert isinstance(await waiting, Granted)


async def test_what_one_tenant_gives_back_of_what_all_share_wakes_another_tenant(replicas):
    here, there = replicas
    assert isinstance(await here.ledger.reserve(Claim("busy", "support", (COMMON,), 10, 60_000)), Granted)
    waiting = there.wait("next", "finance", OWN, COMMON)
    await asked(there)
    await here.ledger.settle("support", "busy", 10)
    async with asyncio.timeout(LIMIT_S):
        assert isinstance(await waiting, Granted)
        await until(lambda: here.granted)
    assert (here.granted, there.granted) == ([("finance", 10.0)], []), "the others hear of it, for the sake of weights"


async def test_no_wake_up_is_sent_while_no_request_waits(replicas):
    here, _ = replicas
    await here.link.call("CONFIG", "RESETSTAT")
    await here.ledger.reserve(Claim("one", "finance", (OWN, COMMON), 10, 60_000))
    await here.ledger.release("finance", "one")
    await here.ledger.settle("finance", "one", 10)
    assert b"cmdstat_publish:" not in await here.link.call("INFO", "commandstats")

"""Requests that wait: woken by what comes back, refused at the end of their patience, gone when their client is."""

import asyncio
import contextlib

import pytest

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable
from din_extproc.admit.local import LocalLedger
from din_extproc.admit.queue import QueueState
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Budget, Queueing, RateLimits
from din_extproc.edge.admission_queue import AdmissionQueue
from din_extproc.edge.background import Background
from din_extproc.flow.queueing import QueueFull
from tests.support.waiting import turns, until

ONE = (Budget("tenant", RateLimits(max_streams=1)),)
PATIENT = Queueing(5000, 10, 1)

pytestmark = pytest.mark.virtual_time


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)


class Ringing(LocalLedger):
    """Counters that tell who waits of everything that comes back, as the scripts do; also the bell."""

    def __init__(self) -> None:
        super().__init__(now_ms)
        self.wanted: list[str] = []
        self.asked: list[str] = []
        self.gone = False
        self.room: AdmissionQueue

    def request_wakeup(self, tenant, lasting_ms):
        self.wanted.append(tenant)

    def announce_grant(self, tenant, cost):
        """Nobody else waits."""

    async def reserve(self, claim):
        self.asked.append(claim.request_id)
        if self.gone:
            raise LimitsUnavailable("gone")
        await turns()
        return await super().reserve(claim)

    async def release(self, tenant, request_id):
        await super().release(tenant, request_id)
        self.room.on_freed(tenant)


class Place:
    """A room, its counters, and short words."""

    def __init__(self) -> None:
        self.ledger = Ringing()
        self.shared = True
        self.room = AdmissionQueue(self.ledger, self.ledger, lambda: self.shared, now_ms, Background().start, QueueState(20, 5))
        self.ledger.room = self.room

    def wait(self, name, patience_ms=5000, priority=Priority.STANDARD, queueing=PATIENT, tenant="t"):
        return asyncio.ensure_future(self.room.wait(claim(name, tenant), priority, queueing, patience_ms))


def claim(name: str, tenant: str = "t") -> Claim:
    return Claim(name, tenant, ONE, 1, 30_000)


@pytest.fixture
async def place():
    made = Place()
    assert isinstance(await made.ledger.reserve(claim("busy")), Granted)
    yield made
    await made.room.close()


async def test_a_slot_that_comes_back_is_taken_by_whoever_waits_first(place):
    first, second = place.wait("first"), place.wait("second")
    await until(lambda: place.ledger.asked.count("first") == 1)
    assert place.ledger.wanted == ["t"], "the bell rings for a while"
    await place.ledger.release("t", "busy")
    assert isinstance(await first, Granted)
    assert not second.done()
    await place.ledger.release("t", "first")
    assert isinstance(await second, Granted)
    assert place.room.snapshot() == {"waiting": 0, "by_tenant": {}, "granted": 2, "expired": 0, "full": 0, "left": 0}


async def test_a_request_that_waited_too_long_gets_the_refusal_of_the_exhausted_limit(place):
    answer = await place.wait("late", 30)
    assert isinstance(answer, Denied)
    assert (answer.dimension, answer.retry_after_ms > 0) == ("max_streams", True)
    assert place.room.snapshot()["expired"] == 1


async def test_a_client_that_leaves_leaves_the_queue_and_the_next_one_gets_the_slot(place):
    leaver, stayer = place.wait("leaver"), place.wait("stayer")
    await until(lambda: "leaver" in place.ledger.asked)
    leaver.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaver
    assert len(place.room) == 1
    await place.ledger.release("t", "busy")
    assert isinstance(await stayer, Granted)
    assert place.room.snapshot()["left"] == 1


async def test_what_is_granted_to_nobody_any_more_is_given_back(place):
    leaver = place.wait("leaver")
    await until(lambda: "leaver" in place.ledger.asked)
    await place.ledger.release("t", "busy")
    while len(place.room):  # turn by turn, so that it has not resumed yet
        await turns()
    leaver.cancel()  # it was granted, and has not resumed yet
    with contextlib.suppress(asyncio.CancelledError):
        await leaver
    assert isinstance(await place.ledger.reserve(claim("next")), Granted)


async def test_a_full_queue_turns_away_and_says_when_there_is_room(place):
    waiting = [place.wait(f"w{n}", 2000, queueing=Queueing(5000, 2, 1)) for n in range(2)]
    await turns()
    answer = await place.wait("third", queueing=Queueing(5000, 2, 1))
    assert isinstance(answer, QueueFull)
    assert 1 <= answer.vacancy_ms <= 2000
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_tokens_that_refill_are_asked_for_when_they_are_there(place):
    budgets = (Budget("tenant", RateLimits(tpm=60_000)),)
    assert isinstance(await place.ledger.reserve(Claim("all", "u", budgets, 60_000, 1000)), Granted)
    began = now_ms()
    answer = await place.room.wait(Claim("some", "u", budgets, 200, 1000), Priority.STANDARD, PATIENT, 5000)
    assert isinstance(answer, Granted)
    assert 150 <= now_ms() - began <= 201
    assert place.ledger.asked.count("some") <= 4, "it is not asked for again and again"


async def test_nobody_waits_for_counters_that_are_not_shared(place):
    place.shared = False
    assert isinstance(await place.wait("one"), Denied)
    place.shared = True
    waiting = place.wait("two")
    await until(lambda: "two" in place.ledger.asked)
    place.shared = False
    place.room.on_freed("t")
    assert isinstance(await waiting, Denied)


async def test_counters_that_go_away_end_the_wait(place):
    waiting = place.wait("one")
    await until(lambda: "one" in place.ledger.asked)
    place.ledger.gone = True
    place.room.on_any_freed()
    with pytest.raises(LimitsUnavailable):
        await waiting
    assert len(place.room) == 0

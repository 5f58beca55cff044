"""What becomes of a finished exchange, also while the counters are out of reach."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from din_extproc.admit.ledger import Claim, Granted, Settlement
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.flow.settlement import SettlementService
from tests.support.fakes import BrokenLedger, OneByOne
from tests.support.waiting import turns

RECORD = ExchangeRecord(
    request_id="r-1",
    trace_id="t-1",
    tenant="finance",
    key_id="k",
    model="m",
    alias="a",
    pool="p",
    rule="",
    node_id="n-1",
    status=200,
    outcome=Outcome.COMPLETED,
    stream=True,
    usage=Usage(40, 10),
    reserved_tokens=300,
    prompt_estimate=44,
    features=(1.0, 2.0),
    fixed=3,
    attempts=1,
    degraded=False,
    started_at=0.0,
)


def numbered(number: int) -> ExchangeRecord:
    return replace(RECORD, request_id=f"r-{number}")


async def test_the_real_cost_replaces_the_reservation_and_the_slot_is_free() -> None:
    ledger = LocalLedger(lambda: 0)
    claim = Claim("r-1", "finance", (Budget("tenant", RateLimits(tpm=1000, max_streams=1)),), 300, 60_000)
    await ledger.reserve(claim)
    assert await SettlementService(OneByOne(ledger)).settle([RECORD])
    after = await ledger.reserve(replace(claim, request_id="r-2", tokens=950))
    assert isinstance(after, Granted)
    assert after.status.remaining_tokens == 0


async def test_what_reserved_nothing_costs_no_trip() -> None:
    refused = replace(RECORD, outcome=Outcome.REFUSED, reserved_tokens=0, usage=Usage(0, 0))
    assert await SettlementService(OneByOne(BrokenLedger())).settle([refused])


async def test_records_wait_while_the_counters_are_gone_and_count_once_afterwards() -> None:
    ledger = BrokenLedger()
    settler = SettlementService(OneByOne(ledger))
    assert [await settler.settle([numbered(number)]) for number in range(3)] == [False, False, False]
    assert not await settler.retry()
    assert settler.waiting == 3
    ledger.mended = True
    assert await settler.retry()
    assert (settler.waiting, settler.dropped) == (0, 0)
    assert ledger.settled == {f"r-{number}": 50 for number in range(3)}


async def test_the_oldest_are_given_up_when_too_many_wait() -> None:
    ledger = BrokenLedger()
    settler = SettlementService(OneByOne(ledger), capacity=2)
    for number in range(5):
        await settler.settle([numbered(number)])
    ledger.mended = True
    await settler.retry()
    assert (set(ledger.settled), settler.dropped) == ({"r-3", "r-4"}, 3)


async def test_a_record_outlives_the_cancellation_of_its_settlement() -> None:
    class Stuck:
        async def settle_all(self, _settlements: Sequence[Settlement]) -> int:
            await asyncio.Event().wait()
            return 1

    settler = SettlementService(Stuck())
    task = asyncio.create_task(settler.settle([RECORD]))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert settler.waiting == 1


async def test_two_retries_at_once_settle_each_record_once() -> None:
    ledger = BrokenLedger()
    settler = SettlementService(OneByOne(ledger))
    for number in range(3):
        await settler.settle([numbered(number)])
    ledger.mended = True
    assert await asyncio.gather(settler.retry(), settler.retry()) == [True, True]
    assert (settler.waiting, len(ledger.settled)) == (0, 3)


@pytest.mark.parametrize(
    ("outcome", "status", "sent_ms", "gives_back"),
    [
        (Outcome.UPSTREAM_ERROR, 503, None, True),
        (Outcome.NOT_DISPATCHED, 503, None, True),
        (Outcome.REFUSED, 429, None, True),
        (Outcome.UPSTREAM_ERROR, 503, 3.0, False),
        (Outcome.CLIENT_ERROR, 400, 3.0, False),
        (Outcome.CLIENT_CANCELLED, 0, None, False),
    ],
)
async def test_only_what_reached_no_node_and_was_not_given_up_by_its_client_gives_its_place_back(outcome, status, sent_ms, gives_back):
    ledger = LocalLedger(lambda: 0)
    claim = Claim("r-1", "finance", (Budget("tenant", RateLimits(rpm=1)),), 300, 60_000)
    await ledger.reserve(claim)
    ended = replace(RECORD, outcome=outcome, status=status, sent_ms=sent_ms, usage=Usage(0, 0))
    assert await SettlementService(OneByOne(ledger)).settle([ended])
    assert isinstance(await ledger.reserve(replace(claim, request_id="r-2")), Granted) == gives_back

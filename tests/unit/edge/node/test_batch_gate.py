"""The batch window on the loop's own clock."""

import asyncio

import pytest
import uvloop

from din_extproc.edge.node.batch_gate import BatchGate
from din_extproc.schedule.batch import BatchLimits
from tests.support.waiting import turns

LONG = 3600.0


async def test_a_full_bucket_goes_together_and_in_order():
    gate, went = BatchGate(BatchLimits(max_batch_tokens=300, max_wait_s=LONG)), []

    async def one(name, tokens):
        await gate.hold(tokens)
        went.append(name)

    tasks = [asyncio.create_task(one(name, 100)) for name in "ab"]
    await turns(5)
    assert (went, gate.held) == ([], 2)
    tasks.append(asyncio.create_task(one("c", 100)))
    await asyncio.gather(*tasks)
    assert (went, gate.held) == (["a", "b", "c"], 0)


@pytest.mark.virtual_time
async def test_a_bucket_that_is_not_full_goes_when_its_time_has_come():
    gate = BatchGate(BatchLimits(max_batch_tokens=300, max_wait_s=LONG))
    await asyncio.gather(gate.hold(10), gate.hold(10), gate.hold(600))
    assert asyncio.get_running_loop().time() == pytest.approx(LONG)
    await gate.hold(10)
    assert asyncio.get_running_loop().time() == pytest.approx(2 * LONG)
    assert gate.held == 0


async def test_a_request_larger_than_a_batch_waits_for_nobody():
    gate = BatchGate(BatchLimits(max_batch_tokens=300, max_wait_s=LONG))
    async with asyncio.timeout(5):
        await gate.hold(5_000)
    assert gate.held == 0


async def test_a_client_that_is_gone_leaves_its_bucket():
    gate = BatchGate(BatchLimits(max_batch_tokens=300, max_wait_s=LONG))
    gone = asyncio.create_task(gate.hold(250))
    await turns(5)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert gate.held == 0
    stays = asyncio.create_task(gate.hold(250))
    await turns(5)
    assert not stays.done()
    stays.cancel()
    await asyncio.gather(stays, return_exceptions=True)


async def test_a_gate_that_is_opened_holds_nobody_back():
    gate = BatchGate(BatchLimits(max_batch_tokens=300, max_wait_s=LONG))
    held = asyncio.create_task(gate.hold(10))
    await turns(5)
    gate.open()
    async with asyncio.timeout(5):
        await held
        await gate.hold(10)
    assert gate.held == 0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_request_is_forgotten_on_either_loop(run):
    async def traffic():
        gate = BatchGate(BatchLimits(max_batch_tokens=2_000, max_wait_s=0.003))

        async def one(number):
            await turns(number % 40)
            await gate.hold(number * 37 % 1_500)

        async with asyncio.timeout(20):
            await asyncio.gather(*(one(number) for number in range(400)))
        return gate.held

    assert run(traffic()) == 0

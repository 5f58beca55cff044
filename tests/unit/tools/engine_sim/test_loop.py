"""The modelled engine on an event loop whose clock jumps."""

import asyncio

import pytest

from din_extproc.tools.engine_model.engine import EngineSpec, SimulatedSequence
from din_extproc.tools.engine_model.metrics import EngineMetrics
from din_extproc.tools.engine_sim.loop import EngineLoop
from tests.support.waiting import let_pass


@pytest.mark.virtual_time
async def test_a_paused_engine_goes_on_where_it_was():
    loop, tokens = asyncio.get_running_loop(), []
    engine = EngineLoop(EngineSpec(decode_rate=400), EngineMetrics("m", 0.0))
    engine.submit(SimulatedSequence(1, 4000), tokens.append)
    await let_pass(1.0)
    before = len(tokens)
    assert before == pytest.approx(400, abs=2)
    loop.jump(60.0)  # the process stands still
    await let_pass(0.1)
    assert len(tokens) - before == pytest.approx(40, abs=2), "a minute at 400 tokens per second is not caught up"
    engine.close()

"""One-token questions to modelled engines that are well, stuck, broken or of another kind."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from din_extproc.domain.health import ProbeKind
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.request import POOLING, Operation
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.probe.micro_probe import MicroProbe, ProbeTarget
from din_extproc.tools.engine_model.faults import parse_faults
from din_extproc.tools.engine_sim.main import EngineSimOptions, build
from din_extproc.tools.engine_sim.server import EngineServer
from tests.support.waiting import turns


@pytest.fixture
async def engine() -> AsyncIterator[tuple[EngineServer, int]]:
    server = build(EngineSimOptions(model="m", decode_rate=2000.0))
    yield server, await server.start("127.0.0.1", 0)
    await server.stop()


def target(port: int, kind: ProbeKind = ProbeKind.CHAT) -> ProbeTarget:
    operations = {
        ProbeKind.EMBEDDING: Operation.EMBEDDINGS,
        ProbeKind.RERANK: Operation.RERANK,
        ProbeKind.COMPLETION: Operation.COMPLETIONS,
    }
    node = Node("n", Endpoint("127.0.0.1", port), "m", "1", "bf16", "", 1, 8192, 8)
    served = frozenset({operations[kind]}) if kind in operations else None
    return ProbeTarget.of(node, Pool("p", "m", "m", "vllm", "round_robin", (node,), operations=served))


async def ask(port: int, kind: ProbeKind = ProbeKind.CHAT, timeout_s: float = 10.0):
    async with aiohttp.ClientSession() as session:
        return await MicroProbe(session, timeout_s, SystemClock.monotonic, lambda: "probe-of-this-test").probe(target(port, kind))


@pytest.mark.parametrize("kind", [ProbeKind.CHAT, ProbeKind.COMPLETION])
async def test_an_engine_that_generates_tells_its_time_to_the_first_token(engine, kind):
    server, port = engine
    server.faults.replace(parse_faults("latency:ms=80"))
    probed = await ask(port, kind)
    assert (probed.node_id, probed.ok, probed.reason) == ("n", True, "")
    assert probed.ttft_ms >= 80
    assert server.seen.report(1)["totals"]["completion_tokens"] == 1, "it costs one token"


@pytest.mark.parametrize("fault", ["stall", "reset", "unavailable", "oom", "error_event", "stall:after=0", "reply:status=200"])
async def test_whatever_an_engine_does_instead_of_generating_is_a_failure(engine, fault):
    server, port = engine
    server.faults.replace(parse_faults(fault))
    probed = await ask(port, timeout_s=0.8)
    assert probed.ok is False
    assert probed.ttft_ms is None
    assert probed.reason


async def test_a_port_that_nobody_listens_on_is_a_failure(engine):
    server, port = engine
    await server.stop()
    assert (await ask(port)).ok is False


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_node_that_refuses_the_gateways_credentials_or_model_name_fails_its_probe(engine, status):
    server, port = engine
    server.faults.replace(parse_faults(f"reply:status={status}"))
    assert (await ask(port)).ok is False


@pytest.mark.parametrize("fault", ["throttle", "reply:status=400", "reply:status=422"])
async def test_back_pressure_and_questions_that_it_can_t_understand_say_nothing(engine, fault):
    server, port = engine
    server.faults.replace(parse_faults(fault))
    assert (await ask(port)).ok is None


@pytest.mark.parametrize("kind", [ProbeKind.EMBEDDING, ProbeKind.RERANK])
async def test_engines_that_don_t_generate_are_asked_for_what_they_do(kind):
    server = build(EngineSimOptions(model="m", runner="pooling", dimensions=8))
    port = await server.start("127.0.0.1", 0)
    try:
        assert (await ask(port, kind)).ok is True
    finally:
        await server.stop()
    await turns()


@pytest.mark.parametrize(
    ("api", "operation"),
    [
        ("ollama", Operation.CHAT),
        ("tgi", Operation.COMPLETIONS),
        ("triton", Operation.COMPLETIONS),
        ("triton", Operation.EMBEDDINGS),
        ("triton", Operation.RERANK),
    ],
)
async def test_a_native_engine_is_asked_in_its_own_words_and_found_out_when_it_is_stuck(api, operation):
    runner = "pooling" if operation in POOLING else "generate"
    server = build(EngineSimOptions(model="m", api=api, runner=runner, decode_rate=2000.0, dimensions=8))
    node = Node("n", Endpoint("127.0.0.1", await server.start("127.0.0.1", 0)), "m", "1", "bf16", "", 1, 8192, 8)
    pool = Pool("p", "m", "m", api, "round_robin", (node,), operations=frozenset({operation}), api="native")
    try:
        async with aiohttp.ClientSession() as session:
            probe = MicroProbe(session, 1.0, SystemClock.monotonic, lambda: "probe-of-this-test")
            well = await probe.probe(ProbeTarget.of(node, pool))
            server.faults.replace(parse_faults("stall"))
            stuck = await probe.probe(ProbeTarget.of(node, pool))
    finally:
        await server.stop()
    assert (well.ok, well.reason) == (True, "")
    assert stuck.ok is False

"""What a node runs and what it refuses, before its engine sees anything."""

import asyncio

import msgspec
import pytest

from din_extproc.domain.node import Endpoint, Node
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.flow.node_handler import NodeHandlerFactory
from din_extproc.flow.trace import TraceIds
from tests.support.waiting import turns

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":8}'
TRACE = "0123456789abcdef"


class Still:
    """A clock that stands, and a watcher that keeps what it hears."""

    def __init__(self):
        self.calls = []

    def wall(self):
        return 1_700_000_000.0

    def monotonic(self):
        return 5.0

    def on_decision(self, _seconds, refused):
        self.calls.append(refused)

    def on_fault(self, error, trace_id):
        self.calls.append((error, trace_id))


class FakeGate:
    """Keeps the requests that arrive until the test releases them."""

    def __init__(self):
        self.tokens = []
        self.open = asyncio.Event()

    async def hold(self, tokens):
        self.tokens.append(tokens)
        await self.open.wait()


def make_factory(gate=None, version="2025.3.1"):
    node = Node("gpu-1", Endpoint("10.0.0.7", 8080), "m", version, "bf16", "9.0", 1, 8192, 64)
    still = Still()
    return NodeHandlerFactory(node, "127.0.0.1:8000", gate, TraceIds(1, 1), still, still, 1 << 20)


async def decide(factory, body=BODY, *, method="POST", path="/v1/chat/completions", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    flow = factory.create_handler()
    return flow, await flow.decide(RequestHead(method, path, named), body)


def error(answer):
    return msgspec.json.decode(answer.body)


async def test_a_request_goes_to_the_engine_as_it_is():
    factory = make_factory()
    flow, verdict = await decide(factory, x_din_trace_id=TRACE)
    assert isinstance(verdict, Send)
    assert (verdict.cluster, verdict.endpoints, verdict.body) == ("engine", ("127.0.0.1:8000",), None)
    assert ("x-din-trace-id", TRACE) in verdict.response_headers
    assert factory.in_flight == 1
    flow.ended()
    assert factory.in_flight == 0
    assert factory.watcher.calls == [""]


@pytest.mark.parametrize("headers", [{}, {"x_din_trace_id": ""}, {"x_din_trace_id": "short"}, {"x_din_trace_id": "a" * 200}])
async def test_a_request_that_nobody_can_trace_is_refused(headers):
    factory = make_factory()
    _, answer = await decide(factory, **headers)
    assert isinstance(answer, ImmediateResponse)
    assert (answer.status, error(answer)["code"]) == (400, "trace_missing")
    assert error(answer)["trace_id"]
    assert dict(answer.headers)["x-din-node-id"] == "gpu-1"
    assert factory.in_flight == 0


@pytest.mark.parametrize("constraint", ["", ">=2025.3,<2026", "2025.03.1", "~2025.3", "*"])
async def test_a_version_constraint_that_the_node_meets_is_no_hindrance(constraint):
    _, verdict = await decide(make_factory(), x_din_trace_id=TRACE, x_din_model_version=constraint)
    assert isinstance(verdict, Send)


@pytest.mark.parametrize("constraint", [">=2026", "2025.3.2", "~2024.1", "!=2025.3.1"])
async def test_a_version_constraint_that_the_node_cant_meet_is_refused(constraint):
    _, answer = await decide(make_factory(), x_din_trace_id=TRACE, x_din_model_version=constraint)
    assert (answer.status, error(answer)["code"]) == (409, "version_mismatch")
    assert "2025.3.1" in error(answer)["detail"]
    assert dict(answer.headers)["x-din-model-version"] == "2025.3.1"


async def test_a_constraint_that_is_none_is_an_invalid_request():
    _, answer = await decide(make_factory(), x_din_trace_id=TRACE, x_din_model_version="newest please")
    assert (answer.status, error(answer)["error"]["param"]) == (400, "x-din-model-version")


async def test_only_what_is_routed_reaches_the_engine():
    _, answer = await decide(make_factory(), path="/sleep", x_din_trace_id=TRACE)
    assert (answer.status, error(answer)["code"]) == (404, "path_not_found")
    _, verdict = await decide(make_factory(), b"", method="GET", path="/v1/models", x_din_trace_id=TRACE)
    assert isinstance(verdict, Send)


async def test_a_request_waits_for_its_batch_with_the_tokens_of_its_prompt():
    gate = FakeGate()
    factory = make_factory(gate)
    flow = factory.create_handler()
    task = asyncio.create_task(flow.decide(RequestHead("POST", "/v1/chat/completions", {"x-din-trace-id": TRACE}), BODY))
    await turns()
    assert not task.done()
    assert factory.in_flight == 1
    assert 0 < gate.tokens[0] < 30
    gate.open.set()
    assert isinstance(await task, Send)


async def test_a_client_that_leaves_the_batch_is_no_longer_in_flight():
    factory = make_factory(FakeGate())
    flow = factory.create_handler()
    task = asyncio.create_task(flow.decide(RequestHead("POST", "/v1/chat/completions", {"x-din-trace-id": TRACE}), BODY))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    flow.ended()
    assert factory.in_flight == 0


async def test_a_fault_of_ours_has_an_answer_and_ends_the_request_once():
    factory = make_factory()
    flow, _ = await decide(factory, x_din_trace_id=TRACE)
    answer = flow.failed(RuntimeError("boom"))
    flow.ended()
    assert (answer.status, factory.in_flight) == (500, 0)
    assert factory.watcher.calls[-1][1] == TRACE


@pytest.mark.parametrize("path", ["/api/chat", "/generate_stream", "/v2/models/m/infer"])
async def test_a_request_in_the_engines_own_words_goes_to_it_as_the_gateway_wrote_it(path):
    _, verdict = await decide(make_factory(), b'{"any":1}', path=path, x_din_trace_id=TRACE)
    assert isinstance(verdict, Send)
    _, answer = await decide(make_factory(), b"", path=path + "/../x", x_din_trace_id=TRACE)
    assert error(answer)["code"] == "path_not_found"

"""One ext_proc stream: an answer for everything, one end, and nothing after it."""

import asyncio
import gc
import json
import weakref

import pytest
from msgspec.structs import replace

from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.domain.response import BufferedTranslation, PassThrough, Replacement, StreamTranslation
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.grpc.ext_proc import ExtProcService, ExtProcStream
from din_extproc.edge.grpc.services import INVALID_ARGUMENT
from din_extproc.edge.grpc.verdict_call import INTERNAL
from tests.support.fakes import FakeHandlerFactory, FakeSink, send_on
from tests.support.peer import EnvoyPeer, message
from tests.support.waiting import turns, until

HEADS = message("request_headers", {":method": "POST", ":path": "/v1/chat/completions"})
BODY = message("request_body", body=b"{}", end=True)


def opened(decision=send_on):
    sink, handler_factory = FakeSink(), FakeHandlerFactory(decision)
    session = ExtProcStream(sink, ExtProcService(handler_factory))
    return session, sink, handler_factory.flows[0]


def play(peer, session, sink):
    """Give the peer's messages to the session, and its replies to the peer."""
    for data in peer.messages():
        session.message(data)
        peer.reply(sink.sent.pop(0))
    session.ended(cancelled=False)
    assert sink.sent == []


async def test_a_request_goes_through_and_reaches_its_node():
    session, sink, flow = opened()
    peer = EnvoyPeer(headers={"x-task-tier": "extraction"}, body=b'{"model":"m"}')
    play(peer, session, sink)
    assert peer.reached.headers["x-din-cluster"] == "pool"
    assert peer.reached.headers["x-din-endpoint"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert peer.reached.body == b'{"model":"m"}'
    assert [(head.path, head.header("x-task-tier"), body) for head, body in flow.asked] == [
        ("/v1/chat/completions", "extraction", b'{"model":"m"}')
    ]
    assert flow.ends == 1


async def test_a_changed_body_and_answer_headers_reach_their_sides():
    async def decide(_head, _body):
        return Send(
            cluster="c", endpoints=("1.1.1.1:1",), request_headers=(), response_headers=(("x-din-trace-id", "t"),),
            metadata={"tenant": "a"}, body=b'{"model":"physical"}', remove_headers=("accept-encoding",),
        )  # fmt: skip

    session, sink, _ = opened(decide)
    peer = EnvoyPeer(headers={"accept-encoding": "gzip"}, body=b'{"model":"alias"}')
    play(peer, session, sink)
    assert peer.reached.body == b'{"model":"physical"}'
    assert "accept-encoding" not in peer.reached.headers
    assert peer.answered.headers["x-din-trace-id"] == "t"
    assert peer.metadata == {"tenant": "a"}


async def test_a_request_without_a_body_is_answered_from_its_head():
    async def decide(_head, _body):
        return ImmediateResponse(status=200, headers=(("content-type", "application/json"),), body=b"[]", metadata={"code": "x"})

    session, sink, flow = opened(decide)
    peer = EnvoyPeer(method="GET", path="/v1/models", body=None)
    play(peer, session, sink)
    assert (peer.answered.status, peer.answered.body, peer.reached) == (200, b"[]", None)
    assert peer.metadata == {"code": "x"}
    assert flow.asked[0][1] == b""


@pytest.mark.parametrize("body", [b"{}", None])
@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("x"), RecursionError(), asyncio.CancelledError(), TimeoutError()])
async def test_any_fault_in_the_decision_is_answered_with_a_body(body, error):
    async def decide(_head, _body):
        await turns()
        raise error

    session, sink, flow = opened(decide)
    peer = EnvoyPeer(body=body)
    for data in peer.messages():
        session.message(data)
        await until(lambda: sink.sent)
        peer.reply(sink.sent.pop(0))
    session.ended(cancelled=False)
    assert peer.answered.status == 500
    error_body = json.loads(peer.answered.body)
    assert (error_body["error"]["type"], error_body["error"]["code"], error_body["trace_id"]) == (
        "server_error",
        "internal_error",
        "trace-1",
    )
    assert peer.answered.headers["content-type"] == "application/json"
    assert "secret" not in peer.answered.body.decode()
    assert (flow.errors, flow.ends, sink.failures) == ([error], 1, [])


async def test_a_verdict_that_cant_be_written_is_answered_with_a_body():
    async def decide(_head, _body):
        return Send(cluster="a\r\nb", endpoints=(), request_headers=(), response_headers=(), metadata={})

    session, sink, flow = opened(decide)
    peer = EnvoyPeer()
    play(peer, session, sink)
    assert (peer.answered.status, peer.reached) == (500, None)
    assert isinstance(flow.errors[0], ValueError)


async def test_when_even_the_failure_cant_be_reported_the_stream_fails_with_a_status():
    async def decide(_head, _body):
        raise RuntimeError

    session, sink, flow = opened(decide)
    flow.failed = lambda _error: ImmediateResponse(status=500, headers=(("x", "\n"),), body=b"")
    session.message(HEADS)
    session.message(BODY)
    assert sink.failures == [(INTERNAL, "no answer could be made: ValueError")]
    assert flow.ends == 1


@pytest.mark.parametrize("messages", [[BODY], [HEADS, HEADS], [b"\xff"], [HEADS, b""], [message("response_body")]])
async def test_a_broken_protocol_ends_this_stream_once(messages):
    session, sink, flow = opened()
    for data in messages:
        session.message(data)
    assert [status for status, _ in sink.failures] == [INVALID_ARGUMENT]
    assert (flow.asked, flow.ends) == ([], 1)
    session.message(BODY)
    session.ended(cancelled=False)
    assert (len(sink.failures), flow.ends) == (1, 1)


async def test_a_repeated_end_of_stream_is_decided_once():
    gate = asyncio.get_running_loop().create_future()

    async def decide(head, body):
        await gate
        return await send_on(head, body)

    session, sink, flow = opened(decide)
    for data in (HEADS, BODY, BODY):
        session.message(data)
    assert len(sink.sent) == 1
    gate.set_result(None)
    await turns()
    session.message(BODY)
    kinds = [ProcessingResponse.FromString(data).WhichOneof("response") for data in sink.sent]
    assert kinds == ["request_headers", "request_body", "request_body", "request_body"]
    assert len(flow.asked) == 1


@pytest.mark.parametrize("body", [b'{"a":1}', b""])
async def test_a_body_that_trailers_follow_is_decided_without_a_named_end(body):
    session, sink, flow = opened()
    peer = EnvoyPeer(body=body, trailers=True)
    play(peer, session, sink)
    assert (peer.answered.status, peer.reached.body, len(flow.asked)) == (200, body, 1)


@pytest.mark.parametrize(("cancelled", "lost", "cut"), [(True, True, True), (True, False, False), (False, False, False)])
async def test_a_stream_that_ends_first_cancels_the_decision_and_then_ends_the_flow(cancelled, lost, cut):
    order = []

    async def decide(_head, _body):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            order.append("cancelled")
            raise

    session, sink, flow = opened(decide)
    sink.lost = lost
    flow.ended = lambda *, cut: order.append(f"ended, cut: {cut}")
    session.message(HEADS)
    session.message(BODY)
    session.ended(cancelled=cancelled)
    session.ended(cancelled=True)
    assert order == ["cancelled", f"ended, cut: {cut}"]
    assert len(sink.sent) == 1
    assert (flow.errors, sink.failures) == ([], [])


async def test_a_verdict_after_the_end_is_not_sent():
    async def decide(head, body):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return await send_on(head, body)

    session, sink, flow = opened(decide)
    session.message(HEADS)
    session.message(BODY)
    session.ended(cancelled=True)
    assert (len(sink.sent), flow.ends) == (1, 1)


async def test_a_stream_that_says_nothing_still_ends_its_flow():
    session, sink, flow = opened()
    session.ended(cancelled=False)
    assert (flow.asked, flow.ends, sink.sent) == ([], 1, [])


async def test_envoys_own_answer_passes_without_a_decision():
    session, sink, flow = opened()
    session.message(message("response_headers", {":status": "400"}, end=True))
    session.ended(cancelled=False)
    assert ProcessingResponse.FromString(sink.sent[0]).WhichOneof("response") == "response_headers"
    assert (flow.asked, flow.ends) == ([], 1)


async def test_a_stream_that_has_ended_is_freed_without_a_collection():
    class Watched(ExtProcStream):
        __slots__ = ("__weakref__",)

    gc.disable()
    try:
        sink, handler_factory = FakeSink(), FakeHandlerFactory()
        session = Watched(sink, ExtProcService(handler_factory))
        play(EnvoyPeer(), session, sink)
        watch = weakref.ref(session)
        del session
        assert watch() is None
    finally:
        gc.enable()


INSTEAD = Replacement(502, (("content-type", "x/y"),), b"replaced")


class Failing:
    """Fails at one piece."""

    def feed(self, data: bytes) -> bytes:
        return data if data != b"bad" else 1 / 0

    def end(self) -> bytes:
        return b"END"


def answering(treat, status="200", instead=None):
    """A session whose answer's head is here, after a verdict that wants to see it."""

    async def decide(head, body):
        return replace(await send_on(head, body), needs_response_head=True)

    sink, handler_factory = FakeSink(), FakeHandlerFactory(decide, treat)
    session = ExtProcStream(sink, ExtProcService(handler_factory))
    handler_factory.flows[0].instead = instead
    for data in (HEADS, BODY, message("response_headers", {":status": status, "content-type": "x/y"})):
        session.message(data)
    return session, sink, handler_factory.flows[0]


async def test_the_handler_gets_the_response_head_and_returns_its_treatment():
    _, sink, flow = answering(lambda _head: PassThrough((("x-seen", "yes"),)))
    assert [(head.status, head.header("content-type")) for head in flow.heads] == [(200, "x/y")]
    assert b"x-seen" in sink.sent[-1]


FAULTS = pytest.mark.parametrize(
    "treat", [lambda _head: 1 / 0, lambda _head: PassThrough((("x", "\n"),)), lambda _head: BufferedTranslation(lambda _body: 1 / 0)]
)


@FAULTS
async def test_a_fault_in_a_treatment_is_answered_instead(treat):
    session, sink, flow = answering(treat, instead=INSTEAD)
    if not flow.errors:
        session.message(message("response_body", body=b"{}", end=True))
    assert (sink.failures, len(flow.errors)) == ([], 1)
    assert b"replaced" in b"".join(sink.sent)


async def test_the_rest_of_a_stream_whose_treatment_failed_is_left_out():
    session, sink, flow = answering(lambda _head: StreamTranslation(Failing(), failure_output=b"broken off"), instead=INSTEAD)
    before = len(sink.sent)
    for data, end in ((b"one", False), (b"bad", False), (b"two", False), (b"", True)):
        session.message(message("response_body", body=data, end=end))
    session.ended(cancelled=False)
    mutations = [ProcessingResponse.FromString(each).response_body.response.body_mutation for each in sink.sent[before:]]
    assert [each.body for each in mutations] == [b"one", b"broken off", b"", b""]
    assert [each.clear_body for each in mutations] == [False, False, True, True]
    assert (sink.failures, len(flow.errors), flow.ends) == ([], 1, 1)


@FAULTS
async def test_a_fault_in_a_treatment_fails_the_stream_so_that_envoy_passes_the_answer_on(treat):
    session, sink, flow = answering(treat)
    session.message(message("response_body", body=b"{}", end=True))
    session.ended(cancelled=False)
    assert [status for status, _ in sink.failures] == [INTERNAL]
    assert (len(flow.errors), flow.ends) == (1, 1)

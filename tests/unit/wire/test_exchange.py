"""Which message may follow which, and what is said to each."""

import pytest
from msgspec.structs import replace

from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.domain.request import Head
from din_extproc.domain.verdict import Answer, Send
from din_extproc.wire.events import (
    ProtocolError,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from din_extproc.wire.exchange import Decide, Exchange, Ignore, Reply, State

HEAD = Head("POST", "/v1/chat/completions", {})
SEND = Send(cluster="pool", endpoints=("10.0.0.1:8000",), request_headers=(), response_headers=(("x-a", "b"),), metadata={})
ANSWER = Answer(status=429, headers=(), body=b"{}")


def kind(data):
    return ProcessingResponse.FromString(data).WhichOneof("response")


def body_reply(data):
    return ProcessingResponse.FromString(data).request_body.response


def deciding(*events):
    """An exchange that has taken the events, the last of which wanted a verdict."""
    exchange = Exchange()
    commands = [exchange.receive(event) for event in events]
    assert isinstance(commands[-1], Decide)
    return exchange, commands


def test_the_usual_exchange_takes_three_messages():
    exchange = Exchange()
    first = exchange.receive(RequestHeaders(HEAD, end_of_stream=False))
    assert isinstance(first, Reply)
    assert kind(first.message) == "request_headers"
    assert exchange.receive(RequestBody(b"{}", end_of_stream=True)) == Decide(HEAD, b"{}")
    (message,) = exchange.verdict(SEND)
    assert kind(message) == "request_body"
    assert not body_reply(message).HasField("body_mutation")
    last = exchange.receive(ResponseHeaders(200, end_of_stream=False))
    options = ProcessingResponse.FromString(last.message).response_headers.response.header_mutation.set_headers
    assert [option.header.key for option in options] == ["x-a"]


def test_a_head_that_ends_the_request_is_decided_at_once():
    exchange, commands = deciding(RequestHeaders(HEAD, end_of_stream=True))
    assert commands == [Decide(HEAD, b"")]
    (message,) = exchange.verdict(SEND)
    assert kind(message) == "request_headers"


def test_an_answer_is_given_in_either_phase():
    for events in (
        [RequestHeaders(HEAD, end_of_stream=True)],
        [RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"", end_of_stream=True)],
    ):
        exchange, _ = deciding(*events)
        assert [kind(message) for message in exchange.verdict(ANSWER)] == ["immediate_response"]


def test_b102_an_end_said_twice_is_worked_on_once_and_answered_benignly():
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=True))
    assert exchange.receive(RequestBody(b"{}", end_of_stream=True)) == Ignore()
    first, second = exchange.verdict(SEND)
    assert body_reply(first).clear_route_cache
    assert not body_reply(first).HasField("body_mutation")
    assert body_reply(second) == type(body_reply(second))()
    third = exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert isinstance(third, Reply)
    assert body_reply(third.message) == type(body_reply(second))()


def test_b102_a_body_message_without_bytes_is_a_body():
    _, commands = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"", end_of_stream=True))
    assert commands[-1] == Decide(HEAD, b"")


def test_b102_a_body_that_trailers_follow_is_decided_at_once_though_it_names_no_end():
    exchange, commands = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=False))
    assert commands[-1] == Decide(HEAD, b"{}")
    assert [kind(message) for message in exchange.verdict(SEND)] == ["request_body"]
    assert kind(exchange.receive(RequestTrailers()).message) == "request_trailers"


def test_b102_trailers_that_come_before_the_verdict_are_answered_after_it():
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=False))
    assert exchange.receive(RequestTrailers()) == Ignore()
    assert [kind(message) for message in exchange.verdict(SEND)] == ["request_body", "request_trailers"]


def test_a_request_of_head_and_trailers_can_only_be_answered():
    exchange, commands = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestTrailers())
    assert commands[-1] == Decide(HEAD, b"")
    with pytest.raises(ValueError, match="its head has passed"):
        exchange.verdict(SEND)
    assert [kind(message) for message in exchange.verdict(ANSWER)] == ["immediate_response"]


@pytest.mark.parametrize(
    "event",
    [RequestBody(b"{}", end_of_stream=True), RequestTrailers(), ResponseBody(b"", end_of_stream=True), ResponseTrailers()],
)
def test_b102_what_may_not_come_first_is_a_protocol_error(event):
    with pytest.raises(ProtocolError, match="OPEN"):
        Exchange().receive(event)


def test_a_second_head_is_a_protocol_error():
    exchange = Exchange()
    exchange.receive(RequestHeaders(HEAD, end_of_stream=False))
    with pytest.raises(ProtocolError, match="RequestHeaders"):
        exchange.receive(RequestHeaders(HEAD, end_of_stream=False))


def test_envoys_own_answer_without_a_request_phase_passes():
    exchange = Exchange()
    reply = exchange.receive(ResponseHeaders(400, end_of_stream=True))
    assert kind(reply.message) == "response_headers"


@pytest.mark.parametrize("verdict", [SEND, ANSWER])
def test_a_verdict_that_comes_after_envoys_own_answer_is_dropped(verdict):
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=True))
    reply = exchange.receive(ResponseHeaders(504, end_of_stream=False))
    assert not ProcessingResponse.FromString(reply.message).response_headers.HasField("response")
    assert exchange.verdict(verdict) == ()


def test_the_answers_body_and_trailers_pass():
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=True))
    exchange.verdict(SEND)
    exchange.receive(ResponseHeaders(200, end_of_stream=False))
    assert kind(exchange.receive(ResponseBody(b"x", end_of_stream=False)).message) == "response_body"
    assert kind(exchange.receive(ResponseTrailers()).message) == "response_trailers"


def test_a_verdict_that_cant_be_written_leaves_room_for_another():
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=True))
    for broken in (replace(SEND, request_headers=(("x-a", "\n"),)), replace(SEND, response_headers=(("x-a", "\n"),))):
        with pytest.raises(ValueError, match="control character"):
            exchange.verdict(broken)
    assert [kind(message) for message in exchange.verdict(ANSWER)] == ["immediate_response"]


def test_a_verdict_that_nothing_asked_for_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="no verdict is wanted"):
        Exchange().verdict(SEND)


def test_no_pair_of_state_and_event_does_anything_but_reply_ask_wait_or_refuse():
    events = [
        RequestHeaders(HEAD, end_of_stream=False),
        RequestBody(b"{}", end_of_stream=False),
        RequestBody(b"{}", end_of_stream=True),
        RequestTrailers(),
        ResponseHeaders(200, end_of_stream=False),
        ResponseBody(b"", end_of_stream=True),
        ResponseTrailers(),
    ]
    for state in State:
        for event in events:
            exchange = Exchange()
            exchange.state, exchange._head = state, HEAD
            try:
                command = exchange.receive(event)
            except ProtocolError:
                continue
            assert isinstance(command, Reply | Decide | Ignore)

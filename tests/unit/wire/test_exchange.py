"""The states of an exchange: allowed messages, and the reply to each."""

import pytest
from msgspec.structs import replace

from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, BufferedTranslation, PassThrough, Replacement, StreamTranslation
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.wire.events import (
    ProtocolError,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from din_extproc.wire.exchange import Decide, Exchange, Ignore, Reply, State, TreatResponse

HEAD = RequestHead("POST", "/v1/chat/completions", {})
SEND = Send(cluster="pool", endpoints=("10.0.0.1:8000",), request_headers=(), response_headers=(("x-a", "b"),), metadata={})
TRANSLATED = replace(SEND, needs_response_head=True)
ANSWER = ImmediateResponse(status=429, headers=(), body=b"{}")


def kind(data):
    return ProcessingResponse.FromString(data).WhichOneof("response")


def body_reply(data):
    return ProcessingResponse.FromString(data).request_body.response


def given(data):
    return ProcessingResponse.FromString(data)


def names(reply):
    return {option.header.key: option.header.raw_value.decode() for option in reply.response.header_mutation.set_headers}


class Shouting:
    """Translates into capitals; text that is held until the end is sent then."""

    def feed(self, data):
        return data.upper()

    def end(self):
        return b"!"


def answered(verdict, status=200, *, end=False):
    """An exchange whose answer's head has come, and the command."""
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=True))
    exchange.verdict(verdict)
    return exchange, exchange.receive(ResponseHeaders(status, end))


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


def test_a_repeated_end_of_stream_is_handled_once_and_answered_benignly():
    exchange, _ = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=True))
    assert exchange.receive(RequestBody(b"{}", end_of_stream=True)) == Ignore()
    first, second = exchange.verdict(SEND)
    assert body_reply(first).clear_route_cache
    assert not body_reply(first).HasField("body_mutation")
    assert body_reply(second) == type(body_reply(second))()
    third = exchange.receive(RequestBody(b"{}", end_of_stream=True))
    assert isinstance(third, Reply)
    assert body_reply(third.message) == type(body_reply(second))()


def test_a_body_message_without_bytes_is_a_body():
    _, commands = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"", end_of_stream=True))
    assert commands[-1] == Decide(HEAD, b"")


def test_a_body_that_trailers_follow_is_decided_at_once_though_it_names_no_end():
    exchange, commands = deciding(RequestHeaders(HEAD, end_of_stream=False), RequestBody(b"{}", end_of_stream=False))
    assert commands[-1] == Decide(HEAD, b"{}")
    assert [kind(message) for message in exchange.verdict(SEND)] == ["request_body"]
    assert kind(exchange.receive(RequestTrailers()).message) == "request_trailers"


def test_trailers_that_come_before_the_verdict_are_answered_after_it():
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
def test_what_may_not_come_first_is_a_protocol_error(event):
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
            exchange._rewrite, exchange._translator = (lambda _body: None), Shouting()
            try:
                command = exchange.receive(event)
            except ProtocolError:
                continue
            assert isinstance(command, Reply | Decide | TreatResponse | Ignore)


@pytest.mark.parametrize(("verdict", "status", "wanted"), [(SEND, 200, False), (SEND, 400, True), (TRANSLATED, 200, True)])
def test_a_treatment_is_wanted_of_errors_and_where_the_verdict_says_so(verdict, status, wanted):
    _, command = answered(verdict, status)
    assert isinstance(command, TreatResponse if wanted else Reply)


def test_a_response_that_only_passes_gets_the_same_headers_as_any_other():
    exchange, _ = answered(TRANSLATED)
    reply = given(exchange.treatment(PASS))
    assert names(reply.response_headers) == {"x-a": "b"}
    assert not reply.HasField("mode_override")
    exchange, _ = answered(TRANSLATED)
    assert names(given(exchange.treatment(PassThrough((("x-c", "d"),)))).response_headers) == {"x-a": "b", "x-c": "d"}


def test_a_body_in_pieces_is_translated_one_by_one_and_loses_its_length():
    exchange, _ = answered(TRANSLATED)
    reply = given(exchange.treatment(StreamTranslation(Shouting(), (("content-type", "text/event-stream"),))))
    assert names(reply.response_headers) == {"x-a": "b", "content-type": "text/event-stream"}
    assert list(reply.response_headers.response.header_mutation.remove_headers) == ["content-length"]
    assert reply.mode_override.response_body_mode == reply.mode_override.STREAMED
    assert reply.mode_override.response_trailer_mode == reply.mode_override.SEND
    first = given(exchange.receive(ResponseBody(b"one", end_of_stream=False)).message).response_body.response
    assert first.body_mutation.body == b"ONE"
    nothing = given(exchange.receive(ResponseBody(b"", end_of_stream=False)).message).response_body.response
    assert nothing.body_mutation.clear_body
    last = given(exchange.receive(ResponseBody(b"two", end_of_stream=True)).message).response_body.response
    assert last.body_mutation.body == b"TWO!"


def test_pieces_that_trailers_follow_end_with_them():
    exchange, _ = answered(TRANSLATED)
    exchange.treatment(StreamTranslation(Shouting()))
    exchange.receive(ResponseBody(b"one", end_of_stream=False))
    assert kind(exchange.receive(ResponseTrailers()).message) == "response_trailers"


def test_a_whole_body_is_waited_for_and_replaced_with_its_status():
    exchange, _ = answered(SEND, 500)
    held = given(exchange.treatment(BufferedTranslation(lambda body: Replacement(400, (("content-type", "x/y"),), body[::-1]))))
    assert names(held.response_headers) == {"x-a": "b"}
    assert held.mode_override.response_body_mode == held.mode_override.BUFFERED
    reply = given(exchange.receive(ResponseBody(b"abc", end_of_stream=True)).message).response_body
    assert names(reply) == {":status": "400", "content-type": "x/y", "content-length": "3"}
    assert reply.response.body_mutation.body == b"cba"


def test_a_whole_body_may_stay_as_it_is():
    exchange, _ = answered(SEND, 500)
    exchange.treatment(BufferedTranslation(lambda _body: None))
    assert given(exchange.receive(ResponseBody(b"abc", end_of_stream=True)).message).response_body == type(held_body())()


def held_body():
    return ProcessingResponse().response_body


@pytest.mark.parametrize("replaced", [True, False])
def test_an_error_without_a_body_can_be_given_one_at_its_head(replaced):
    exchange, _ = answered(SEND, 500, end=True)
    reply = given(
        exchange.treatment(BufferedTranslation(lambda body: Replacement(502, (), b"was:" + body) if replaced else None))
    ).response_headers
    assert names(reply)["x-a"] == "b"
    assert reply.response.body_mutation.body == (b"was:" if replaced else b"")
    assert reply.response.status == (reply.response.CONTINUE_AND_REPLACE if replaced else reply.response.CONTINUE)
    assert (names(reply).get(":status") == "502") is replaced


def test_an_answer_can_be_replaced_at_its_head_without_waiting_for_its_body():
    exchange, _ = answered(SEND, 500)
    reply = given(exchange.treatment(Replacement(502, (("content-type", "x/y"),), b"replaced"))).immediate_response
    assert {each.header.key: each.header.raw_value for each in reply.headers.set_headers} == {"x-a": b"b", "content-type": b"x/y"}
    assert (reply.status.code, reply.body) == (502, b"replaced")
    assert exchange.state is State.ANSWERED


def test_a_treatment_that_cant_be_written_leaves_room_for_another():
    exchange, _ = answered(TRANSLATED)
    with pytest.raises(ValueError, match="control character"):
        exchange.treatment(StreamTranslation(Shouting(), (("x", "\n"),)))
    assert kind(exchange.treatment(PASS)) == "response_headers"
    with pytest.raises(ProtocolError, match="no treatment is wanted"):
        exchange.treatment(PASS)

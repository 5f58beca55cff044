"""The Lua filter at the end of streams: errors and truncation in each client's dialect, and usage that is odd or stands in odd places."""

import json
from typing import Any

import pytest

from tests.support import sse
from tests.support.lua_filter import JSON, TRUNCATED, UsageFilter

DONE = b"data: [DONE]\n\n"
CUT_OFF = "The node ended the stream before the answer was complete."
START = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}
CREATED = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "status": "in_progress", "error": None}}
TEXT_DELTA = {"type": "response.output_text.delta", "sequence_number": 4, "delta": "Hi"}


@pytest.fixture(scope="module")
def usage() -> UsageFilter:
    return UsageFilter()


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def named(chunk: dict[str, Any]) -> bytes:
    return b"event: " + chunk["type"].encode() + b"\n" + event(chunk)


def delta(index: int = 0, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": index, "delta": {} if finish else {"content": "x"}, "finish_reason": finish}]})


def added(out: bytes, body: bytes) -> list[tuple[str, Any]]:
    """The events behind the node's own, with their names."""
    assert out.startswith(body)
    return events(out[len(body) :])


def events(stream: bytes) -> list[tuple[str, Any]]:
    found = []
    for part in stream.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = part.rpartition(b"\n")
        found.append((name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))))
    return found


def test_a_truncated_messages_stream_ends_with_an_error_event_of_anthropic(usage: UsageFilter) -> None:
    body = named(START) + named(TEXT) * 7
    played = usage.play([body], dialect="messages")
    assert added(played.out, body) == [("error", {"type": "error", "error": {"type": "api_error", "message": CUT_OFF}})]
    assert "done" not in played.facts
    assert usage.first_bad_split(body, dialect="messages") == 0


def test_a_truncated_responses_stream_ends_with_its_own_error_event_and_a_failed_response(usage: UsageFilter) -> None:
    body = named(CREATED) + named(TEXT_DELTA)
    played = usage.play([body], dialect="responses")
    (first, error), (second, failed) = added(played.out, body)
    assert (first, second) == ("error", "response.failed")
    assert {key: error[key] for key in ("type", "code", "message", "param", "sequence_number")} == {
        "type": "error",
        "code": "upstream_truncated",
        "message": CUT_OFF,
        "param": None,
        "sequence_number": 5,
    }
    assert error["error"]["message"] == CUT_OFF
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 6)
    assert (failed["response"]["id"], failed["response"]["status"]) == ("resp_1", "failed")
    assert failed["response"]["error"] == {"code": "upstream_truncated", "message": CUT_OFF}
    assert usage.first_bad_split(body, dialect="responses") == 0


def test_a_complete_stream_of_any_dialect_gets_no_end_of_ours(usage: UsageFilter) -> None:
    for dialect, end in (("messages", {"type": "message_stop"}), ("responses", {"type": "response.incomplete", "response": {}})):
        body = named(START) + named(end)
        assert usage.play([body], dialect=dialect).out == body


ERRORS: list[Any] = [
    {"error": {"message": "engine died", "type": "server_error", "code": 500}},
    {"error": "engine died"},
    {"object": "error", "message": "engine died", "type": "ServerError", "code": 500},
    {"type": "error", "code": "server_error", "message": "engine died", "param": None},
    {"type": "error", "error": {"type": "api_error", "message": "engine died"}},
    {"error": "engine died", "error_type": "generation"},
    {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error", "message": "engine died"}}},
]


@pytest.mark.parametrize("named_event", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_stream_reaches_every_dialect_in_a_shape_that_its_clients_read(
    usage: UsageFilter, error: dict[str, Any], *, named_event: bool
) -> None:
    wire = (b"event: error\n" if named_event else b"") + event(error)
    for dialect, before in (("", delta()), ("messages", named(TEXT)), ("responses", named(TEXT_DELTA))):
        played = usage.play([before + wire], dialect=dialect)
        added_events = added(played.out, before)
        assert played.facts["error"]
        name, sent = added_events[0]
        if dialect == "messages":
            assert (name, sent["type"], sent["error"]["message"]) == ("error", "error", "engine died")
        elif dialect == "responses":
            assert sent["type"] in {"error", "response.failed"}
            assert (sent.get("response") or sent).get("error", sent)
            assert "engine died" in json.dumps(sent)
        else:
            assert sent["error"]["message"] == "engine died"
        assert usage.first_bad_split(before + wire, dialect=dialect) == 0


@pytest.mark.parametrize(
    ("dialect", "wire"),
    [
        ("", event(ERRORS[0])),
        ("messages", b"event: error\n" + event({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})),
        ("responses", event({"type": "error", "code": "context_length_exceeded", "message": "m", "param": None})),
        ("responses", event({"type": "response.failed", "response": {"error": None, "usage": None}})),
    ],
)
def test_an_error_in_its_clients_own_shape_passes_byte_for_byte_and_nothing_follows_it(
    usage: UsageFilter, dialect: str, wire: bytes
) -> None:
    played = usage.play([wire], dialect=dialect)
    assert played.out == wire
    assert played.facts["error"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "m", "type": "BadRequestError", "code": 400}, "invalid_request_error"),
        ({"message": "m", "type": "overloaded_error", "code": 529}, "overloaded_error"),
        ({"message": "m", "type": "server_error", "code": 500}, "api_error"),
    ],
)
def test_the_type_of_an_error_in_a_messages_stream_is_one_of_anthropic_s(usage: UsageFilter, error: Any, kind: str) -> None:
    [(_, sent)] = events(usage.play([event({"error": error})], dialect="messages").out)
    assert sent["error"] == {"type": kind, "message": "m"}


def test_a_flat_error_tells_its_code_and_a_failure_without_an_error_its_name(usage: UsageFilter) -> None:
    flat = {"type": "error", "code": "context_length_exceeded", "message": "m", "metadata": {"code": "x"}}
    assert usage.play([event(flat)], dialect="responses").facts["error"] == "context_length_exceeded"
    failed = {"type": "response.failed", "response": {"error": None, "metadata": {"code": "x"}}}
    assert usage.play([event(failed)], dialect="responses").facts["error"] == "response.failed"


def test_an_empty_finish_reason_is_no_end(usage: UsageFilter) -> None:
    body = event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": ""}]}) * 10
    played = usage.play([body])
    assert played.out == body + TRUNCATED
    assert (played.facts["deltas"], "finish_reason" in played.facts) == (10, False)


def test_a_stream_of_several_choices_is_complete_when_all_of_them_have_finished(usage: UsageFilter) -> None:
    cut = delta(0) + delta(1) + delta(0, "stop") + delta(1)
    played = usage.play([cut])
    assert played.out == cut + TRUNCATED
    assert (played.facts["finish_reason"], played.facts["open_choices"]) == ("stop", 1)
    played = usage.play([cut + delta(1, "length")])
    assert played.out == cut + delta(1, "length")
    assert (played.facts["finish_reason"], played.facts["open_choices"]) == ("length", 0)
    assert usage.first_bad_split(cut) == 0
    assert usage.play([cut + DONE]).out == cut + DONE


def test_a_choice_that_never_began_is_missed_when_the_stream_has_no_end_mark(usage: UsageFilter) -> None:
    body = delta(0) + delta(0, "stop")
    assert usage.play([body], choices=2).out == body + TRUNCATED
    assert usage.play([body + DONE], choices=2).out == body + DONE
    assert usage.play([body]).out == body


ENGINE_USAGE = {"prompt_tokens": 30, "completion_tokens": 6, "total_tokens": 36}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (event({"error": {"message": "m", "code": 500}, "usage": ENGINE_USAGE}), (30, 6)),
        (
            event({"type": "response.failed", "response": {"error": {"code": "x"}, "usage": {"input_tokens": 30, "output_tokens": 6}}}),
            (30, 6),
        ),
        (event({"type": "response.incomplete", "response": {"usage": {"input_tokens": 30, "output_tokens": 6}}}), (30, 6)),
        (event({"choices": [], "usage": {"completion_tokens": 6, "total_tokens": 36}}) + DONE, (30, 6)),
        (event({"choices": [], "usage": {"prompt_tokens": 30.0, "completion_tokens": 0.6e1}}) + DONE, (30, 6)),
    ],
)
def test_usage_is_read_beside_an_error_and_wherever_else_it_stands(usage: UsageFilter, body: bytes, expected: tuple[int, int]) -> None:
    facts = usage.play([body]).facts
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == expected
    assert "bad_usage" not in facts


@pytest.mark.parametrize("number", ["-3", "1.5", "1e300", '"12"', "[3]", "1000000000000", "0x10", "inf"])
def test_a_number_that_counts_no_tokens_spoils_the_usage(usage: UsageFilter, number: str) -> None:
    sent = f'{{"choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{number}}}}}'.encode()
    facts = usage.play([delta() * 3 + b"data: " + sent + b"\n\n" + DONE]).facts
    assert facts["bad_usage"] is True
    assert "completion_tokens" not in facts
    assert usage.play([sent], headers=JSON).facts["bad_usage"] is True


def test_a_usage_that_takes_back_what_was_reported_before_is_not_believed(usage: UsageFilter) -> None:
    first, second = ({"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": tokens}} for tokens in (500, 1))
    assert usage.play([delta() + event(first) + event(second) + DONE]).facts["bad_usage"] is True
    zeros = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}
    facts = usage.play([delta() + event(first) + event(zeros) + DONE]).facts
    assert (facts["prompt_tokens"], facts["completion_tokens"], "bad_usage" in facts) == (1000, 500, False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"results": [], "usage": {"total_tokens": 60}}, {"total_tokens": 60}),
        ({"results": [], "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": 60}}}, {"prompt_tokens": 60}),
        ({"results": [], "meta": {"billed_units": {"input_tokens": 60}}}, {"prompt_tokens": 60}),
        ({"results": [], "meta": {"billed_units": {"search_units": 1}}}, {}),
        ({"usage": {"prompt_tokens": 60}, "meta": {"tokens": {"input_tokens": 9}}}, {"prompt_tokens": 60, "completion_tokens": 0}),
    ],
)
def test_what_rerankers_tell_is_read(usage: UsageFilter, answer: Any, expected: dict[str, int]) -> None:
    body = json.dumps(answer).encode()
    played = usage.play([body], headers=JSON)
    assert (played.out, played.facts) == (body, {**expected, "done": True})
    assert usage.first_bad_split(body, headers=JSON) == 0


def test_many_choices_do_not_make_the_filter_hoard(usage: UsageFilter) -> None:
    body = b"".join(delta(index) for index in range(6000))
    played = usage.play([body])
    assert played.out == body + TRUNCATED
    assert len(sse.datas(played.out)) == 6001


CONTEXT = "This model's maximum context length is 40960 tokens. However, you requested 50000 tokens."
WRAPPED = {
    "error": {"code": "error", "message": "generic failure", "value": {"error_message": json.dumps({"error": {"message": CONTEXT}})}}
}


@pytest.mark.parametrize(
    ("dialect", "spoken"),
    [
        ("", {"error": {"object": "error", "message": "The input (9 tokens) is longer than the model's context length (8).", "code": 400}}),
        ("", {"error": {"message": "n must be 1", "type": "BadRequestError", "code": 400}}),
        ("", {"error": {"message": CONTEXT, "code": 500}}),
        ("", WRAPPED),
        ("responses", {"type": "error", "code": "context_length_exceeded", "message": CONTEXT}),
        ("responses", {"type": "response.failed", "response": {"error": {"code": "context_length_exceeded", "message": CONTEXT}}}),
        ("responses", {"type": "response.failed", "response": {"error": None, "code": "invalid_prompt"}}),
        ("messages", {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}}),
    ],
)
def test_an_error_in_a_stream_that_every_node_would_give_is_the_requests_fault(usage: UsageFilter, dialect: str, spoken: dict) -> None:
    played = usage.play([f"data: {json.dumps(spoken)}\n\n".encode()], dialect=dialect)
    assert played.facts["fault"] == "request"
    assert b"upstream_truncated" not in played.out


@pytest.mark.parametrize(
    "spoken",
    [
        {"error": {"message": "CUDA error", "code": 500}},
        {"error": {"message": "The model `m` does not exist", "type": "NotFoundError", "code": 404}},
        {"error": {"message": "Unauthorized", "code": 401}},
        {"error": "engine died"},
    ],
)
def test_any_other_error_in_a_stream_is_the_nodes_fault(usage: UsageFilter, spoken: dict) -> None:
    assert "fault" not in usage.play([f"data: {json.dumps(spoken)}\n\n".encode()]).facts


def test_a_wrapped_context_error_is_reported_by_its_real_code_and_sentence(usage: UsageFilter) -> None:
    played = usage.play([f"data: {json.dumps(WRAPPED)}\n\n".encode()])
    error = json.loads(played.out.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"], error["message"]) == ("context_length_exceeded", "invalid_request_error", CONTEXT)
    assert played.facts["error"] == "context_length_exceeded"


def test_an_error_in_a_stream_shows_no_address_and_no_file(usage: UsageFilter) -> None:
    message = "failed at http://10.1.2.3:8000/x, 10.0.0.7:22, [fd00::1]:80, gpu-1.internal:8000 in /root/secret/key.pem; see /v1/models"
    played = usage.play([f"data: {json.dumps({'error': {'message': message, 'code': 500}})}\n\n".encode()])
    sent = json.loads(played.out.removeprefix(b"data: "))["error"]["message"]
    assert sent == "failed at (address), (address), (address), (address) in (path); see /v1/models"


def test_a_web_page_on_anthropic_s_path_is_reported_in_anthropic_s_shape(usage: UsageFilter) -> None:
    headers = {":status": "200", "content-type": "text/html", "x-din-trace-id": "t-1"}
    played = usage.play([b"<html>", b"</html>"], headers=headers, dialect="messages")
    assert json.loads(played.out) == {
        "type": "error",
        "error": {"type": "api_error", "message": "The node answered with a web page."},
        "request_id": "t-1",
    }

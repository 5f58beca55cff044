"""The Lua filter against recorded streams, the SSE grammar and the faults that gateways have met in the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.price import Price, format_money
from din_extproc.domain.usage import Usage
from tests.support import sse
from tests.support.lua_filter import JSON, SSE, TRUNCATED, Played, UsageFilter, capture

CAPTURES = Path(__file__).parents[2] / "captures"
ALL = sorted(CAPTURES.rglob("*.txt"))
STREAMS = [path for path in ALL if "event-stream" in capture(path)[0].get("content-type", "")]
BODIES = [path for path in ALL if capture(path)[0].get("content-type", "").startswith("application/json")]
USAGE = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}}'
DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def usage() -> UsageFilter:
    return UsageFilter()


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def counted(played: Played) -> dict[str, Any]:
    """The facts that the oracle knows too."""
    assert played.log == ""
    return {key: value for key, value in played.facts.items() if key not in {"first_token_us", "last_token_us", "delta_bytes"}}


@pytest.mark.parametrize("path", STREAMS, ids=name)
def test_a_recorded_stream_is_counted_as_a_json_parser_counts_it_and_passes_unchanged(usage: UsageFilter, path: Path) -> None:
    headers, body = capture(path)
    played = usage.play([body], headers=headers)
    assert played.out == body
    assert counted(played) == sse.facts(body)


@pytest.mark.parametrize("path", STREAMS, ids=name)
def test_a_recorded_stream_cut_anywhere_gives_the_same_bytes_and_facts(usage: UsageFilter, path: Path) -> None:
    headers, body = capture(path)
    assert usage.first_bad_split(body, headers=headers, strip=True) == 0


@pytest.mark.parametrize("path", STREAMS, ids=name)
def test_only_the_usage_event_is_taken_out_of_a_recorded_stream(usage: UsageFilter, path: Path) -> None:
    headers, body = capture(path)
    expected = b"".join(each + b"\n\n" for each in body.split(b"\n\n")[:-1] if not (b'"choices":[]' in each and b'"usage":{' in each))
    played = usage.play([body], headers=headers, strip=True)
    assert played.out == expected
    assert counted(played) == sse.facts(body)


@pytest.mark.parametrize("path", BODIES, ids=name)
def test_a_recorded_json_answer_gives_its_usage_wherever_it_is_cut(usage: UsageFilter, path: Path) -> None:
    headers, body = capture(path)
    played = usage.play([body], headers=headers)
    reported = json.loads(body).get("usage") if body.startswith(b"{") else None
    assert played.out == body
    if reported is None:
        assert "prompt_tokens" not in played.facts
    else:
        cached = reported.get("cache_read_input_tokens", 0)
        assert played.facts["prompt_tokens"] == reported.get("prompt_tokens", reported.get("input_tokens", 0) + cached)
        assert played.facts["completion_tokens"] == reported.get("completion_tokens", reported.get("output_tokens", 0))
    assert played.facts["done"] is True
    assert usage.first_bad_split(body, headers=headers) == 0


@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"m","type":"T x","code":500}}', b'{"error":"Unauthorized"}', b'{"object":"error","type":"T x"}']
)
def test_an_error_body_tells_its_type_and_never_its_text(usage: UsageFilter, body: bytes) -> None:
    assert usage.play([body], headers=JSON).facts["error"] in {"T_x", "error"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"urn:din-extproc:error:upstream_busy","title":"T","error":{"message":"m","type":"server_error","code":"upstream_busy"}}',
        b'{"code":"upstream_busy","error":{"code":"upstream_busy","type":"server_error"},"type":"urn:din-extproc:error:upstream_busy"}',
    ],
)
def test_an_error_body_of_ours_tells_its_code(usage: UsageFilter, body: bytes) -> None:
    assert usage.play([body], headers={**JSON, ":status": "503"}).facts["error"] == "upstream_busy"


FORGED: list[dict[str, Any]] = [
    {"metadata": {"error": "x"}},
    {"metadata": {"finish_reason": "abort", "type": "response.completed", "object": "error"}},
    {"metadata": {"usage": {"input_tokens": 1, "output_tokens": 1}}},
    {"metadata": {"type": "urn:din-extproc:error:upstream_busy"}},
    {"metadata": {"response": {"usage": {"input_tokens": 1, "output_tokens": 1}, "error": {"code": "x"}}}},
    {"metadata": {"choices": [{"finish_reason": "abort", "delta": {"content": "token", "tool_calls": [{}]}}]}},
    {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"error": {"type": "string"}}}}]},
    {"tools": [{"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "delta": "token", "message": {"usage": {"output_tokens": 1}}}]},
    {
        "text": {"format": {"schema": {"error": {"code": "x"}, "usage": {"output_tokens": 1}}}},
        "instructions": '"usage":{"output_tokens":1}',
    },
]
"""What a client can make a node echo."""


@pytest.mark.parametrize("echoed", FORGED)
def test_what_a_client_wrote_and_a_node_echoes_in_its_events_means_nothing(usage: UsageFilter, echoed: dict[str, Any]) -> None:
    begun = {"object": "response", "status": "in_progress", "error": None, "usage": None, **echoed}
    reported = {"input_tokens": 1000, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}}
    output_items = {"output": [{"type": "message", "content": [{"type": "output_text", "text": "ab"}]}]}
    ended = {**begun, "status": "completed", **output_items, "usage": reported, **echoed}
    chunks: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.output_text.done", "text": "ab"},
        {"type": "response.output_item.done", "item": output_items["output"][0]},
    ]
    body = b"".join(map(event, chunks))
    assert counted(usage.play([body], ending="cut")) == {"deltas": 2}
    body += event({"type": "response.completed", "response": ended})
    played = usage.play([body])
    assert (played.out, counted(played)) == (body, {"deltas": 2, "prompt_tokens": 1000, "completion_tokens": 2, "done": True})
    assert usage.first_bad_split(body) == 0


@pytest.mark.parametrize("echoed", FORGED)
def test_what_a_client_wrote_and_a_node_echoes_in_a_json_body_means_nothing(usage: UsageFilter, echoed: dict[str, Any]) -> None:
    reported = {"input_tokens": 1000, "output_tokens": 900}
    for answer in (
        {**echoed, "usage": reported},
        {"usage": reported, **echoed},
        {"x": '\\"[{', "usage": reported, "y": [[{"z": "}"}]], **echoed},
    ):
        body = json.dumps(answer, indent=len(answer) % 2).encode()
        assert counted(usage.play([body], headers=JSON)) == {"prompt_tokens": 1000, "completion_tokens": 900, "done": True}
    assert usage.first_bad_split(body, headers=JSON) == 0
    assert counted(usage.play([json.dumps(echoed).encode()], headers=JSON)) == {"done": True}


def test_a_response_that_failed_is_an_error_of_the_node(usage: UsageFilter) -> None:
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error", "message": "m"}}}
    assert counted(usage.play([event(failed)])) == {"deltas": 0, "error": "server_error"}


def test_a_json_body_that_is_all_structure_is_not_followed_for_ever(usage: UsageFilter) -> None:
    body = b'{"x":' + b"[" * 600_000 + b"]" * 600_000 + b',"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    played = usage.play([body[at : at + 65_536] for at in range(0, len(body), 65_536)], headers=JSON)
    assert (played.out, counted(played)) == (body, {"done": True})


@pytest.mark.parametrize("ending", ["data", "empty", "trailers"])
def test_a_web_page_that_calls_itself_a_good_answer_is_reported_as_an_error(usage: UsageFilter, ending: str) -> None:
    headers = {":status": "200", "content-type": "text/html; charset=utf-8", "x-din-trace-id": "t-1", "content-length": "9"}
    played = usage.play([b"<html>", b"10.1.2.3", b"</html>"], headers=headers, ending=ending)
    body = json.loads(played.out)
    assert (body["status"], body["code"], body["trace_id"]) == (502, "upstream_error", "t-1")
    assert played.facts == {"error": "upstream_error"}


def test_a_page_that_says_that_it_is_an_error_passes_here(usage: UsageFilter) -> None:
    assert usage.play([b"<html>"], headers={":status": "404", "content-type": "text/html"}).out == b"<html>"


def test_usage_in_front_of_a_large_json_body_is_found_and_nothing_is_held_back(usage: UsageFilter) -> None:
    rows = ",".join(f"0.{number}" for number in range(100_000))
    body = b'{"usage":{"prompt_tokens":9,"total_tokens":9},"data":[' + rows.encode() + b"]}"
    chunks = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    played = usage.play(chunks, headers=JSON, ending="cut")
    assert played.out == body
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"]) == (9, 0)


def test_a_usage_key_without_an_end_does_not_make_the_filter_hoard(usage: UsageFilter) -> None:
    chunks = [b'{"usage":{"x":"', *[b"y" * 16_384] * 20, b'"},"usage":{"prompt_tokens":1,"completion_tokens":2}}']
    played = usage.play(chunks, headers=JSON)
    assert played.out == b"".join(chunks)
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"]) == (1, 2)


def test_usage_is_found_at_every_split_and_the_bytes_stay(usage: UsageFilter) -> None:
    body = b"data: " + USAGE + b"\n\n" + DONE
    played = usage.play([body])
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"]) == (5, 7)
    assert played.out == body
    assert usage.first_bad_split(body) == 0
    assert usage.play([body], strip=True).out == DONE
    assert usage.first_bad_split(body, strip=True) == 0


@pytest.mark.parametrize(
    "body",
    [
        b'data:{"id":"1","choices":[{"delta":{"content":"a"}}]}\r\n\r\ndata:' + USAGE + b"\r\n\r\ndata:[DONE]\r\n\r\n",
        b'data: {"choices":[{"delta":{"content":"a"}}]}\r\rdata: ' + USAGE + b"\r\rdata: [DONE]\r\r",
        b'event: x\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\nevent: x\r\ndata: ' + USAGE + b"\r\n\r\ndata: [DONE]\r\n\r\n",
        (
            b'data: {\ndata: "choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[],\ndata: "usage":{"prompt_tokens":5,\n'
            b'data: "completion_tokens":7}}\n\ndata: [DONE]\n\n'
        ),
        (
            b'data: {"choices"\r\ndata: :[{"delta":{"content"\r\ndata: :\r\ndata: "a"}}]}\r\n\r\ndata: {"choices":[],"usage":\r\n'
            b'data: {"prompt_tokens":5,"completion_tokens":\r\ndata: 7}}\r\n\r\ndata: [DONE]\r\n\r\n'
        ),
        b'\xef\xbb\xbfdata: {"choices":[{"delta":{"content":"a"}}]}\n\n\n\ndata: ' + USAGE + b"\n\r\ndata: [DONE]\r\n\n",
        b'id: 1\ndata: {"choices":[{"delta":{"content":"a"}}]}\nretry: 5\n\n: c\ndata: ' + USAGE + b"\n\ndata: [DONE]\r\r\n",
    ],
)
def test_every_line_end_of_the_grammar_is_read(usage: UsageFilter, body: bytes) -> None:
    expected = {"deltas": 1, "prompt_tokens": 5, "completion_tokens": 7, "done": True}
    assert sse.facts(body) == expected
    played = usage.play([body])
    assert played.out == body
    assert counted(played) == expected
    assert usage.first_bad_split(body) == 0
    stripped = usage.play([body], strip=True).out
    assert (len(sse.datas(stripped)), sse.facts(stripped)) == (2, {"deltas": 1, "done": True})
    assert usage.first_bad_split(body, strip=True) == 0


def test_a_boundary_inside_a_character_and_a_broken_byte_change_nothing(usage: UsageFilter) -> None:
    template = delta(content="你好😀") + delta(content="再见") + delta(content="😀")
    body = (
        delta(role="assistant", content="")
        + template
        + delta(content="BROKEN").replace(b"BROKEN", b"\xffx")
        + template
        + event(json.loads(USAGE))
        + DONE
    )
    played = usage.play([body])
    assert played.out == body
    assert counted(played) == sse.facts(body) == {"deltas": 6, "bad_events": 1, "prompt_tokens": 5, "completion_tokens": 7, "done": True}
    assert usage.first_bad_split(body) == 0


def test_keepalives_and_empty_events_pass_and_do_not_count(usage: UsageFilter) -> None:
    idle = [b": ping\n\n", b"retry: 3000\n\n", b"id: 7\n\n", b"data:\n\n", b"event: ping\ndata: \n\n", b"data\n\n"]
    tokens = [delta(content=f"t{number}") for number in range(len(idle))]
    body = b"".join(part for pair in zip(idle, tokens, strict=True) for part in pair) + b": bye\n\n" + DONE
    played = usage.play([*idle, body], clock=[*range(1, 8)])
    assert played.out == b"".join(idle) + body
    assert played.facts == {"deltas": 6, "delta_bytes": 12, "first_token_us": 7, "last_token_us": 7, "done": True}
    assert usage.first_bad_split(body) == 0


@pytest.mark.parametrize("before", [0, 20])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "engine died", "type": "server_error", "code": 500}, "server_error"),
        ({"code": "overloaded", "message": 'no "type": "x" here', "type": "t"}, "overloaded"),
        ("plain string", "error"),
    ],
)
def test_an_error_in_the_stream_is_reported_and_no_token(usage: UsageFilter, before: int, error: Any, code: str) -> None:
    body = b"".join(delta(content=f"t{number}") for number in range(before)) + event({"error": error}) + DONE
    played = usage.play([body])
    assert played.facts["error"] == code
    assert played.facts["deltas"] == before
    assert ("first_token_us" in played.facts) == bool(before)
    assert "finish_reason" not in played.facts
    assert usage.first_bad_split(body) == 0
    error_events = [json.loads(data) for data in sse.datas(played.out)[before:-1]]
    if isinstance(error, str):
        assert error_events == [{"error": {"message": error, "type": "server_error", "param": None, "code": "upstream_error"}}]
    else:
        assert played.out == body


def test_control_a_null_error_beside_choices_is_no_error(usage: UsageFilter) -> None:
    body = (
        event({"error": None, "choices": [{"delta": {"content": '"error":{"message":"quoted"}'}}]})
        + event({"error": "", "choices": []})
        + DONE
    )
    assert counted(usage.play([body])) == {"deltas": 1, "done": True}


def test_running_totals_are_not_added_up(usage: UsageFilter) -> None:
    def total(completion: int) -> dict[str, Any]:
        return {"prompt_tokens": 10, "completion_tokens": completion, "total_tokens": 10 + completion}

    running = [event({"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": total(count)}) for count in (1, 2, 3)]
    body = b"".join(running) + event({"choices": [], "usage": total(3)}) + DONE
    played = usage.play([body])
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"], played.facts["deltas"]) == (10, 3, 3)
    choices = b"".join(event({"choices": [{"index": index, "delta": {"content": "x"}}], "usage": total(9)}) for index in (0, 1))
    final = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    played = usage.play([choices + event({"choices": [], "usage": final}) + event({"choices": [], "usage": None}) + DONE])
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"], played.facts["deltas"]) == (10, 6, 2)


def test_what_was_counted_is_there_when_the_client_leaves(usage: UsageFilter) -> None:
    chunks = [delta(role="assistant", content=""), *[delta(content=f"t{number}") for number in range(5)]]
    played = usage.play(chunks, ending="cut")
    assert played.facts == {"deltas": 5, "delta_bytes": 10, "first_token_us": 1}
    chunks += [delta(content=f"t{number}") for number in range(1995)]
    played = usage.play(chunks, ending="cut")
    assert played.facts["deltas"] == 2000, "to the last one"


@pytest.mark.parametrize(
    "chunks",
    [
        [{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}],
        [{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}],
        [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}],
        [
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ],
        [{"choices": [], "usage": {"prompt_tokens": 5, "total_tokens": 12}}],
    ],
)
def test_usage_is_taken_wherever_it_stands(usage: UsageFilter, chunks: list[Any]) -> None:
    odd: list[Any] = [{"choices": None, "usage": None}, {"choices": [{"index": 0}]}, {"choices": [{"delta": None}]}, 1, None, "x", []]
    body = b"".join(event(chunk) for chunk in [*odd, *chunks, *odd]) + DONE
    played = usage.play([body])
    assert played.out == body
    assert (played.facts["prompt_tokens"], played.facts["completion_tokens"]) == (5, 7)
    assert (played.facts["deltas"], "bad_events" in played.facts) == (0, False)
    assert usage.first_bad_split(body) == 0


def test_only_an_event_with_empty_choices_is_taken_out(usage: UsageFilter) -> None:
    kept = [
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"choices": [], "usage": None},
        {"choices": [], "prompt_filter_results": [1]},
    ]
    body = b"".join(event(chunk) for chunk in kept)
    assert usage.play([body + event(json.loads(USAGE)) + DONE], strip=True).out == body + DONE


def test_cached_tokens_are_distinguished(usage: UsageFilter) -> None:
    reported = {"prompt_tokens": 3604, "prompt_tokens_details": {"cached_tokens": 3604}, "completion_tokens": 878, "total_tokens": 4482}
    facts = usage.play([event({"choices": [], "usage": reported}) + DONE]).facts
    assert (facts["prompt_tokens"], facts["completion_tokens"], facts["cached_tokens"]) == (3604, 878, 3604)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("empty", ["", None])
def test_the_first_token_may_come_in_any_channel(usage: UsageFilter, field: str, empty: str | None) -> None:
    chunks = [delta(role="assistant", content=empty), b": keepalive\n\n", *[delta(**{field: "a"})] * 20, delta(content="b")]
    clock = [0, 500_000, *range(1_000_000, 1_000_020), 6_000_000]
    facts = usage.play(chunks, clock=clock).facts
    assert (facts["first_token_us"], facts["deltas"]) == (1_000_000, 21)
    assert "last_token_us" not in facts, "it has not come to its end"


@pytest.mark.parametrize("ending", ["data", "cut"])
def test_the_last_token_is_the_last_one_whatever_comes_after_it_and_in_whatever_channel(usage: UsageFilter, ending: str) -> None:
    finish = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    call = {"index": 0, "id": "c", "function": {"name": "look_up", "arguments": ""}}
    chunks = [delta(role="assistant", content=""), delta(reasoning_content="a") * 3, delta(tool_calls=[call]), finish, b": wait\n\n"]
    clock = [1, 2_000, 3_000, 4_000, 5_000, 6_000, 7_000]
    facts = usage.play([*chunks, event(json.loads(USAGE)), DONE], clock=clock, ending=ending).facts
    assert (facts["first_token_us"], facts["last_token_us"], facts["deltas"]) == (2_000, 3_000, 4)


def test_a_tool_call_and_a_text_completion_are_tokens_too(usage: UsageFilter) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": ""}}
    arguments = {"index": 0, "function": {"arguments": '{"city": "Rome \\" }"'}}
    body = (
        delta(tool_calls=[call])
        + delta(tool_calls=[arguments]) * 3
        + delta(tool_calls=[])
        + event({"choices": [{"text": "x"}]})
        + event({"choices": [{"text": ""}]})
    )
    played = usage.play([body])
    assert played.facts["deltas"] == 5
    assert usage.first_bad_split(body) == 0


def test_one_malformed_event_is_counted_once_and_the_rest_is_read(usage: UsageFilter) -> None:
    good = delta(content="x")
    broken = b'data: {"choices":[{"delta":{"content":"x"}\n\n'
    body = good * 9 + broken + good * 50 + event(json.loads(USAGE)) + DONE
    played = usage.play([body])
    assert played.out == body
    assert counted(played) == sse.facts(body) == {"deltas": 59, "bad_events": 1, "prompt_tokens": 5, "completion_tokens": 7, "done": True}


@pytest.mark.parametrize(
    "broken", [b'{"a', b'{"choices":[{"delta":{"content":"a\\"}}]}', b'{\\"a":"b\\"}', b'{"a":"b', b"{]}{", b'{"a":{"b":"}"}']
)
def test_what_only_looks_like_json_never_stops_the_counting(usage: UsageFilter, broken: bytes) -> None:
    body = b"data: " + broken + b"\n\n" + delta(content="x") + DONE
    played = usage.play([body])
    assert (played.out, played.log, played.facts["deltas"]) == (body, "", 1)


def test_tokens_that_look_like_json_are_text(usage: UsageFilter) -> None:
    tokens = [
        '"usage":{"prompt_tokens":999}',
        '{"error":{"code":"x"}}',
        "\\",
        '\\"',
        '"',
        "}",
        "{",
        '"finish_reason":"stop"',
        "data: [DONE]",
        "\n\n",
        "\u2028",
        "\x7f",
        "a" * 5000,
    ]
    body = b"".join(delta(content=token) for token in tokens * 2) + DONE
    played = usage.play([body], strip=True)
    assert played.out == body
    assert counted(played) == sse.facts(body) == {"deltas": 26, "done": True}
    assert usage.first_bad_split(body[:2500], strip=True) == 0


MESSAGES: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 7, "cache_read_input_tokens": 24, "output_tokens": 1}}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    {"type": "message_stop"},
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.output_text.delta", "delta": "Hi", "sequence_number": 4},
    {
        "response": {"error": None, "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 2}},
        "type": "response.completed",
    },
]
BUSY: list[dict[str, Any]] = [{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (MESSAGES, {"prompt_tokens": 31, "completion_tokens": 4, "cached_tokens": 24, "deltas": 1, "done": True}),
        (RESPONSES, {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 3, "deltas": 1, "done": True}),
        (BUSY, {"deltas": 0, "error": "overloaded_error", "fault": "busy"}),
    ],
    ids=["messages", "responses", "messages-error"],
)
def test_the_other_dialects_of_the_north_are_counted(usage: UsageFilter, chunks: list[Any], expected: dict[str, Any]) -> None:
    body = b"".join(b"event: " + chunk["type"].encode() + b"\n" + event(chunk) for chunk in chunks)
    played = usage.play([body])
    assert (played.out, counted(played)) == (body, expected)
    assert usage.first_bad_split(body) == 0


@pytest.mark.parametrize(
    ("headers", "metadata", "facts"),
    [
        (SSE, {}, {}),
        (SSE, {"request_id": "r", "refusal": "queue_full"}, {"refusal": "queue_full"}),
        ({"content-type": "text/plain"}, {"request_id": "r"}, {}),
        ({}, {"request_id": "r"}, {}),
        ({"content-type": "application/x-ndjson"}, {"request_id": "r"}, {}),
        ({**SSE, "content-encoding": "gzip"}, {"request_id": "r"}, {"encoded": True}),
        ({**SSE, "content-encoding": "identity"}, {"request_id": "r"}, {"deltas": 1, "delta_bytes": 1, "first_token_us": 1}),
    ],
)
def test_only_a_nodes_readable_answer_is_looked_at(
    usage: UsageFilter, headers: dict[str, str], metadata: dict[str, Any], facts: dict[str, Any]
) -> None:
    body = delta(content="x")
    played = usage.play([body], headers=headers, metadata=metadata, ending="cut")
    assert (played.out, played.facts) == (body, facts)


@pytest.mark.parametrize("headers", [SSE, JSON])
def test_an_answer_without_a_body_leaves_no_count(usage: UsageFilter, headers: dict[str, str]) -> None:
    for ending in ("empty", "trailers", "cut"):
        played = usage.play([], headers=headers, ending=ending)
        error_events = TRUNCATED if headers is SSE and ending == "empty" else b""
        assert (played.out, played.log, played.facts.get("deltas", 0)) == (error_events, "", 0)


@pytest.mark.parametrize("ending", ["data", "empty"])
@pytest.mark.parametrize("rest", [[], [b'data: {"choices":[{"del', b'ta":{"con'], [b"data: x\n"]])
def test_a_stream_that_stops_half_way_does_not_look_complete(usage: UsageFilter, ending: str, rest: list[bytes]) -> None:
    played = usage.play([delta(content="x"), *rest], ending=ending)
    assert played.out == delta(content="x") + TRUNCATED
    assert counted(played) == {"deltas": 1}
    assert usage.first_bad_split(delta(content="x") + b"".join(rest)) == 0


@pytest.mark.parametrize("ending", ["trailers", "cut"])
def test_what_is_held_back_of_a_broken_stream_is_no_event(usage: UsageFilter, ending: str) -> None:
    played = usage.play([delta(content="x"), b'data: {"choices":[{"del'], ending=ending)
    assert (played.out, played.log, played.facts["deltas"]) == (delta(content="x"), "", 1)


@pytest.mark.parametrize("end", [event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), DONE, event({"error": {"type": "t"}})])
def test_a_complete_or_failed_stream_gets_no_second_end(usage: UsageFilter, end: bytes) -> None:
    for rest in (b"", b": bye\n"):
        assert usage.play([delta(content="x"), end, rest]).out == delta(content="x") + end + rest


def test_an_error_status_is_left_as_it_is(usage: UsageFilter) -> None:
    assert usage.play([delta(content="x")], headers={**SSE, ":status": "500"}).out == delta(content="x")


def test_an_end_mark_without_its_blank_line_still_counts(usage: UsageFilter) -> None:
    assert usage.play([delta(content="x"), b"data: [DONE]\n"]).facts["done"] is True


def test_an_event_over_a_mebibyte_passes_unread_and_the_next_one_is_read(usage: UsageFilter) -> None:
    chunks = [b'data: {"choices":[{"delta":{"content":"', *[b"y" * 65_536] * 20, b'"}}]}\n\n', delta(content="x"), DONE]
    played = usage.play(chunks, strip=True)
    assert played.out == b"".join(chunks)
    assert counted(played) == {"deltas": 1, "bad_events": 1, "unread": True, "done": True}


@pytest.mark.parametrize("ending", ["data", "empty"])
def test_an_end_that_may_have_been_in_an_event_over_a_mebibyte_is_not_missed(usage: UsageFilter, ending: str) -> None:
    chunks = [delta(content="x"), b'data: {"type":"response.completed","x":"', *[b"y" * 65_536] * 20, b'"}\n\n']
    for more, deltas in ((b"", 1), (b": bye\n\n", 1), (delta(content="y"), 2)):
        played = usage.play([*chunks, more], ending=ending)
        assert played.out == b"".join(chunks) + more
        assert counted(played) == {"deltas": deltas, "bad_events": 1, "unread": True}


def test_a_fault_in_the_filter_loses_the_count_and_no_byte() -> None:
    usage = UsageFilter()
    usage._lua.execute(b"EnvoyTimestampResolution = nil")
    chunks = [delta(role="assistant", content=""), delta(content="x")[:30], delta(content="x")[30:], delta(content="y"), DONE]
    played = usage.play(chunks, strip=True)
    assert played.out == b"".join(chunks)
    assert "stopped counting" in played.log


TRANSCRIPTS = {
    "usage": (b'{"text":"so","usage":{"type":"duration","seconds":9}}', {"audio_seconds": 9}),
    "part of a second": (b'{"text":"so","usage":{"type":"duration","seconds":8.2}}', {"audio_seconds": 9}),
    "verbose": (b'{"task":"transcribe","language":"english","duration":8.470000267028809,"text":"so","segments":[]}', {"audio_seconds": 9}),
    "a text": (b'{"duration":"8.47","language":"en","text":"so","segments":[{"duration":99}]}', {"audio_seconds": 9}),
    "tokens": (
        b'{"text":"so","usage":{"type":"tokens","input_tokens":14,"input_token_details":{"audio_tokens":14},"output_tokens":5,"total_tokens":19}}',
        {"prompt_tokens": 14, "completion_tokens": 5},
    ),
}


@pytest.mark.parametrize("reported", TRANSCRIPTS)
def test_the_length_of_audio_is_read_wherever_the_answer_is_cut(usage: UsageFilter, reported: str) -> None:
    body, facts = TRANSCRIPTS[reported]
    played = usage.play([body], headers=JSON)
    assert (played.out, counted(played)) == (body, {**facts, "done": True})
    assert usage.first_bad_split(body, headers=JSON) == 0


def test_a_stream_ends_with_the_events_of_its_operation(usage: UsageFilter) -> None:
    events = [
        {"type": "transcript.text.delta", "delta": "so "},
        {"type": "transcript.text.delta", "delta": "what"},
        {"type": "transcript.text.done", "text": "so what", "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 2}},
    ]
    body = b"".join(b"event: %b\n%b" % (each["type"].encode(), event(each)) for each in events)
    known = {"request_id": "r-1", "ends": "transcript.text.done other.done"}
    played = usage.play([body], metadata=known)
    assert played.out == body
    assert counted(played) == {"deltas": 2, "done": True, "prompt_tokens": 14, "completion_tokens": 2}
    assert usage.play([body], metadata={"request_id": "r-1"}).out == body + TRUNCATED, "nothing else says that it is complete"


PRICE = "150000 50000 600000 1000000000 2000 100"


def answered(
    usage: UsageFilter, reported: str, price: str = PRICE, *, text: str = "x" * 50, headers: dict[str, str] = JSON, **known: Any
) -> Played:
    body = f'{{"choices":[{{"message":{{"content":"{text}"}},"finish_reason":"stop"}}],"usage":{reported}}}'.encode()
    played = usage.play([body[:20], body[20:]], headers=dict(headers), metadata={"request_id": "r-1", "price": price, **known})
    assert (played.out, played.log) == (body, "")
    return played


@pytest.mark.parametrize(
    ("reported", "cost"),
    [
        ('{"prompt_tokens":1000,"completion_tokens":10}', 1000 * 150 + 10 * 600 + 10**6),
        (
            '{"prompt_tokens":1000,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":400}}',
            600 * 150 + 400 * 50 + 10 * 600 + 10**6,
        ),
        ('{"prompt_tokens":3,"completion_tokens":0,"total_tokens":3}', 450 + 10**6),
    ],
)
def test_a_whole_answer_says_what_the_accounts_charge_for_it(usage: UsageFilter, reported: str, cost: int) -> None:
    played = answered(usage, reported)
    assert played.cost == format_money(cost)
    assert played.facts["prompt_tokens"] == json.loads(reported)["prompt_tokens"]


@given(
    prices=st.tuples(*[st.integers(0, 10**7)] * 4), counts=st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
)
def test_the_cost_is_that_of_the_price_list_to_the_last_digit(usage: UsageFilter, prices: tuple[int, ...], counts: tuple[int, ...]) -> None:
    prompt, cached, completion = counts[0], min(counts[:2]), counts[2]
    price = Price(since=0, input=prices[0], cached_input=prices[1], output=prices[2], request=prices[3])
    reported = json.dumps({"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}})
    head = f"{' '.join(map(str, prices))} 10000000 10000000"
    assert answered(usage, reported, head, text="x" * completion).cost == format_money(price.cost(Usage(prompt, completion, cached), 0))


@pytest.mark.parametrize(
    ("reported", "changes"),
    [
        ("null", {}),
        ('{"prompt_tokens":2001,"completion_tokens":10}', {}),
        ('{"prompt_tokens":1000,"completion_tokens":101}', {"text": "x" * 200}),
        ('{"prompt_tokens":1000,"completion_tokens":10000}', {"price": PRICE.replace(" 100", " 100000")}),
        ('{"prompt_tokens":-1,"completion_tokens":10}', {}),
        ('{"completion_tokens":10}', {}),
        ('{"prompt_tokens":1000,"completion_tokens":10}', {"moved_to": "elsewhere"}),
        ('{"prompt_tokens":1000,"completion_tokens":10}', {"headers": JSON | {":status": "500"}}),
        ('{"prompt_tokens":1000,"completion_tokens":10}', {"price": "1 2 3"}),
    ],
)
def test_an_answer_whose_cost_is_an_estimate_says_nothing(usage: UsageFilter, reported: str, changes: dict[str, Any]) -> None:
    assert answered(usage, reported, **changes).cost == ""

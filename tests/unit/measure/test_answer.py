"""A stream as its client saw it: the first token in any channel, the engine's own stopwatch, what went wrong."""

import json

import pytest

from din_extproc.measure.answer import NodeTimes, TimedAnswer, streamed
from din_extproc.tools.bench.timed_client import to_answer
from din_extproc.tools.http_client import OutsideResponse


def chunk(delta: dict | None = None, created: int = 100, finish: str | None = None, **more) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return json.dumps({"choices": choices, "created": created, **more}).encode()


def test_a_role_is_no_token_and_usage_counts():
    events = [
        (10.0, chunk({"role": "assistant", "content": ""})),
        (50.0, chunk({"content": "a"})),
        (60.0, chunk({"content": "b"}, created=101)),
        (80.0, chunk({"content": "c"}, created=101)),
        (80.5, chunk({}, created=101, finish="stop")),
        (81.0, chunk(None, created=101, usage={"completion_tokens": 4}, timings={"prompt_ms": 30.0, "predicted_ms": 25.5})),
        (81.0, b"[DONE]"),
    ]
    answer = streamed(events, 82.0)
    assert answer == TimedAnswer(82.0, 50.0, 80.0, 4, 55.5, ((100, 10.0), (101, 60.0)))
    assert answer.per_token_ms == pytest.approx(10.0)


@pytest.mark.parametrize("channel", ["content", "reasoning_content", "reasoning"])
def test_the_first_token_of_any_channel_counts(channel):
    assert streamed([(5.0, chunk({channel: "x"})), (9.0, chunk({"content": "y"}, finish="stop"))], 9.0).first_token_ms == 5.0


def test_one_token_has_no_pace():
    assert streamed([(5.0, chunk({"content": "x"}, finish="stop"))], 9.0).per_token_ms is None


def test_broken_events_count_for_nothing():
    assert streamed([(1.0, b"{"), (2.0, b"7"), (3.0, b'{"choices":"no"}'), (4.0, b"[DONE]")], 5.0) == TimedAnswer(5.0)


def test_what_goes_wrong_is_named():
    assert streamed([(1.0, b'{"error":{"code":"upstream_error"}}')], 2.0).trouble == "upstream_error"
    assert streamed([(1.0, b'{"error":{"code":502,"type":"server"}}')], 2.0).trouble == "502"
    assert streamed([(1.0, b'{"error":"out of memory"}')], 2.0).trouble == "upstream_error"
    assert streamed([(1.0, chunk({"content": "x"}))], 2.0).trouble == "upstream_truncated"


def test_an_outcome_that_is_no_stream_says_why():
    refused = OutsideResponse(429, {}, b'{"error":{"code":"rate_limit_exceeded"}}', total_s=0.001)
    assert to_answer(refused).trouble == "rate_limit_exceeded"
    assert to_answer(OutsideResponse(502, {}, b"<html>", total_s=0.001)).trouble == "502"
    assert to_answer(OutsideResponse(0, {}, b"", "connection refused")).trouble == "connection refused"
    assert to_answer(OutsideResponse(200, {}, b"", "reset in mid-stream", total_s=1.0)).trouble == "reset in mid-stream"


@pytest.mark.parametrize("step", [1, 7, 33, 1000])
def test_an_event_arrives_with_its_last_byte_however_it_is_cut(step):
    first, second = b"data: " + chunk({"content": "a"}) + b"\r\n\r\n", b"data: " + chunk({"content": "b"}, finish="stop") + b"\n\n"
    body = first + second
    ends = [*range(step, len(body), step), len(body)]
    arrivals = tuple((end / 1000, end) for end in ends)
    answer = to_answer(OutsideResponse(200, {}, body, total_s=9.0, arrivals=arrivals))
    assert answer.tokens == 2
    assert answer.first_token_ms == next(end for end in ends if end >= len(first))
    assert answer.last_token_ms == len(body)


@pytest.mark.parametrize(
    ("timing", "found"),
    [
        ('node;dur=35;desc="1795981340.250000"', NodeTimes(1795981340.25, 35.0, 40.0, 41.0)),
        ('node;dur=;desc="1"', None),
        ("cache;dur=3", None),
        ("", None),
    ],
)
def test_times_of_the_node_s_own_envoy_are_read(timing, found):
    assert NodeTimes.of({"server-timing": timing, "x-din-exec-time-ms": "40"}, 41.0) == found
    assert NodeTimes.of({"server-timing": timing}, 41.0) is None

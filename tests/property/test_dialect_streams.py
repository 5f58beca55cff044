"""Streams of engines' own dialects: any bytes, cut anywhere."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.request import Operation
from din_extproc.southbound.engines import ENGINES
from tests.support.anthropic_answers import encode_events
from tests.support.dialects import OK, asked, streamed, text_of

NATIVE = {name: engine.native for name, engine in ENGINES.items() if engine.native is not None}
SCRAPS = [b"\n", b"\n\n", b"data: ", b'{"done":true}', b'{"error":1}', b"{}"]
PIECES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12)


def written(name: str, pieces: list[str]) -> bytes:
    """The stream in which the engine sends these pieces."""
    if name == "anthropic":
        deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}} for piece in pieces]
        opening = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        ending = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
        return encode_events([opening, *deltas, {"type": "content_block_stop", "index": 0}, ending, {"type": "message_stop"}])
    if name == "ollama":
        lines = [{"message": {"content": piece}, "done": False} for piece in pieces]
        lines.append({"message": {"content": ""}, "done": True, "done_reason": "stop", "prompt_eval_count": 1, "eval_count": 1})
        return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    if name == "tgi":
        events = [{"token": {"text": piece}} for piece in pieces]
        events.append({"token": {"text": "</s>", "special": True}, "details": {"finish_reason": "eos_token", "input_length": 1}})
    else:
        events = [{"text_output": piece} for piece in pieces]
    return b"".join(b"data:" + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


def operation(name: str) -> Operation:
    return Operation.CHAT if name in ("ollama", "anthropic") else Operation.COMPLETIONS


@pytest.mark.parametrize("name", sorted(NATIVE))
@given(pieces=PIECES, places=st.lists(st.integers(min_value=0), max_size=30))
def test_every_text_arrives_whole_and_in_order_wherever_the_bytes_are_cut(name, pieces, places):
    data = written(name, pieces)
    whole = streamed(NATIVE[name], asked(operation(name)), data)
    assert text_of(whole) == "".join(pieces)
    assert whole[-1] == "[DONE]"
    assert streamed(NATIVE[name], asked(operation(name)), *cut(data, places)) == whole


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_each_single_cut_makes_no_difference(name):
    data = written(name, ["a", ' "b\\"', "é\n", "終"])
    whole = streamed(NATIVE[name], asked(operation(name)), data)
    for place in range(len(data)):
        assert streamed(NATIVE[name], asked(operation(name)), data[:place], data[place:]) == whole


@pytest.mark.parametrize("name", sorted(NATIVE))
@given(
    parts=st.lists(st.binary(max_size=60) | st.sampled_from(SCRAPS), max_size=12),
)
def test_any_bytes_become_events_and_any_body_an_answer_or_none(name, parts):
    for each in NATIVE[name].operations:
        assert all(type(event) in (dict, str) for event in streamed(NATIVE[name], asked(each), *parts))
        assert isinstance(NATIVE[name].translate_answer(asked(each), OK, b"".join(parts)), bytes | None)

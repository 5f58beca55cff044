"""Any stream in any pieces: the Lua filter counts what the SSE grammar and a JSON parser count."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sse
from tests.support.lua_filter import TRUNCATED, UsageFilter

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CHANNEL = st.sampled_from(["content", "reasoning_content", "reasoning", "refusal", "role"])
INDEX = st.sampled_from([0, 0, 0, 1, 2])
DELTA = st.builds(
    lambda index, channel, text, none: {"choices": [{"index": index, "delta": {channel: text}, "finish_reason": none}]},
    INDEX,
    CHANNEL,
    TEXT,
    st.sampled_from([None, ""]),
)
COUNT = st.one_of(st.integers(0, 10**6), st.sampled_from([-3, 1.5, 12.0, 1e300, 1e12, 2e1]))
USAGE = st.builds(
    lambda prompt, completion: {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}},
    COUNT,
    COUNT | st.none(),
)
FINISH = INDEX.map(lambda index: {"choices": [{"delta": {}, "finish_reason": "stop", "index": index}]})
CHUNK = st.builds(lambda chunk, ascii_only: [json.dumps(chunk, ensure_ascii=ascii_only).encode()], DELTA | USAGE | FINISH, st.booleans())
LINES = st.one_of(
    CHUNK.map(lambda datas: [b"data: " + datas[0]]),
    CHUNK.map(lambda datas: [b"event: x", b"data:" + datas[0], b"id: 3"]),
    st.sampled_from([[b": keepalive"], [b"data"], [b"data: 1"], [b"retry: 3"], [b'data: {"broken": "'], [b"data: {", b'data: "a":1}']]),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    out = []
    for lines in draw(st.lists(LINES, max_size=12)):
        end = draw(LINE_ENDS)
        out += [line + end for line in lines] + [draw(LINE_ENDS) if end != b"\r" else end]
    return b"".join(out) + draw(st.sampled_from([b"", b"data: [DONE]\n\n"]))


@pytest.fixture(scope="module")
def usage() -> UsageFilter:
    return UsageFilter()


@settings(max_examples=300)
@given(stream=streams(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), ending=st.sampled_from(["data", "empty"]))
def test_any_stream_in_any_pieces_is_counted_like_the_grammar_says(
    usage: UsageFilter, stream: bytes, sizes: list[int], ending: str
) -> None:
    chunks, at = [], 0
    while at < len(stream):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(stream[at : at + size])
        at += size
    chunks = chunks or [b""]
    played = usage.play(chunks, ending=ending)
    assert played.log == ""
    expected = sse.facts(stream)
    if sse.ended(expected):
        assert played.out == stream
    else:
        whole = played.out.removesuffix(TRUNCATED)
        assert whole != played.out
        assert sse.datas(whole) == sse.datas(stream)
        assert stream.startswith(whole)
    assert {key: played.facts.get(key) for key in expected} == expected
    stripped = usage.play(chunks, ending=ending, strip=True).out
    kept = [data for data in sse.datas(stream) if not (b'"choices"' in data and b'"usage"' in data)]
    assert sse.datas(stripped.removesuffix(TRUNCATED)) == kept

"""Messages of native streams: the same ones however the bytes are cut, and never more than a mebibyte held back."""

import tracemalloc

import pytest

from din_extproc.domain.request import Operation
from din_extproc.southbound.dialect import AnswerContext
from din_extproc.southbound.engines import ENGINES
from din_extproc.southbound.framing import MAX_MESSAGE, OVERLONG, EventSplitter, LineSplitter

ASKED = AnswerContext(Operation.COMPLETIONS, "1", 1, "m", {})


@pytest.mark.parametrize("framing", [LineSplitter, EventSplitter])
def test_a_message_that_never_ends_is_not_hoarded(framing: type[LineSplitter | EventSplitter]) -> None:
    reader = framing()
    tracemalloc.start()
    for _ in range(256):
        assert reader.feed(b"data: " + b"x" * 65_530) == []
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20
    assert peak < 3 << 20
    assert reader.end() in ([OVERLONG], [])


def test_lines_without_a_blank_one_are_not_hoarded() -> None:
    reader = EventSplitter()
    tracemalloc.start()
    for _ in range(400):
        assert reader.feed(b"data: abc\n" * 1000) == []
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 << 20
    assert reader.feed(b"\ndata: next\n\n") == [OVERLONG, b"next"]


def test_a_message_as_long_as_allowed_is_read_and_a_longer_one_is_not() -> None:
    longest = b"x" * MAX_MESSAGE
    for cut in (1, 65_536, MAX_MESSAGE, MAX_MESSAGE + 1):
        lines = LineSplitter()
        assert lines.feed(longest[:cut]) + lines.feed(longest[cut:] + b"\nnext\n") == [longest, b"next"]
        assert lines.feed(b"x" + longest[:cut]) + lines.feed(longest[cut:] + b"\nnext\n") == [OVERLONG, b"next"]


def test_what_follows_an_event_that_is_too_long_is_read() -> None:
    for end in (b"\n\n", b"\r\n\r\n"):
        stream = b"data: " + b"x" * (MAX_MESSAGE + 1) + end + b"data: next" + end
        for size in (1 << 14, len(stream)):
            reader = EventSplitter()
            pieces = [reader.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
            assert [message for found in pieces for message in found] == [OVERLONG, b"next"]


@pytest.mark.parametrize("name", ["anthropic", "ollama", "tgi", "triton"])
def test_a_message_that_is_too_long_ends_the_stream_with_an_error(name: str) -> None:
    native = ENGINES[name].native
    assert native is not None
    translator = native.create_translator(ASKED)
    out = b"".join(translator.feed(b"data: " + b"x" * 65_536) for _ in range(20)) + translator.feed(b"\n\n") + translator.end()
    assert out.endswith(b"data: [DONE]\n\n")
    assert b'"code":"upstream_error"' in out

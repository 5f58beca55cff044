"""The model's answers. A prompt always gets the same answer, whatever the load: a script is written before the first token.

An answer is a walk over a fixed word list, seeded by the prompt. A prompt that holds `[[tag]]` is answered with that tag first, so that a
reader can tell the answers apart.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import msgspec
from msgspec import Struct

from din_extproc.tools.engine_model.tokens import SimulatedTokenizer

_TEXT = """
the of a to and in is model token node batch queue answer prompt cache layer weight signal gate route stream first next each other
small large quick steady given found known open clear bright river stone light north south garden window paper letter number circle
time order point side part line field ground water city road song colour voice story morning evening winter summer
"""
_WORDS = tuple(_TEXT.split())
_TAG = re.compile(r"\[\[[^\[\]]{1,200}\]\]")
_SHORTEST, _SPREAD = 24, 128


class ToolCall(Struct, frozen=True):
    """A function call that the model makes."""

    name: str
    arguments: str
    """JSON text."""


class AnswerScript(Struct, frozen=True):
    """A complete answer, token by token. The end-of-sequence token is a piece without text."""

    pieces: tuple[str, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    tool: ToolCall | None = None
    """The call whose arguments the pieces spell; None: text."""
    thoughts: int = 0
    """Number of leading pieces that are reasoning, not text."""

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.pieces[self.thoughts :])

    @property
    def thought(self) -> str:
        """The reasoning before the answer."""
        return "".join(self.pieces[: self.thoughts])


class Bounds(Struct, frozen=True):
    """The limits of the answer's length in the request."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


def write_script(tokenizer: SimulatedTokenizer, prompt: str, seed: int, bounds: Bounds) -> AnswerScript:
    """Return the answer to a prompt. `seed` distinguishes the choices of one request."""
    state = crc32(prompt.encode("utf-8", "surrogatepass"), seed & 0xFFFFFFFF)
    natural = max(_SHORTEST + state % _SPREAD, bounds.min_tokens)
    length = bounds.max_tokens if bounds.ignore_eos else min(natural, bounds.max_tokens)
    tag = _TAG.search(prompt)
    text = _generate_words(state, length, tag.group() if tag else "")
    pieces = tuple(tokenizer.pieces(text))[:length]
    if bounds.stop and (stopped := _cut_at_stop(pieces, bounds.stop)):
        return stopped
    if length < bounds.max_tokens and not bounds.ignore_eos:
        return AnswerScript((*pieces, ""), "stop")
    return AnswerScript(pieces, "length")


def write_tool_call(tokenizer: SimulatedTokenizer, tool: Mapping[str, Any], bounds: Bounds) -> AnswerScript:
    """Return a call of one tool with invented arguments that fit its schema. Cut short by the length, it is text, as in vLLM."""
    function = tool.get("function") or {}
    schema = function.get("parameters") or {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments = msgspec.json.encode({name: _sample(kind) for name, kind in (properties or {}).items()}).decode()
    name = str(function.get("name") or "")
    pieces = (*tokenizer.pieces(arguments), "")
    if len(pieces) <= bounds.max_tokens:
        return AnswerScript(pieces, "tool_calls", tool=ToolCall(name, arguments))
    opening = tuple(tokenizer.pieces(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}'))
    return AnswerScript(opening[: bounds.max_tokens], "length")


def _generate_words(state: int, words: int, first: str) -> str:
    """`words` words from the list; the multiplier and increment are Knuth's for 2^64."""
    chosen = [first] if first else []
    for _ in range(words):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        chosen.append(_WORDS[(state >> 33) % len(_WORDS)])
    return " ".join(chosen)


def _cut_at_stop(pieces: Sequence[str], stop: Sequence[str]) -> AnswerScript | None:
    """Cut the script at the first stop string, which is not part of the text; the token that completes it is counted."""
    text = "".join(pieces)
    found = min(((text.find(word), word) for word in stop if word and word in text), default=None)
    if found is None:
        return None
    at, word = found
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece[: max(0, at - length)])
        length += len(piece)
        if length >= at + len(word):
            break
    return AnswerScript(tuple(kept), "stop", stop_reason=word)


def _sample(schema: Any) -> Any:
    """Return a value of the schema's type."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][0]
    samples: dict[Any, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return samples.get(kind, "example") if not isinstance(kind, list) else "example"

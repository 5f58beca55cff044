"""What an engine's own interface has to offer to stand behind ours: orders out, answers in. One file per dialect implements it.

Rule: pure and total. An order is a body that means what the client's body means, or a refusal; an answer of any bytes becomes OpenAI's
answer or an error in its place, never an exception.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead, Translator
from din_extproc.domain.verdict import Refusal, RefusalCode


class PlainRequest(Struct, frozen=True):
    """A request in OpenAI's words."""

    operation: Operation
    fields: dict[str, Any]
    """The decoded body."""
    model: str
    """The name that the engine answers to."""
    stream: bool
    drop: bool
    """What the engine can't be told is left out and named, instead of refused."""


class DialectRequest(Struct, frozen=True):
    """The same in the engine's words."""

    path: str
    body: bytes
    dropped: tuple[str, ...] = ()
    """Parameters that were left out."""


class AnswerContext(Struct, frozen=True):
    """What is needed of a request to write its answer."""

    operation: Operation
    id: str
    """Of the request, without the prefix that OpenAI gives each kind of answer."""
    created: int
    """Seconds since the epoch."""
    model: str
    """The engine's name for it."""
    fields: Mapping[str, Any]


class Dialect(Struct, frozen=True):
    """An engine's own interface."""

    operations: frozenset[Operation]
    """What it can be asked."""
    order: Callable[[PlainRequest], DialectRequest | Refusal]
    whole: Callable[[AnswerContext, ResponseHead, bytes], bytes | None]
    """A whole good answer as OpenAI writes it; None: it is none that the dialect knows."""
    pieces: Callable[[AnswerContext], Translator]
    """The same for a stream, as OpenAI's events."""
    has_path: Callable[[str], bool]
    """Whether this is one of its paths."""
    passed: frozenset[Operation] = frozenset()
    """Operations that the same server answers in OpenAI's words."""


def refused(message: str, param: str) -> Refusal:
    """A request that this engine can't be asked."""
    return Refusal(RefusalCode.INVALID_REQUEST, message, param=param)

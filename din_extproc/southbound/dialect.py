"""The interface of a dialect: translates OpenAI requests to an engine's own API and its answers back. One file per dialect.

Pure and total: a request becomes an equivalent engine request or a refusal; an answer of any bytes becomes OpenAI's answer or an error,
never an exception.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead, Translator
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode


class PlainRequest(Struct, frozen=True):
    """A decoded request in OpenAI's API."""

    operation: Operation
    fields: dict[str, Any]
    """The decoded body."""
    model: str
    """The model name that the engine expects."""
    stream: bool
    drop: bool
    """Unsupported parameters are dropped and reported instead of refused."""


class DialectRequest(Struct, frozen=True):
    """The same request in the engine's API."""

    path: str
    body: bytes
    dropped: tuple[str, ...] = ()
    """Names of the dropped parameters."""
    headers: Headers = ()
    """Headers that the engine requires."""


class AnswerContext(Struct, frozen=True):
    """The properties of a request that its answer depends on."""

    operation: Operation
    id: str
    """The request's id, without OpenAI's prefix for each kind of answer."""
    created: int
    """Seconds since the Unix epoch."""
    model: str
    """The engine's model name."""
    fields: Mapping[str, Any]


class Dialect(Struct, frozen=True):
    """An engine's own API."""

    operations: frozenset[Operation]
    """The supported operations."""
    build_request: Callable[[PlainRequest], DialectRequest | Refusal]
    translate_answer: Callable[[AnswerContext, ResponseHead, bytes], bytes | None]
    """Translates a complete success answer; returns None for an unknown format."""
    create_translator: Callable[[AnswerContext], Translator]
    """Creates the translator of a stream to OpenAI's events."""
    has_path: Callable[[str], bool]
    """Returns whether a path belongs to this API."""
    openai_operations: frozenset[Operation] = frozenset()
    """Operations for which the same server offers OpenAI's API."""


def refuse_unsupported(message: str, param: str) -> Refusal:
    """Return the refusal of a request that the engine does not support."""
    return Refusal(RefusalCode.INVALID_REQUEST, message, param=param)

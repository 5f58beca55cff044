"""The interface of a dialect: translates a client's requests to an API of the engine and its answers back. One file per dialect.

Pure and total: a request becomes an equivalent engine request or a refusal; an answer of any bytes becomes an answer in the client's API
or an error, never an exception.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead, Translator
from din_extproc.domain.verdict import Refusal, RefusalCode


class PlainRequest(Struct, frozen=True):
    """A decoded request."""

    operation: Operation
    fields: dict[str, Any]
    """The decoded body."""
    model: str
    """The model name that the engine expects."""
    stream: bool
    drop: bool
    """Unsupported parameters are dropped and reported instead of refused."""
    stream_usage: bool = True
    """The engine honours `stream_options.include_usage`."""


class DialectRequest(Struct, frozen=True):
    """The same request in an API of the engine."""

    path: str
    body: bytes
    dropped: tuple[str, ...] = ()
    """Names of the dropped parameters."""


ANSWER_FIELDS = frozenset({"max_tokens", "logprobs", "encoding_format", "documents", "return_documents", "top_n"})
"""The translators of answers."""


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
    """The decoded request; those of `ANSWER_FIELDS` are enough."""


class Dialect(Struct, frozen=True):
    """An API of an engine that is not the client's."""

    operations: frozenset[Operation]
    """The supported operations."""
    build_request: Callable[[PlainRequest], DialectRequest | Refusal]
    translate_answer: Callable[[AnswerContext, ResponseHead, bytes], bytes | None]
    """Translates a complete success answer; returns None for an unknown format."""
    create_translator: Callable[[AnswerContext], Translator]
    """Creates the translator of a stream to the client's events."""
    has_path: Callable[[str], bool]
    """Returns whether a path belongs to this API."""
    openai_operations: frozenset[Operation] = frozenset()
    """Operations for which the same server offers OpenAI's API."""


def refuse_unsupported(message: str, param: str) -> Refusal:
    """Return the refusal of a request that the engine does not support."""
    return Refusal(RefusalCode.INVALID_REQUEST, message, param=param)

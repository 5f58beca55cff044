"""A node's response and its treatment: pass it on, replace it as a whole, or translate it as a stream.

The treatment is chosen from the response head; only some treatments read the body.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.verdict import Headers

SUCCESS_STATUSES = range(HTTPStatus.OK, HTTPStatus.MULTIPLE_CHOICES)
"""Status codes of responses that may be passed on unchanged. Redirections are excluded: a client that follows one sends its prompt
along."""


class ResponseHead(Struct, frozen=True, gc=False):
    """A response's status and headers: names in lower case, values as text (latin-1)."""

    status: int
    headers: Mapping[str, str]

    def header(self, name: str) -> str:
        """Return the header's value, "" when it is missing."""
        return self.headers.get(name, "")


class PassThrough(Struct, frozen=True, gc=False):
    """Pass the response on unchanged."""

    headers: Headers = ()
    """Headers to set on the response nevertheless."""


class Replacement(Struct, frozen=True, gc=False):
    """A response that replaces the node's whole response."""

    status: int
    headers: Headers
    """Headers to set; `content-length` is set automatically."""
    body: bytes


class BufferedTranslation(Struct, frozen=True, gc=False):
    """Buffer the response until its body is complete, then replace it. Envoy answers 502 when the body outgrows its buffer."""

    rewrite: Callable[[bytes], Replacement | None]
    """Map the whole body to its replacement, or to None to keep it. Never raises."""


class Translator(Protocol):
    """Translates one body into another while it streams. Never raises, whatever the input."""

    def feed(self, data: bytes) -> bytes:
        """Consume the next bytes, split anywhere, and return the output that they complete, possibly b""."""

    def end(self) -> bytes:
        """Mark the end of the body and return the remaining output."""


class StreamTranslation(Struct, frozen=True, gc=False):
    """Translate the body as a stream, holding back only what the translator needs."""

    translator: Translator
    headers: Headers = ()
    """Headers to set on the response; `content-length` is removed automatically."""
    failure_output: bytes = b""
    """Output that replaces the rest of the body if the translator raises nevertheless."""


Treatment = PassThrough | Replacement | BufferedTranslation | StreamTranslation
"""A `Replacement` is sent at once, without waiting for the body."""

PASS = PassThrough()

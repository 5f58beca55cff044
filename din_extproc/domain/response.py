"""A node's answer on its way to the client, and what may be done with it: passed on, replaced whole, or translated piece by piece.

Rule: the treatment is chosen when the answer's head has come, and nothing of the body is seen unless it says so.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.verdict import Headers

GOOD = range(HTTPStatus.OK, HTTPStatus.MULTIPLE_CHOICES)
"""Statuses of answers that may go on as they are. A redirection may not: a client that follows it takes its prompt along."""


class ResponseHead(Struct, frozen=True, gc=False):
    """An answer's status and headers: names in lower case, values as text (latin-1)."""

    status: int
    headers: Mapping[str, str]

    def header(self, name: str) -> str:
        """The header's value, "" when it is not there."""
        return self.headers.get(name, "")


class PassThrough(Struct, frozen=True, gc=False):
    """The answer goes on as it is."""

    headers: Headers = ()
    """Set on it all the same."""


class Replacement(Struct, frozen=True, gc=False):
    """What the client gets instead of a whole answer."""

    status: int
    headers: Headers
    """Set on the answer; `content-length` sets itself."""
    body: bytes


class BufferedTranslation(Struct, frozen=True, gc=False):
    """The answer is held until its body is complete, and replaced. Envoy answers 502 by itself when it outgrows its buffer."""

    rewrite: Callable[[bytes], Replacement | None]
    """Given the whole body. Total. None: it stays as it is."""


class Translator(Protocol):
    """Turns one body into another while it passes. Total: whatever bytes come, it raises nothing."""

    def feed(self, data: bytes) -> bytes:
        """The next bytes, cut anywhere: what the client gets for them, b"" when that takes more of them."""

    def end(self) -> bytes:
        """The body is complete: what the client still gets."""


class StreamTranslation(Struct, frozen=True, gc=False):
    """The answer's body is translated piece by piece, none of which is held longer than the translator needs."""

    translator: Translator
    headers: Headers = ()
    """Set on the answer's head; `content-length` is removed by itself."""
    broken: bytes = b""
    """What the client gets instead of the rest should the translator fail all the same."""


Treatment = PassThrough | Replacement | BufferedTranslation | StreamTranslation
"""A `Replacement` at once: the body, whatever comes of it, is not wanted."""

PASS = PassThrough()

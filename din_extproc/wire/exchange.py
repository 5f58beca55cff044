"""Which message may follow which on one ext_proc stream, and what is said to each. No socket, no clock: only the table and the step.

Rule: a pair that the table does not name is the only error.

Envoy with `request_body_mode: BUFFERED` sends three messages: request headers, the whole body, response headers. The other rows are for
what else was seen: a body in pieces, an end by trailers, an end said twice, Envoy's own answers without a request phase.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.request import Head
from din_extproc.domain.verdict import Answer, Send, Verdict
from din_extproc.wire import encode
from din_extproc.wire.events import (
    Event,
    ProtocolError,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)


class Reply(Struct, frozen=True, gc=False):
    """Send this message."""

    message: bytes


class Decide(Struct, frozen=True, gc=False):
    """The request is here in full: a verdict is wanted. `body` is b"" when there is none."""

    head: Head
    body: bytes


class Ignore(Struct, frozen=True, gc=False):
    """Nothing to say yet."""


Command = Reply | Decide | Ignore

_IGNORE = Ignore()
_HEADERS_GO_ON = Reply(encode.CONTINUE_REQUEST_HEADERS)
_BODY_GOES_ON = Reply(encode.CONTINUE_REQUEST_BODY)
_TRAILERS_GO_ON = Reply(encode.CONTINUE_REQUEST_TRAILERS)
_ANSWER_BODY_GOES_ON = Reply(encode.CONTINUE_RESPONSE_BODY)
_ANSWER_TRAILERS_GO_ON = Reply(encode.CONTINUE_RESPONSE_TRAILERS)
_ANSWER_GOES_ON = Reply(encode.CONTINUE_RESPONSE_HEADERS)
_SWALLOWED = Reply(encode.SWALLOW_REQUEST_BODY)


def _say(reply: Reply) -> "Callable[[Exchange, Any], Command]":
    return lambda _exchange, _event: reply


def _too_late(_send: Send) -> bytes:
    raise ValueError("a request that ends with trailers and has no body can't be sent on: its head has passed")


class State(IntEnum):
    """How far the exchange is."""

    OPEN = 0
    """Nothing has come."""
    HEAD = 1
    """The head is here, its body is to come."""
    BODY = 2
    """Pieces of the body are here, its end is to come; the last piece is not answered yet."""
    DECIDING = 3
    SENT = 4
    """The request went on."""
    ANSWERED = 5
    """The request was answered here."""
    ANSWERING = 6
    """The answer's head is through."""


class Exchange:
    """One exchange. `receive` takes Envoy's messages, `verdict` the decision that a `Decide` asked for."""

    __slots__ = ("_after", "_answer", "_before", "_head", "_pieces", "_send", "state")

    def __init__(self) -> None:
        self.state = State.OPEN
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._before: bytes | None = None
        """Goes out before the verdict: the reply to the piece before the last."""
        self._after: list[bytes] = []
        """Goes out after the verdict: replies to what came while it was made."""
        self._send: Callable[[Send], bytes] = encode.send_at_body
        self._answer = _ANSWER_GOES_ON
        """What is said to the answer's head."""

    def receive(self, event: Event) -> Command:
        """Take one message.

        Raises:
            ProtocolError: the message may not come now.
        """
        step = self._TABLE.get((self.state, type(event)))
        if step is None:
            raise ProtocolError(f"{type(event).__name__} may not come in state {self.state.name}")
        return step(self, event)

    def verdict(self, verdict: Verdict) -> tuple[bytes, ...]:
        """The messages that carry the verdict: one, in the usual case; none, when Envoy has meanwhile answered by itself.

        Raises:
            ValueError: the verdict can't be written. Another verdict may be given.
            ProtocolError: none was asked for.
        """
        if self.state is State.ANSWERING:
            return ()
        if self.state is not State.DECIDING:
            raise ProtocolError(f"no verdict is wanted in state {self.state.name}")
        if isinstance(verdict, Answer):
            message = encode.answer(verdict)
            self.state = State.ANSWERED
            return (message,)
        if verdict.body is None and len(self._pieces) > 1:
            verdict = replace(verdict, body=b"".join(self._pieces))
        message = self._send(verdict)
        if verdict.response_headers:
            self._answer = Reply(encode.response_headers(verdict.response_headers))
        self.state = State.SENT
        self._pieces.clear()
        if self._before is None and not self._after:
            return (message,)
        return (*(() if self._before is None else (self._before,)), message, *self._after)

    # The steps of the table.

    def _open(self, event: RequestHeaders) -> Command:
        if event.end_of_stream:
            self._send = encode.send_at_headers
            return self._decide(event.head, b"")
        self._head = event.head
        self.state = State.HEAD
        return _HEADERS_GO_ON

    def _piece(self, event: RequestBody) -> Command:
        """A part of the body, or all of it. Earlier pieces are swallowed: the verdict carries the whole body."""
        assert self._head is not None  # noqa: S101 - a body comes after a head
        first = not self._pieces
        self._pieces.append(event.body)
        if event.end_of_stream:
            if not first:
                self._before = encode.SWALLOW_REQUEST_BODY
            return self._decide(self._head, event.body if first else b"".join(self._pieces))
        self.state = State.BODY
        return _IGNORE if first else _SWALLOWED

    def _end_by_trailers(self, _event: RequestTrailers) -> Command:
        """No message with an end came. The last piece is answered with the verdict; without any, only an answer can be given."""
        assert self._head is not None  # noqa: S101 - trailers come after a head
        if self._pieces:
            self._after.append(encode.CONTINUE_REQUEST_TRAILERS)
        else:
            self._send = _too_late
        return self._decide(self._head, b"".join(self._pieces))

    def _decide(self, head: Head, body: bytes) -> Decide:
        self.state = State.DECIDING
        self._head = None
        return Decide(head, body)

    def _body_again(self, _event: RequestBody) -> Command:
        """The end was said before: its work is done once."""
        self._after.append(encode.CONTINUE_REQUEST_BODY)
        return _IGNORE

    def _trailers_again(self, _event: RequestTrailers) -> Command:
        self._after.append(encode.CONTINUE_REQUEST_TRAILERS)
        return _IGNORE

    def _answer_begins(self, _event: ResponseHeaders) -> Command:
        """A node's answer after `Send`; or one that Envoy gave by itself, at any point of the request."""
        self.state = State.ANSWERING
        return self._answer

    _TABLE: ClassVar[dict[tuple[State, type], Callable[["Exchange", Any], Command]]] = {
        (State.OPEN, RequestHeaders): _open,
        (State.HEAD, RequestBody): _piece,
        (State.HEAD, RequestTrailers): _end_by_trailers,
        (State.BODY, RequestBody): _piece,
        (State.BODY, RequestTrailers): _end_by_trailers,
        (State.DECIDING, RequestBody): _body_again,
        (State.DECIDING, RequestTrailers): _trailers_again,
        (State.SENT, RequestBody): _say(_BODY_GOES_ON),
        (State.SENT, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.ANSWERED, RequestBody): _say(_BODY_GOES_ON),
        (State.ANSWERED, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.ANSWERING, RequestBody): _say(_BODY_GOES_ON),
        (State.ANSWERING, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.OPEN, ResponseHeaders): _answer_begins,
        (State.HEAD, ResponseHeaders): _answer_begins,
        (State.BODY, ResponseHeaders): _answer_begins,
        (State.DECIDING, ResponseHeaders): _answer_begins,
        (State.SENT, ResponseHeaders): _answer_begins,
        (State.ANSWERED, ResponseHeaders): _answer_begins,
        (State.SENT, ResponseBody): _say(_ANSWER_BODY_GOES_ON),
        (State.SENT, ResponseTrailers): _say(_ANSWER_TRAILERS_GO_ON),
        (State.ANSWERING, ResponseBody): _say(_ANSWER_BODY_GOES_ON),
        (State.ANSWERING, ResponseTrailers): _say(_ANSWER_TRAILERS_GO_ON),
    }

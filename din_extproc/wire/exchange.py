"""Which message may follow which on one ext_proc stream, and what is said to each. No socket, no clock: only the table and the step.

Rule: a pair that the table does not name is the only error.

Envoy with `request_body_mode: BUFFERED` sends three messages: request headers, the whole body, response headers. One body message is the
whole body whatever it says about an end: when trailers follow it says none, and Envoy waits for the reply all the same. (STREAMED can't
route by body at all: the head has passed when the first piece comes.) The other rows are for what else was seen: trailers, an end said
twice, Envoy's own answers at any point.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar

from msgspec import Struct

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
    DECIDING = 2
    SENT = 3
    """The request went on."""
    ANSWERED = 4
    """The request was answered here."""
    ANSWERING = 5
    """The answer's head is through."""


class Exchange:
    """One exchange. `receive` takes Envoy's messages, `verdict` the decision that a `Decide` asked for."""

    __slots__ = ("_after", "_answer", "_head", "_send", "state")

    def __init__(self) -> None:
        self.state = State.OPEN
        self._head: Head | None = None
        self._after: tuple[bytes, ...] = ()
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
        message = self._send(verdict)
        if verdict.response_headers:
            self._answer = Reply(encode.response_headers(verdict.response_headers))
        self.state = State.SENT
        return (message, *self._after)

    # The steps of the table.

    def _open(self, event: RequestHeaders) -> Command:
        if event.end_of_stream:
            self._send = encode.send_at_headers
            return self._decide(event.head, b"")
        self._head = event.head
        self.state = State.HEAD
        return _HEADERS_GO_ON

    def _body(self, event: RequestBody) -> Command:
        return self._decide(self._head, event.body)

    def _end_by_trailers(self, _event: RequestTrailers) -> Command:
        """A request without a body that did not say so in its head, which has passed: it can only be answered."""
        self._send = _too_late
        return self._decide(self._head, b"")

    def _decide(self, head: Head | None, body: bytes) -> Decide:
        assert head is not None  # noqa: S101 - the table asks for a verdict only after a head
        self.state = State.DECIDING
        self._head = None
        return Decide(head, body)

    def _body_again(self, _event: RequestBody) -> Command:
        """The end was said before: its work is done once."""
        self._after += (encode.CONTINUE_REQUEST_BODY,)
        return _IGNORE

    def _trailers(self, _event: RequestTrailers) -> Command:
        self._after += (encode.CONTINUE_REQUEST_TRAILERS,)
        return _IGNORE

    def _answer_begins(self, _event: ResponseHeaders) -> Command:
        """A node's answer after `Send`; or one that Envoy gave by itself, at any point of the request."""
        self.state = State.ANSWERING
        return self._answer

    _TABLE: ClassVar[dict[tuple[State, type], Callable[["Exchange", Any], Command]]] = {
        (State.OPEN, RequestHeaders): _open,
        (State.HEAD, RequestBody): _body,
        (State.HEAD, RequestTrailers): _end_by_trailers,
        (State.DECIDING, RequestBody): _body_again,
        (State.DECIDING, RequestTrailers): _trailers,
        (State.SENT, RequestBody): _say(_BODY_GOES_ON),
        (State.SENT, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.ANSWERED, RequestBody): _say(_BODY_GOES_ON),
        (State.ANSWERED, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.ANSWERING, RequestBody): _say(_BODY_GOES_ON),
        (State.ANSWERING, RequestTrailers): _say(_TRAILERS_GO_ON),
        (State.OPEN, ResponseHeaders): _answer_begins,
        (State.HEAD, ResponseHeaders): _answer_begins,
        (State.DECIDING, ResponseHeaders): _answer_begins,
        (State.SENT, ResponseHeaders): _answer_begins,
        (State.ANSWERED, ResponseHeaders): _answer_begins,
        (State.SENT, ResponseBody): _say(_ANSWER_BODY_GOES_ON),
        (State.SENT, ResponseTrailers): _say(_ANSWER_TRAILERS_GO_ON),
        (State.ANSWERING, ResponseBody): _say(_ANSWER_BODY_GOES_ON),
        (State.ANSWERING, ResponseTrailers): _say(_ANSWER_TRAILERS_GO_ON),
    }

"""Which message may follow which on one ext_proc stream, and what is said to each. No socket, no clock: only the table and the step.

Rule: a pair that the table does not name is the only error.

Envoy with `request_body_mode: BUFFERED` sends three messages: request headers, the whole body, response headers. One body message is the
whole body whatever it says about an end: when trailers follow it says none, and Envoy waits for the reply all the same. (STREAMED can't
route by body at all: the head has passed when the first piece comes.) The other rows are for what else was seen: trailers, an end said
twice, Envoy's own answers at any point.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, assert_never

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import (
    SUCCESS_STATUSES,
    BufferedTranslation,
    PassThrough,
    Replacement,
    ResponseHead,
    StreamTranslation,
    Translator,
    Treatment,
)
from din_extproc.domain.verdict import Headers, ImmediateResponse, Send, Verdict
from din_extproc.wire import encode
from din_extproc.wire.decode import response_head
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

    head: RequestHead
    body: bytes


class TreatResponse(Struct, frozen=True, gc=False):
    """The answer's head is here: a treatment is wanted at once."""

    head: ResponseHead


class Ignore(Struct, frozen=True, gc=False):
    """Nothing to say yet."""


Command = Reply | Decide | TreatResponse | Ignore

_IGNORE = Ignore()
_HEADERS_GO_ON = Reply(encode.CONTINUE_REQUEST_HEADERS)
_BODY_GOES_ON = Reply(encode.CONTINUE_REQUEST_BODY)
_TRAILERS_GO_ON = Reply(encode.CONTINUE_REQUEST_TRAILERS)
_ANSWER_BODY_GOES_ON = Reply(encode.CONTINUE_RESPONSE_BODY)
_ANSWER_TRAILERS_GO_ON = Reply(encode.CONTINUE_RESPONSE_TRAILERS)
_ANSWER_GOES_ON = Reply(encode.CONTINUE_RESPONSE_HEADERS)


def _encode_reply(reply: Reply) -> "Callable[[Exchange, Any], Command]":
    return lambda _exchange, _event: reply


def _refuse_late_send(_send: Send) -> bytes:
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
    TREATING = 6
    WHOLE = 7
    """The answer's head waits for its body."""
    PIECES = 8
    """The answer's head is through, its body is being translated."""


class _NothingMore:
    """Leaves out what comes."""

    def feed(self, _data: bytes) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""


_NOTHING_MORE = _NothingMore()


class Exchange:
    """One exchange. `receive` takes Envoy's messages, `verdict` the decision that a `Decide` asked for."""

    __slots__ = (
        "_after",
        "_answer",
        "_broken",
        "_ends_at_head",
        "_given",
        "_head",
        "_rewrite",
        "_send",
        "_translator",
        "_wants_response_head",
        "state",
    )

    def __init__(self) -> None:
        self.state = State.OPEN
        self._head: RequestHead | None = None
        self._after: tuple[bytes, ...] = ()
        """Goes out after the verdict: replies to what came while it was made."""
        self._send: Callable[[Send], bytes] = encode.send_at_body
        self._answer = _ANSWER_GOES_ON
        """The reply to the response headers."""
        self._given: Headers = ()
        """The same as headers."""
        self._wants_response_head = False
        """Whether a treatment is wanted of every answer."""
        self._ends_at_head = False
        self._rewrite: Callable[[bytes], Replacement | None] | None = None
        self._translator: Translator | None = None
        self._broken = b""

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
        if isinstance(verdict, ImmediateResponse):
            message = encode.answer(verdict)
            self.state = State.ANSWERED
            return (message,)
        message = self._send(verdict)
        if verdict.response_headers:
            self._given = verdict.response_headers
            self._answer = Reply(encode.response_headers(verdict.response_headers))
        self._wants_response_head = verdict.needs_response_head
        self.state = State.SENT
        return (message, *self._after)

    def treatment(self, treatment: Treatment) -> bytes:
        """The message that carries the treatment that a `TreatResponse` asked for.

        Raises:
            ValueError: it can't be written. Another one may be given.
            ProtocolError: none was asked for.
        """
        if self.state is not State.TREATING:
            raise ProtocolError(f"no treatment is wanted in state {self.state.name}")
        match treatment:
            case PassThrough():
                message = encode.response_headers((*self._given, *treatment.headers)) if treatment.headers else self._answer.message
                self.state = State.ANSWERING
            case Replacement():  # as an answer of our own: a body that is replaced would be waited for all the same
                message = encode.answer(ImmediateResponse(treatment.status, (*self._given, *treatment.headers), treatment.body))
                self.state = State.ANSWERED
            case BufferedTranslation() if self._ends_at_head:
                message = self._replaced(treatment.rewrite(b""))
                self.state = State.ANSWERING
            case BufferedTranslation():
                self._rewrite = treatment.rewrite
                message = encode.response_headers_of_whole(self._given)
                self.state = State.WHOLE
            case StreamTranslation():
                message = encode.response_headers_of_pieces((*self._given, *treatment.headers))
                self._translator, self._broken = treatment.translator, treatment.failure_output
                self.state = State.PIECES
            case _:
                assert_never(treatment)
        return message

    def instead(self, replacement: Replacement | None) -> bytes | None:
        """The message for an answer whose treatment failed; None: there is nothing to be said any more, or nothing to say.

        Of a stream that has begun the rest is left out, and the treatment's own last bytes replace it.

        Raises:
            ValueError: it can't be written.
        """
        if replacement is None:
            return None
        if self.state is State.TREATING:
            self.state = State.ANSWERED
            return encode.answer(ImmediateResponse(replacement.status, (*self._given, *replacement.headers), replacement.body))
        if self.state is State.WHOLE:
            self.state = State.ANSWERING
            return encode.replacement(replacement)
        if self.state is State.PIECES:
            self._translator = _NOTHING_MORE
            return encode.response_piece(self._broken)
        return None

    def _replaced(self, given: Replacement | None) -> bytes:
        """The head of an answer without a body, replaced."""
        if given is None:
            return self._answer.message
        return encode.replacement_at_headers(replace(given, headers=(*self._given, *given.headers)))

    # The steps of the table.

    def _on_open(self, event: RequestHeaders) -> Command:
        if event.end_of_stream:
            self._send = encode.send_at_headers
            return self._decide(event.head, b"")
        self._head = event.head
        self.state = State.HEAD
        return _HEADERS_GO_ON

    def _on_body(self, event: RequestBody) -> Command:
        return self._decide(self._head, event.body)

    def _end_by_trailers(self, _event: RequestTrailers) -> Command:
        """A request without a body that did not say so in its head, which has passed: it can only be answered."""
        self._send = _refuse_late_send
        return self._decide(self._head, b"")

    def _decide(self, head: RequestHead | None, body: bytes) -> Decide:
        assert head is not None  # noqa: S101 - the table asks for a verdict only after a head
        self.state = State.DECIDING
        self._head = None
        return Decide(head, body)

    def _on_second_body(self, _event: RequestBody) -> Command:
        """The end was said before: its work is done once."""
        self._after += (encode.CONTINUE_REQUEST_BODY,)
        return _IGNORE

    def _on_trailers(self, _event: RequestTrailers) -> Command:
        self._after += (encode.CONTINUE_REQUEST_TRAILERS,)
        return _IGNORE

    def _on_answer_start(self, _event: ResponseHeaders) -> Command:
        """A local reply of Envoy, or an immediate response of the sidecar."""
        self.state = State.ANSWERING
        return self._answer

    def _on_node_answer(self, event: ResponseHeaders) -> Command:
        """A node's answer after `Send`; or Envoy's, when it reached none."""
        if event.status in SUCCESS_STATUSES and not self._wants_response_head:
            self.state = State.ANSWERING
            return self._answer
        self._ends_at_head = event.end_of_stream
        self.state = State.TREATING
        return TreatResponse(response_head(event))

    def _on_whole_answer(self, event: ResponseBody) -> Command:
        assert self._rewrite is not None  # noqa: S101 - the state says so
        given = self._rewrite(event.body)
        self._rewrite = None
        self.state = State.ANSWERING
        return _ANSWER_BODY_GOES_ON if given is None else Reply(encode.replacement(given))

    def _on_answer_piece(self, event: ResponseBody) -> Command:
        translator = self._translator
        assert translator is not None  # noqa: S101 - the state says so
        body = translator.feed(event.body) if event.body else b""
        if event.end_of_stream:
            body += translator.end()
            self._translator = None
            self.state = State.ANSWERING
        return Reply(encode.response_piece(body))

    def _end_pieces_by_trailers(self, _event: ResponseTrailers) -> Command:
        """Nothing can be added any more: in STREAMED mode a body ends with its last piece."""
        self._translator = None
        self.state = State.ANSWERING
        return _ANSWER_TRAILERS_GO_ON

    _TABLE: ClassVar[dict[tuple[State, type], Callable[["Exchange", Any], Command]]] = {
        (State.OPEN, RequestHeaders): _on_open,
        (State.HEAD, RequestBody): _on_body,
        (State.HEAD, RequestTrailers): _end_by_trailers,
        (State.DECIDING, RequestBody): _on_second_body,
        (State.DECIDING, RequestTrailers): _on_trailers,
        (State.SENT, RequestBody): _encode_reply(_BODY_GOES_ON),
        (State.SENT, RequestTrailers): _encode_reply(_TRAILERS_GO_ON),
        (State.ANSWERED, RequestBody): _encode_reply(_BODY_GOES_ON),
        (State.ANSWERED, RequestTrailers): _encode_reply(_TRAILERS_GO_ON),
        (State.ANSWERING, RequestBody): _encode_reply(_BODY_GOES_ON),
        (State.ANSWERING, RequestTrailers): _encode_reply(_TRAILERS_GO_ON),
        (State.OPEN, ResponseHeaders): _on_answer_start,
        (State.HEAD, ResponseHeaders): _on_answer_start,
        (State.DECIDING, ResponseHeaders): _on_answer_start,
        (State.SENT, ResponseHeaders): _on_node_answer,
        (State.ANSWERED, ResponseHeaders): _on_answer_start,
        (State.SENT, ResponseBody): _encode_reply(_ANSWER_BODY_GOES_ON),
        (State.SENT, ResponseTrailers): _encode_reply(_ANSWER_TRAILERS_GO_ON),
        (State.WHOLE, RequestBody): _encode_reply(_BODY_GOES_ON),
        (State.WHOLE, RequestTrailers): _encode_reply(_TRAILERS_GO_ON),
        (State.WHOLE, ResponseBody): _on_whole_answer,
        (State.WHOLE, ResponseTrailers): _encode_reply(_ANSWER_TRAILERS_GO_ON),
        (State.PIECES, RequestBody): _encode_reply(_BODY_GOES_ON),
        (State.PIECES, RequestTrailers): _encode_reply(_TRAILERS_GO_ON),
        (State.PIECES, ResponseBody): _on_answer_piece,
        (State.PIECES, ResponseTrailers): _end_pieces_by_trailers,
        (State.ANSWERING, ResponseBody): _encode_reply(_ANSWER_BODY_GOES_ON),
        (State.ANSWERING, ResponseTrailers): _encode_reply(_ANSWER_TRAILERS_GO_ON),
    }

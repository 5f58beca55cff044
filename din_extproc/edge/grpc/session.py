"""One ext_proc stream, whatever carries it: messages in, replies out, and exactly one end.

Rule: whatever goes wrong in a decision, the client gets an answer with a body; only a peer that breaks the protocol loses its stream.
"""

from collections.abc import Coroutine
from typing import Any, Protocol

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import ImmediateResponse, Verdict
from din_extproc.edge.inline_task import InlineTask
from din_extproc.wire.decode import decode
from din_extproc.wire.events import ProtocolError
from din_extproc.wire.exchange import Decide, Exchange, Reply, TreatResponse

INVALID_ARGUMENT = 3
INTERNAL = 13


class StreamSink(Protocol):
    """The sending half of one gRPC stream. Neither verb blocks nor raises; after the stream's end both do nothing."""

    def send(self, message: bytes) -> None:
        """Queue one serialised `ProcessingResponse`."""

    def fail(self, status: int, detail: str) -> None:
        """End the stream with a gRPC status other than OK."""


class RequestHandler(Protocol):
    """What happens to one HTTP exchange."""

    def decide(self, head: RequestHead, body: bytes) -> Coroutine[Any, Any, Verdict]:
        """Where the request goes (an `async def`). Called at most once; cancelled when the stream ends first.

        `body` is b"" when there is none.
        """

    def answered(self, head: ResponseHead) -> Treatment:
        """What is to be done with the answer to a request that was sent on. Asked of errors, and of every one if the verdict wants it."""

    def failed(self, error: BaseException) -> ImmediateResponse:
        """What the client is told when `decide` raised `error`, or when its verdict could not be put on the wire."""

    def mistreated(self, error: Exception) -> Replacement | None:
        """What `answered` said, or what it gave to do it with, raised `error`: what the client gets, if the answer's head is not through.

        None: the answer goes on as it is.
        """

    def ended(self) -> None:
        """The HTTP exchange is over. Called once, always, after `decide` returned or heard its cancellation."""


class HandlerFactory(Protocol):
    """Makes one `RequestHandler` per stream."""

    def begin(self) -> RequestHandler:
        """A stream was opened: one HTTP exchange begins."""


class ExtProcSession:
    """One stream of `ExternalProcessor.Process`. The transport calls `message` for each message and `ended` at the end."""

    __slots__ = ("_deciding", "_exchange", "_flow", "_over", "_sink")

    def __init__(self, sink: StreamSink, conductor: HandlerFactory) -> None:
        self._sink = sink
        self._flow = conductor.begin()
        self._exchange = Exchange()
        self._deciding: InlineTask[Verdict] | None = None
        self._over = False

    def message(self, data: bytes) -> None:
        """Take one serialised `ProcessingRequest`. Never raises for what a peer sent: a broken protocol fails this stream only."""
        if self._over:
            return
        try:
            command = self._exchange.receive(decode(data))
            if type(command) is TreatResponse:
                command = Reply(self._exchange.treatment(self._flow.answered(command.head)))
        except ProtocolError as error:
            self._abort(INVALID_ARGUMENT, str(error))
            return
        except Exception as error:  # noqa: BLE001 - the guard of every treatment: Envoy passes the answer on when we fail
            instead = self._instead(error)
            if instead is None:
                self._abort(INTERNAL, f"the answer could not be treated: {type(error).__name__}")
                return
            command = Reply(instead)
        if type(command) is Reply:
            self._sink.send(command.message)
        elif type(command) is Decide:
            self._deciding = InlineTask(self._flow.decide(command.head, command.body), self._decided, self._failed)

    def ended(self, *, cancelled: bool) -> None:  # noqa: ARG002 - it is over either way
        """The stream is over: the peer closed its half (False), or reset it, or its connection is gone (True). Further calls do nothing."""
        if self._over:
            return
        self._over = True
        deciding, self._deciding = self._deciding, None  # they know each other: left alone, only a collection would free them
        if deciding is not None:
            deciding.cancel()
        self._flow.ended()

    def _decided(self, verdict: Verdict) -> None:
        if self._over:
            return
        self._deciding = None
        try:
            messages = self._exchange.verdict(verdict)
        except ValueError as error:
            self._failed(error)
            return
        for message in messages:
            self._sink.send(message)

    def _failed(self, error: BaseException) -> None:
        if self._over:
            return
        try:
            messages = self._exchange.verdict(self._flow.failed(error))
        except Exception as second:  # noqa: BLE001 - the last guard: a gRPC status is all that is left to say
            self._abort(INTERNAL, f"no answer could be made: {type(second).__name__}")
            return
        for message in messages:
            self._sink.send(message)

    def _instead(self, error: Exception) -> bytes | None:
        try:
            return self._exchange.instead(self._flow.mistreated(error))
        except Exception:  # noqa: BLE001 - the last guard: the answer goes on as it is
            return None

    def _abort(self, status: int, detail: str) -> None:
        self._sink.fail(status, detail)
        self.ended(cancelled=True)

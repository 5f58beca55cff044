"""`envoy.service.ext_proc.v3.ExternalProcessor`: messages in, replies out, and exactly one end, whichever transport carries them."""

from collections.abc import Mapping
from typing import Protocol

from din_extproc.domain.response import Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import Verdict
from din_extproc.edge.grpc.services import INVALID_ARGUMENT, OpenCall, ServerCall
from din_extproc.edge.grpc.verdict_call import INTERNAL, VerdictCall, VerdictHandler, VerdictService
from din_extproc.wire.decode import decode
from din_extproc.wire.events import ProtocolError
from din_extproc.wire.exchange import Decide, Exchange, Reply, TreatResponse


class RequestHandler(VerdictHandler, Protocol):
    """The handler of one HTTP exchange."""

    def on_response(self, head: ResponseHead) -> Treatment:
        """Return what is done with the response to a request that was sent on.

        Asked of errors, and of every response if the verdict wants it.
        """

    def on_response_failure(self, error: Exception) -> Replacement | None:
        """Return what the client gets when `on_response`, or its treatment, raised `error` before the response's head left.

        None: the response goes on as it is.
        """

    def ended(self, *, cut: bool = True) -> None:
        """The HTTP exchange is over. Called once, always, after `decide` returned or was cancelled.

        `cut`: the connection to Envoy is gone, or the stream failed here, so an entry of the access log may not follow. An Envoy that
        resets the stream is alive and reports the exchange: so it ends every stream whose response has no trailers.
        """


class ExtProcService(VerdictService[RequestHandler]):
    """Serves `Process`: each stream is an `ExtProcStream`."""

    name = "envoy.service.ext_proc.v3.ExternalProcessor"

    def methods(self) -> Mapping[str, OpenCall]:
        """Return the one method."""
        return {"Process": lambda call: ExtProcStream(call, self)}


class ExtProcStream(VerdictCall[RequestHandler]):
    """One stream, which is one HTTP exchange."""

    __slots__ = ("_exchange",)

    def __init__(self, call: ServerCall, service: VerdictService[RequestHandler]) -> None:
        super().__init__(call, service)
        self._exchange = Exchange()

    def message(self, data: bytes) -> None:
        """Take one serialised `ProcessingRequest`. Never raises for what a peer sent: a broken protocol fails this stream only."""
        if self._over:
            return
        try:
            command = self._exchange.receive(decode(data))
            if type(command) is TreatResponse:
                command = Reply(self._exchange.treatment(self._handler.on_response(command.head)))
        except ProtocolError as error:
            self._abort(INVALID_ARGUMENT, str(error))
            return
        except Exception as error:  # noqa: BLE001 - the guard of every treatment: Envoy passes the answer on when we fail
            instead = self._replace_response(error)
            if instead is None:
                self._abort(INTERNAL, f"the answer could not be treated: {type(error).__name__}")
                return
            command = Reply(instead)
        if type(command) is Reply:
            self._call.send(command.message)
        elif type(command) is Decide:
            self._decide(command.head, command.body)

    def ended(self, *, cancelled: bool) -> None:
        """The stream is over: the peer closed its half (False), or reset it, or its connection is gone (True). Further calls do nothing."""
        if self._over:
            return
        super()._close()
        self._handler.ended(cut=cancelled and self._call.lost)
        if not cancelled:
            self._call.finish()

    def _send(self, verdict: Verdict) -> None:
        for message in self._exchange.verdict(verdict):
            self._call.send(message)

    def _close(self) -> None:
        super()._close()
        self._handler.ended()

    def _replace_response(self, error: Exception) -> bytes | None:
        try:
            return self._exchange.instead(self._handler.on_response_failure(error))
        except Exception:  # noqa: BLE001 - the last guard: the answer goes on as it is
            return None

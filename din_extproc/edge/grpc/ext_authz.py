"""`envoy.service.auth.v3.Authorization`: one question, one answer, whichever transport carries them."""

from collections.abc import Mapping

from din_extproc.domain.verdict import Verdict
from din_extproc.edge.grpc.services import INVALID_ARGUMENT, OpenCall
from din_extproc.edge.grpc.verdict_call import VerdictCall, VerdictHandler, VerdictService
from din_extproc.wire.check import decode_check, encode_check
from din_extproc.wire.events import ProtocolError


class ExtAuthzService(VerdictService[VerdictHandler]):
    """Serves `Check`: each call is an `ExtAuthzCall`."""

    name = "envoy.service.auth.v3.Authorization"

    def methods(self) -> Mapping[str, OpenCall]:
        """Return the one method."""
        return {"Check": lambda call: ExtAuthzCall(call, self)}


class ExtAuthzCall(VerdictCall[VerdictHandler]):
    """One check."""

    __slots__ = ()

    def message(self, data: bytes) -> None:
        """Take a serialised `CheckRequest`; a second one is ignored."""
        if self._over or self._deciding is not None:
            return
        try:
            head, body = decode_check(data)
        except ProtocolError as error:
            self._abort(INVALID_ARGUMENT, str(error))
            return
        self._decide(head, body)

    def ended(self, *, cancelled: bool) -> None:
        """The proxy has asked (False), or does not wait for the answer any more (True)."""
        if cancelled and not self._over:
            self._close()

    def _send(self, verdict: Verdict) -> None:
        self._call.send(encode_check(verdict))
        self._call.finish()
        self._close()

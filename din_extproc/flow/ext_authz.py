"""ext_authz: authentication, model and limits as for ext_proc, for a proxy that chooses the node itself.

Rule: only the access log tells that such a request has ended. Its settlement gives everything back; until then its slot is renewed.
"""

from din_extproc.domain.verdict import Refusal, Verdict
from din_extproc.flow.dispatch import make_pass_verdict, make_permit_verdict
from din_extproc.flow.pipeline import decide_permit
from din_extproc.flow.request import ExchangeHandler, WorkerContext
from din_extproc.intent.paths import EndpointKind
from din_extproc.intent.read import ParsedRequest


class ExtAuthzHandlerFactory:
    """Makes one handler per check.

    Args:
        context: What the requests of this worker share.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.permits: dict[str, tuple[str, float]] = {}
        """Tenant, and since when (the monotonic clock), of requests that were permitted and may not have ended."""

    def create_handler(self) -> "ExtAuthzHandler":
        """A request is to be checked."""
        return ExtAuthzHandler(self._context, self.permits)


class ExtAuthzHandler(ExchangeHandler):
    """One check."""

    __slots__ = ("_permits",)
    edits_body = False
    entry = "ext_authz"

    def __init__(self, context: WorkerContext, permits: dict[str, tuple[str, float]]) -> None:
        super().__init__(context)
        self._permits = permits

    async def _verdict(self, parsed: ParsedRequest, began: float, wall: float) -> Verdict | Refusal:
        context, who = self._context, self.who
        assert who is not None  # noqa: S101 - `accept` has authenticated the tenant of every body
        permitted = await decide_permit(context, self, who, parsed.intent, began=began, wall=wall)
        if isinstance(permitted, Refusal):
            return permitted
        self._permits[self.request_id] = self.account, began
        return make_permit_verdict(permitted, self, context.clock.monotonic() - began)

    async def _without_body(self, endpoint: EndpointKind | None) -> Verdict:  # noqa: ARG002 - the proxy answers either
        return make_pass_verdict(self)

    def _release_reservation(self) -> bool:
        return self._permits.pop(self.request_id, None) is not None

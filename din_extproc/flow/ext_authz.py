"""The conductor of ext_authz: key, model and limits as ever, and somebody else's proxy chooses the node.

Rule: nothing tells when such a request ends but the access log, whose settlement gives all of it back; until then its slot is renewed.
"""

import msgspec

from din_extproc.admit.headers import rate_limit_headers
from din_extproc.domain.request import Intent, Operation, RequestHead
from din_extproc.domain.tenant import OnSensitive, Tenant
from din_extproc.domain.usage import Labels
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode, Send, Verdict
from din_extproc.flow.request import ExtProcHandler, WorkerContext, missed
from din_extproc.flow.view import ScreeningPolicy
from din_extproc.intent.paths import find_endpoint_kind

_SECRETS = ("authorization", "x-api-key")
_as_json = msgspec.json.Encoder().encode


class ExtAuthzHandlerFactory:
    """Makes one flow per check.

    Args:
        desk: What the requests of this worker share.
    """

    def __init__(self, desk: WorkerContext) -> None:
        self._desk = desk
        self.permits: dict[str, tuple[str, float]] = {}
        """Tenant, and since when (the monotonic clock), of requests that were permitted and may not have ended."""

    def begin(self) -> "ExtAuthzHandler":
        """A request is to be checked."""
        return ExtAuthzHandler(self._desk, self.permits)


class ExtAuthzHandler(ExtProcHandler):
    """One check."""

    __slots__ = ("_permits",)

    def __init__(self, desk: WorkerContext, permits: dict[str, tuple[str, float]]) -> None:
        super().__init__(desk)
        self._permits = permits

    async def _verdict(self, head: RequestHead, body: bytes, began: float) -> Verdict | Refusal:
        desk, view = self._desk, self._desk.view
        if head.method == "OPTIONS":
            return self._passed((), {})
        place = find_endpoint_kind(head.method, head.path)
        if isinstance(place, Refusal):
            return place
        wall = desk.clock.wall()
        who = view.keys.authenticate(head.header("authorization"), head.header("x-api-key"), wall, desk.revoked)
        if isinstance(who, Refusal):
            return who
        self._who = who
        if place.operation is Operation.MODELS:
            return self._passed((), {})
        reading = self._read(head, body, who)
        if isinstance(reading, Refusal):
            return reading
        intent = self._intent = reading.intent
        model = self._model(intent, who.tenant)
        if isinstance(model, Refusal):
            return model
        claim = self._claim(intent, who, model)
        admitted = await self._admitted(claim, intent, who.tenant)
        if isinstance(admitted, Refusal):
            return admitted
        self._permits[self._request_id] = who.tenant.id, began
        labels = Labels(
            request_id=self._request_id,
            trace_id=self._trace_id,
            tenant=who.tenant.id,
            key_id=who.key.id,
            model=model,
            alias=intent.model,
            reserved_tokens=claim.tokens,
            prompt_estimate=intent.estimate.tokens,
            features=intent.estimate.features,
            fixed=intent.estimate.fixed,
            stream=intent.stream,
            would_refuse=missed(admitted),
            operation=intent.operation.value,
            sensitive=reading.sensitive,
        )
        return self._passed(rate_limit_headers(admitted.status), {"request_id": self._request_id, "labels": _as_json(labels).decode()})

    def _screening(self, tenant: str) -> ScreeningPolicy | None:
        """A body can't be changed by whoever is only asked: what would be masked is refused."""
        screening = super()._screening(tenant)
        if screening is None or screening.policy is not OnSensitive.MASK:
            return screening
        return ScreeningPolicy(OnSensitive.BLOCK, screening.screen)

    def _model(self, intent: Intent, tenant: Tenant) -> str | Refusal:
        """The physical model; where no pool serves it, the name that was asked for."""
        name = intent.model.partition("@")[0]
        model = self._desk.gauges.model_of(intent.model) or name
        if tenant.may_use(name) or tenant.may_use(model):
            return model
        return Refusal(RefusalCode.MODEL_NOT_ALLOWED, "The key may not use this model.", param="model")

    def _passed(self, standing: Headers, metadata: dict[str, str | float | bool]) -> Send:
        """Go on, without the key. Cluster and node are not ours to choose."""
        trace = ("x-din-trace-id", self._trace_id)
        return Send("", (), (trace,), (trace, *standing), metadata, remove_headers=_SECRETS)

"""The conductor of the request half: intent -> key -> route -> target -> admission -> node -> verdict.

Invariant: everything a request acquires (slots, node load) is held by one `_GrantedRequest` and released exactly once.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit import headers as limit_headers
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, Denied, Granted, Ledger, LimitsUnavailable
from din_extproc.admit.queue import is_queueable
from din_extproc.admit.reservation import OutputHistory
from din_extproc.audit.records import AdmissionRecord
from din_extproc.domain.request import Intent, Operation, RequestHead
from din_extproc.domain.response import PASS, SUCCESS_STATUSES, Replacement, ResponseHead, Treatment
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.verdict import ImmediateResponse, Refusal, Send, Verdict
from din_extproc.flow import answers, failures
from din_extproc.flow.audit_records import admission
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.dispatch import Decision, dispatch, refused_metadata
from din_extproc.flow.double_check import CheckSampler
from din_extproc.flow.node_order import NodeRequest, order
from din_extproc.flow.node_selector import NodeSelector, PlacementTarget, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.queueing import QueueFull, RequestQueue
from din_extproc.flow.screening import screened
from din_extproc.flow.timeouts import remaining
from din_extproc.flow.trace import Sampler, SpanContext, TraceIds, kept
from din_extproc.flow.translation import Translation, unreadable
from din_extproc.flow.view import DecisionView, ScreeningPolicy, claim_for, facts
from din_extproc.intent.boundary import needs_exact
from din_extproc.intent.estimate import estimate_tokens
from din_extproc.intent.paths import find_endpoint_kind
from din_extproc.intent.prefix import hash_prefix
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.route.table import Routed
from din_extproc.schedule.load import NodeLease
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.southbound.dialect import AnswerContext

_HOUR_S = 3600
_NO_HEAD = RequestHead(method="", path="", headers={})


class Clock(Protocol):
    """Both are read once or twice per request."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that only grow."""


class DecisionObserver(Protocol):
    """Told what happens, by the conductors; the stages themselves say nothing."""

    def decided(self, seconds: float, refused: str) -> None:
        """A verdict took so long. `refused`: the error code, "" when the request was sent on."""

    def failed(self, error: BaseException, trace_id: str) -> None:
        """A fault of ours; the client got `internal_error`, or an answer as the node gave it."""


class AdmissionGate(Protocol):
    """Where requests stand while none may be taken."""

    def passed(self) -> Coroutine[Any, Any, Refusal | None]:
        """Wait until requests are taken again (an `async def`); a refusal when that takes too long."""


class WorkerContext(Struct):
    """Everything that the requests of one worker share."""

    view: DecisionView
    ledger: Ledger
    placer: NodeSelector
    gauges: TokenCalibrators
    outputs: OutputHistory
    ids: TraceIds
    clock: Clock
    watcher: DecisionObserver
    start: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine that nobody waits for."""
    lease_ms: int
    """How long a request keeps its slots without being heard of."""
    waiting: RequestQueue
    """Where requests wait for tokens and slots."""
    revoked: frozenset[str] = frozenset()
    """Ids of keys that are valid no more, whatever the view says."""
    live: dict[str, str] = {}
    """Request id -> tenant, of the requests that hold slots: to be renewed while they run."""
    gate: AdmissionGate | None = None
    """None: open."""
    checks: CheckSampler | None = None
    """None: no exchange leaves spans."""
    sampler: Sampler | None = None
    """Takes some requests to be asked once more of nodes that should agree; None: none."""
    admissions: list[AdmissionRecord] | None = None
    """Requests that were sent on since this was last emptied; None: nobody records them."""

    def begin(self) -> "ExtProcHandler":
        """A stream was opened: one HTTP exchange begins."""
        return ExtProcHandler(self)

    def change(self, view: DecisionView, members: PoolMembership) -> None:
        """Use another view, and the nodes of its pools, from the next request on."""
        self.view = view
        self.gauges.model_of = view.table.preferred_model
        self.gauges.know_media({model: known.media_tokens for model, known in view.models.items()})
        self.placer.forget(members)


class _GrantedRequest(Struct, frozen=True, gc=False):
    """What a request that was sent on has taken."""

    tenant: str
    taken: NodeLease
    engine: str
    """Of the pool that it goes to."""
    translated: NodeRequest | None
    """What the node was asked, when its answer is to be translated; without the body, which went with the verdict."""


class ExtProcHandler:
    """One HTTP exchange, from its first byte to its last."""

    __slots__ = ("_desk", "_head", "_held", "_intent", "_request_id", "_span", "_trace_id", "_waited_s", "_who")

    def __init__(self, desk: WorkerContext) -> None:
        self._desk = desk
        self._head = _NO_HEAD
        self._held: _GrantedRequest | None = None
        self._intent: Intent | None = None
        self._request_id = ""
        self._trace_id = ""
        self._who: Authenticated | None = None
        self._span: SpanContext | None = None
        self._waited_s = 0.0

    async def decide(self, head: RequestHead, body: bytes) -> Verdict:
        """The verdict on a whole request."""
        desk = self._desk
        began = desk.clock.monotonic()
        self._name(head)
        shut = None if desk.gate is None else await desk.gate.passed()
        verdict = shut or await self._verdict(head, body, began)
        if isinstance(verdict, Refusal):
            verdict = answers.refusal(verdict, head, self._trace_id, whose=self._whose())
        refused = "" if type(verdict) is Send else str(verdict.metadata.get("refusal", ""))
        desk.watcher.decided(desk.clock.monotonic() - began, refused)
        return verdict

    def failed(self, error: BaseException) -> ImmediateResponse:
        """What the client is told of a fault."""
        self._desk.watcher.failed(error, self._trace_id)
        held = self._let_go()
        if held is not None:  # it was granted and will not be sent
            self._desk.start(self._refund(held.tenant))
        return answers.internal_error(self._head, self._trace_id)

    def answered(self, head: ResponseHead) -> Treatment:
        """A node's error is told in the gateway's words, an answer in its engine's own words in OpenAI's; any other goes on as it is."""
        if self._held is None:
            return PASS
        asked, wall = self._held.translated, self._desk.clock.wall()
        if asked is None or asked.dialect is None or head.status not in SUCCESS_STATUSES:
            return failures.treatment(self._held.engine, head, self._head, self._trace_id, wall)
        named = AnswerContext(asked.operation, self._request_id, int(wall), asked.model, asked.fields)
        return Translation(asked.dialect, named, asked.stream, self._head, self._trace_id).treat(head)

    def mistreated(self, error: Exception) -> Replacement:
        """Nobody gets a node's own words for a fault of ours."""
        self._desk.watcher.failed(error, self._trace_id)
        return unreadable(self._head, self._trace_id)

    def ended(self) -> None:
        """The exchange is over: the slot is free, the access log tells the rest."""
        held = self._let_go()
        if held is not None:
            self._desk.start(self._release(held.tenant))

    def _name(self, head: RequestHead) -> None:
        """Every exchange has an id of its own; the trace id is the client's, when it has a sound one."""
        self._head = head
        self._request_id = self._desk.ids.make(self._desk.clock.wall())
        given = head.header("x-din-trace-id")
        self._trace_id = given if kept(given) else self._request_id
        if self._desk.sampler is not None:
            self._span = self._desk.sampler.context(self._request_id, self._trace_id, head.header("traceparent"))

    def _whose(self) -> Mapping[str, str]:
        """What the accounts are told of a refused request, as far as that is known."""
        known = {} if self._who is None else refused_metadata(self._who, self._intent)
        return known if self._span is None else {**known, "span": self._span.text}

    async def _verdict(self, head: RequestHead, body: bytes, began: float) -> Verdict | Refusal:
        desk, view = self._desk, self._desk.view
        if head.method == "OPTIONS":
            return answers.options(self._trace_id)
        place = find_endpoint_kind(head.method, head.path)
        if isinstance(place, Refusal):
            return place
        wall = desk.clock.wall()
        who = view.keys.authenticate(head.header("authorization"), head.header("x-api-key"), wall, desk.revoked)
        if isinstance(who, Refusal):
            return who
        self._who = who
        if place.operation is Operation.MODELS:
            return answers.models(view.table.models_for(who.tenant), place.model, self._trace_id)
        reading = self._read(head, body, who)
        if isinstance(reading, Refusal):
            return reading
        intent = self._intent = await self._counted(reading)
        routed = view.table.route(intent, who.tenant, head, int(wall) // _HOUR_S % 24, desk.placer.members.versions)
        if isinstance(routed, Refusal):
            return routed
        aimed = self._aimed(routed, intent, reading, began)
        if isinstance(aimed, Refusal):
            return aimed
        target, intent, asked = aimed
        claim = self._claim(intent, who, target.pool.model)
        members = desk.placer.members
        admitted = await self._admitted(claim, intent, who.tenant)
        if isinstance(admitted, Refusal):
            return admitted
        if intent.timeout_ms is not None or desk.placer.members is not members:
            left = self._left(intent, reading, routed, target, asked, began)
            if isinstance(left, Refusal):
                desk.start(self._refund(who.tenant.id))
                return left
            intent, target, asked = left
        picked = desk.placer.pick(target, self._ask(intent, reading, claim.tokens, began))
        if isinstance(picked, Refusal):
            desk.start(self._refund(who.tenant.id))
            return picked
        translated = None if asked.dialect is None else replace(asked, body=b"")
        self._held = _GrantedRequest(who.tenant.id, picked.taken, target.pool.engine, translated)
        desk.live[self._request_id] = who.tenant.id
        self._who = self._intent = None  # what is open for minutes keeps no more than it needs
        trace, key, standing, over = self._trace_id, who.key.id, admitted.status, missed(admitted)
        took = desk.clock.monotonic() - began, self._waited_s
        granted = Decision(trace, key, reading, intent, asked, routed, target, picked, claim, standing, over, self._span, *took)
        return self._sent(granted, wall, head)

    def _sent(self, granted: Decision, wall: float, head: RequestHead) -> Send:
        if self._desk.admissions is not None:
            self._desk.admissions.append(admission(granted, wall))
        if self._desk.checks is not None:
            self._desk.checks.offer(granted, wall)
        return dispatch(granted, head)

    def _read(self, head: RequestHead, body: bytes, who: Authenticated) -> ParsedRequest | Refusal:
        """The request, and its prompt held against the tenant's policy for sensitive data, if it has one."""
        desk = self._desk
        reading = parse_request(head, body, desk.gauges.named, desk.view.body_limit)
        screening = self._screening(who.tenant.id)
        if screening is None or isinstance(reading, Refusal):
            return reading
        return screened(reading, screening, head, desk.gauges.named)

    def _screening(self, tenant: str) -> ScreeningPolicy | None:
        """What is done about sensitive data; None: nobody looks."""
        return self._desk.view.screenings.get(tenant)

    def _left(
        self, intent: Intent, reading: ParsedRequest, routed: Routed, target: PlacementTarget, asked: NodeRequest, began: float
    ) -> tuple[Intent, PlacementTarget, NodeRequest] | Refusal:
        """What is left, after the limits were asked, of the client's patience and of the nodes."""
        desk = self._desk
        now = desk.clock.monotonic()
        again = desk.placer.target(routed, self._size(intent, target.pool.model), now)
        if isinstance(again, Refusal):
            return again
        left = remaining(intent, now - began)
        if isinstance(left, Refusal):
            return left
        if again.pool.model != target.pool.model:
            return left, target, asked
        if again.pool is not target.pool:
            other = order(reading, intent, again.pool)
            return other if isinstance(other, Refusal) else (left, again, other)
        return left, again, asked

    def _aimed(
        self, routed: Routed, intent: Intent, reading: ParsedRequest, began: float
    ) -> tuple[PlacementTarget, Intent, NodeRequest] | Refusal:
        """Where it can go, the intent by the measure of the model there, and what the node will be asked."""
        target = self._desk.placer.target(routed, self._size(intent, routed.model), began)
        if isinstance(target, Refusal):
            return target
        intent = self._reweighed(intent, reading, target.pool.model)
        asked = order(reading, intent, target.pool)
        return asked if isinstance(asked, Refusal) else (target, intent, asked)

    async def _counted(self, reading: ParsedRequest) -> Intent:
        """The intent, with an exact count of its prompt where the estimate could decide wrongly and the tokenizer is at hand."""
        intent = reading.intent
        model = self._desk.gauges.model_of(intent.model)
        known = facts(self._desk.view, model or "")
        if known.counter is None or not known.boundaries:
            return intent
        gauge = self._desk.gauges.of(model or "")
        output = intent.output_each or 1
        boundaries = (*known.boundaries, *(boundary - output for boundary in known.boundaries))
        if not needs_exact(intent.estimate, gauge.calibration.band, boundaries):
            return intent
        return replace(intent, estimate=await known.counter.count(reading.prompt, intent.estimate, gauge))

    def _size(self, intent: Intent, model: str) -> RequestSize:
        """How long the request is, and how long at the very least."""
        return RequestSize.of(intent, self._desk.gauges.of(model).calibration.band)

    def _reweighed(self, intent: Intent, reading: ParsedRequest, model: str) -> Intent:
        """The intent by the gauge of the model that it goes to, when that is not the one it was read for."""
        gauges = self._desk.gauges
        if intent.estimate.exact or gauges.of(model) is gauges.named(intent.model):
            return intent
        return replace(intent, estimate=estimate_tokens(reading.prompt, gauges.of(model)))

    def _claim(self, intent: Intent, who: Authenticated, model: str) -> Claim:
        desk = self._desk
        return claim_for(desk.view, self._request_id, intent, who, model, desk.outputs.expected_tokens(who.tenant.id, model), desk.lease_ms)

    def _ask(self, intent: Intent, reading: ParsedRequest, tokens: int, now: float) -> PlacementRequest:
        """What is asked of a node. `tokens`: prompt and likely output."""
        prompt_tokens = intent.prompt_tokens
        return PlacementRequest(prompt_tokens, max(0, tokens - prompt_tokens), now, hash(self._request_id), hash_prefix(reading.prompt))

    async def _admitted(self, claim: Claim, intent: Intent, tenant: Tenant) -> Granted | Refusal:
        desk, patience_ms = self._desk, tenant.queueing.max_wait_ms
        try:
            if patience_ms and desk.waiting and desk.waiting.is_behind(claim, tenant.priority_of(intent.priority)):
                reply = await self._waited(claim, intent, tenant)
            else:
                reply = await desk.ledger.reserve(claim)
                if patience_ms and isinstance(reply, Denied) and is_queueable(reply):
                    reply = await self._waited(claim, intent, tenant)
        except LimitsUnavailable:
            return limit_headers.refuse_limits_unavailable()
        if isinstance(reply, QueueFull):
            return limit_headers.refuse_queue_full(reply.place_in_ms)
        return limit_headers.refuse_denied(reply, claim) if isinstance(reply, Denied) else reply

    async def _waited(self, claim: Claim, intent: Intent, tenant: Tenant) -> Granted | Denied | QueueFull:
        """The answer after a wait, no longer than tenant and client allow."""
        patience_ms = tenant.queueing.max_wait_ms if intent.timeout_ms is None else min(tenant.queueing.max_wait_ms, intent.timeout_ms)
        joined = self._desk.clock.monotonic()
        reply = await self._desk.waiting.wait(claim, tenant.priority_of(intent.priority), tenant.queueing, patience_ms)
        self._waited_s = self._desk.clock.monotonic() - joined
        return reply

    def _let_go(self) -> _GrantedRequest | None:
        """Give back what was taken here; who holds it still has to tell the ledger."""
        held, self._held = self._held, None
        if held is not None:
            self._desk.placer.free(held.taken)
            self._desk.live.pop(self._request_id, None)
        return held

    async def _release(self, tenant: str) -> None:
        try:
            await self._desk.ledger.release(tenant, self._request_id)
        except LimitsUnavailable:
            return  # the lease expires by itself

    async def _refund(self, tenant: str) -> None:
        try:
            await self._desk.ledger.settle(tenant, self._request_id, 0)
        except LimitsUnavailable:
            return  # lease and bucket recover by themselves


def missed(admitted: Granted) -> str:
    """The limit that would have refused it, were it enforced."""
    return "" if admitted.shadow_denial is None else admitted.shadow_denial.dimension

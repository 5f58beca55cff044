"""The request handler of one worker, and the handler of one ext_proc exchange.

Invariant: everything a request acquires (slots, node load) is held by one `_GrantedRequest` and released exactly once.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from din_extproc.admit.headers import anthropic_rate_limit_headers, refuse_limits_unavailable
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Ledger, LimitsUnavailable
from din_extproc.audit.records import AdmissionRecord
from din_extproc.domain.node import ATTEMPT_POOL, DEGRADED
from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, SUCCESS_STATUSES, Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import ImmediateResponse, Refusal, Send, Verdict
from din_extproc.flow import answers, failures
from din_extproc.flow.attempt import moved_request, translate_attempt
from din_extproc.flow.audit_records import make_admission_record
from din_extproc.flow.decision import DecisionContext, PendingRequest
from din_extproc.flow.dispatch import dispatch, make_refusal_metadata
from din_extproc.flow.double_check import CheckSampler
from din_extproc.flow.node_request import NodeRequest
from din_extproc.flow.pipeline import decide, read_endpoint, refund
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.trace import Sampler, TraceIds, is_trace_id
from din_extproc.flow.translation import Translation, build_unreadable_response
from din_extproc.flow.view import DecisionView
from din_extproc.intent.paths import EndpointKind
from din_extproc.intent.read import ParsedRequest
from din_extproc.schedule.load import NodeLease
from din_extproc.southbound.dialect import AnswerContext


class DecisionObserver(Protocol):
    """Observes the decisions of handlers; the stages of the pipeline report nothing."""

    def on_decision(self, seconds: float, refused: str) -> None:
        """A verdict took so long. `refused`: the error code, "" when the request was sent on."""

    def on_fault(self, error: BaseException, trace_id: str) -> None:
        """A fault of ours; the client got `internal_error`, or an answer as the node gave it."""


class AdmissionGate(Protocol):
    """Gate at which requests wait while the worker accepts none."""

    def wait_until_open(self) -> Coroutine[Any, Any, Refusal | None]:
        """Wait until requests are taken again (an `async def`); a refusal when that takes too long."""


class UsageReports(Protocol):
    """Reports that tenants may read about themselves."""

    async def report(self, who: Authenticated, account: str, days: int) -> object:
        """Return limits, budgets and usage of the last days as plain values. May raise `LimitsUnavailable`."""


class WorkerContext(DecisionContext, kw_only=True):
    """Everything that the requests of one worker share."""

    ledger: Ledger
    ids: TraceIds
    observer: DecisionObserver
    live: dict[str, str] = field(default_factory=dict)
    """Request id -> tenant, of the requests that hold slots: to be renewed while they run."""
    gate: AdmissionGate | None = None
    """None: open."""
    checks: CheckSampler | None = None
    """None: no exchange leaves spans."""
    sampler: Sampler | None = None
    """Samples requests that are sent again to nodes that should agree; None: none are."""
    admissions: list[AdmissionRecord] | None = None
    """Requests that were sent on since this was last emptied; None: they are not recorded."""
    reports: UsageReports | None = None
    """None: `GET /v1/usage` is not served."""
    started: int = 0
    """When this worker began, in seconds since the epoch: what the model list calls `created`."""

    def create_handler(self) -> "ExtProcHandler":
        """Return the handler of a new stream, which carries one HTTP exchange."""
        return ExtProcHandler(self)

    def reload(self, view: DecisionView, members: PoolMembership) -> None:
        """Use another view, and the nodes of its pools, from the next request on."""
        self.view = view
        self.calibrators.model_of = view.table.preferred_model
        self.calibrators.set_media_tokens({model: known.media_tokens for model, known in view.models.items()})
        self.selector.reset(members)


class _GrantedRequest(Struct, frozen=True, gc=False):
    """The resources that a forwarded request holds."""

    lease: NodeLease
    engine: str
    """Of the pool that it goes to."""
    releases: bool
    """Its slots are scarce: they are released at its end, not with its settlement."""
    translated: NodeRequest | None
    """The request to the node, if its answer is to be translated; without the body, which left with the verdict."""
    moved: NodeRequest | None = None
    """Likewise for a node of the fallback pool."""


class ExchangeHandler(PendingRequest, ABC):
    """One HTTP exchange, from its first byte to its last: the common part of ext_proc and ext_authz."""

    __slots__ = ("_context",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        self._context = context

    async def decide(self, head: RequestHead, body: bytes) -> Verdict:
        """The verdict on a whole request."""
        context = self._context
        if head.path in context.view.health_paths:
            return answers.HEALTHY
        began, wall = context.clock.monotonic(), context.clock.wall()
        self._identify(head, wall)
        closed = None if context.gate is None else await context.gate.wait_until_open()
        accepted = closed or read_endpoint(context, self, body, wall)
        verdict: Verdict | Refusal
        if isinstance(accepted, ParsedRequest):
            verdict = await self._verdict(accepted, began, wall)
        else:
            verdict = accepted if isinstance(accepted, Refusal) else await self._without_body(accepted)
        if isinstance(verdict, Refusal):
            verdict = answers.build_refusal_response(verdict, head, self.trace_id, metadata=make_refusal_metadata(self))
        if answers.is_anthropic_path(head.path):
            verdict = _with_anthropic_limits(verdict, wall)
        refused = "" if type(verdict) is Send else str(verdict.metadata.get("refusal", ""))
        context.observer.on_decision(context.clock.monotonic() - began, refused)
        return verdict

    @abstractmethod
    async def _verdict(self, parsed: ParsedRequest, began: float, wall: float) -> Verdict | Refusal:
        """The verdict on a request that was read."""

    @abstractmethod
    async def _without_body(self, endpoint: EndpointKind | None) -> Verdict | Refusal:
        """The answer to a request for the model list or for usage, or to OPTIONS (None)."""

    def failed(self, error: BaseException) -> ImmediateResponse:
        """Return what the client gets for a fault of ours. What the request has reserved is refunded."""
        self._context.observer.on_fault(error, self.trace_id)
        if self._release_reservation():  # it was granted and will not be sent
            self._context.start(refund(self._context.ledger, self.account, self.request_id))
        return answers.build_internal_error(self.head, self.trace_id)

    @abstractmethod
    def _release_reservation(self) -> bool:
        """Give back what the request has taken in this process. True: it holds a reservation, which the caller gives back."""

    def _identify(self, head: RequestHead, wall: float) -> None:
        """Give the exchange an id of its own; the trace id is the client's, when it has a sound one."""
        self.head = head
        request_id = self.request_id = self._context.ids.make(wall)
        self.chance = hash(request_id)
        given = head.header("x-din-trace-id")
        self.trace_id = given if is_trace_id(given) else request_id
        if self._context.sampler is not None:
            self.span = self._context.sampler.context(request_id, self.trace_id, head.header("traceparent"))


def _with_anthropic_limits(verdict: Verdict, wall: float) -> Verdict:
    """The verdict with its rate-limit headers under Anthropic's names, too."""
    if isinstance(verdict, Send):
        headers = verdict.response_headers
        return replace(verdict, response_headers=(*headers, *anthropic_rate_limit_headers(headers, wall)))
    return replace(verdict, headers=(*verdict.headers, *anthropic_rate_limit_headers(verdict.headers, wall)))


class ExtProcHandler(ExchangeHandler):
    """One HTTP exchange whose node is chosen here."""

    __slots__ = ("_held",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._held: _GrantedRequest | None = None

    def decide(self, head: RequestHead, body: bytes) -> Coroutine[Any, Any, Verdict]:
        """The verdict on a whole request, or on one of its attempts."""
        return self._attempt(head, body) if ATTEMPT_POOL in head.headers else super().decide(head, body)

    async def _attempt(self, head: RequestHead, body: bytes) -> Verdict:
        self.head, self.trace_id = head, head.header("x-din-trace-id")
        translated = translate_attempt(self._context, head, body)
        return answers.build_refusal_response(translated, head, self.trace_id) if isinstance(translated, Refusal) else translated

    async def _verdict(self, parsed: ParsedRequest, began: float, wall: float) -> Verdict | Refusal:
        context, who = self._context, self.who
        assert who is not None  # noqa: S101 - `accept` has authenticated the tenant of every body
        decision = await decide(context, self, who, parsed.intent, began=began, wall=wall)
        if isinstance(decision, Refusal):
            return decision
        order, parsed = decision.node_request, self.parsed or parsed
        translated = None if order.dialect is None else replace(order, body=b"")
        self._held = _GrantedRequest(
            decision.selection.lease, decision.target.pool.engine, not decision.roomy, translated, moved_request(decision, parsed)
        )
        context.live[self.request_id] = self.account
        if context.admissions is not None:
            context.admissions.append(make_admission_record(decision, self, wall))
        if context.checks is not None:
            context.checks.sample(decision, parsed, self.trace_id, wall)
        verdict = dispatch(decision, self, parsed, context.clock.monotonic() - began, prices=context.view.prices, wall=wall)
        self.who = self.parsed = self.intent = None  # what is open for minutes keeps no more than it needs
        return verdict

    async def _without_body(self, endpoint: EndpointKind | None) -> Verdict | Refusal:
        if endpoint is None or self.who is None:
            return answers.build_options_response(self.trace_id)
        context = self._context
        if endpoint.usage:
            return await self._usage_report(self.who)
        listed = context.view.table.models_for(self.who.tenant, endpoint.model)
        length = context.selector.members.get_longest_context
        return answers.build_models_response(listed, endpoint.model, self.trace_id, length=length, created=context.started)

    async def _usage_report(self, who: Authenticated) -> Verdict | Refusal:
        """Return the tenant's report about itself; it costs nothing and counts against no limit."""
        days = answers.read_days(self.head.path)
        if self._context.reports is None or isinstance(days, Refusal):
            return days if isinstance(days, Refusal) else answers.NO_REPORTS
        try:
            report = await self._context.reports.report(who, self.account, days)
        except LimitsUnavailable:
            return refuse_limits_unavailable()
        return answers.build_usage_response(report, self.trace_id)

    def on_response(self, head: ResponseHead) -> Treatment:
        """Replace a node's error by the gateway's, translate an answer of another dialect, and pass any other answer on."""
        held, wall = self._held, self._context.clock.wall()
        if held is None:
            return PASS
        node_request = held.moved if DEGRADED in head.headers else held.translated
        if node_request is None or node_request.dialect is None or head.status not in SUCCESS_STATUSES:
            return failures.translate_error(held.engine, head, self.head, self.trace_id, wall)
        named = AnswerContext(node_request.operation, self.request_id, int(wall), node_request.model, node_request.fields)
        return Translation(node_request.dialect, named, node_request.stream, self.head, self.trace_id).choose_treatment(head)

    def on_response_failure(self, error: Exception) -> Replacement:
        """Replace the node's answer when the sidecar fails to translate it."""
        self._context.observer.on_fault(error, self.trace_id)
        return build_unreadable_response(self.head, self.trace_id)

    def ended(self, *, cut: bool = True) -> None:
        """Free node and slot. Plentiful slots of an exchange that was not cut are freed by its settlement."""
        releases = self._held is not None and (cut or self._held.releases)
        if self._release_reservation() and releases:
            self._context.start(self._release())

    def _release_reservation(self) -> bool:
        held, self._held = self._held, None
        if held is None:
            return False
        self._context.selector.release(held.lease)
        self._context.live.pop(self.request_id, None)
        return True

    async def _release(self) -> None:
        try:
            await self._context.ledger.release(self.account, self.request_id)
        except LimitsUnavailable:
            return  # the lease expires by itself

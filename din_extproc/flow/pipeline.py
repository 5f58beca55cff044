"""The one order of a decision: ext_proc, ext_authz, `explain`, `replay` and `simulate` call the functions of this module.

| stage              | function              | gives                                       | refuses                                  |
|--------------------|-----------------------|---------------------------------------------|------------------------------------------|
| 1 endpoint kind    | `accept`              | `EndpointKind`; `None` for OPTIONS          | 404, 405                                 |
| 2 authentication   | `accept`              | `PendingRequest.who`, `.origin`             | `invalid_api_key`, `identity_conflict`,  |
|                    |                       |                                             | `request_breaks_nodes`                   |
| 3 read             | `read_request`        | `ParsedRequest`                             | what the body lacks                      |
| 4 sensitive data   | `read_request`        | `ParsedRequest`, masked where that is asked | `sensitive_data_blocked`                 |
| 5 exact count      | `decide`, `permit`    | `PendingRequest.intent`                     | -                                        |
| 6 route            | `route`               | `Routed`                                    | unknown model, no version                |
| 7 candidate pool   | `select_pool`         | `CandidatePool`, masked as the pool asks    | no node of pool or fallback can take it  |
| 8 reservation      | `reserve`             | `Granted`                                   | limits, full queue                       |
|   of a long request| `reserve_long`        | `LongReservation`, with a slot at a node    | likewise; no slot for a long request     |
| 9 node             | `select_node`         | `NodeSelection`                             | no slot for a long request; deadline     |

`accept` has the stages before the body is understood, `decide` those after it; `permit` is `decide` for a proxy that chooses the node
itself. The caller makes the verdict (stage 10) from the `Decision` or `Permit`: `flow/dispatch.py` for the two that serve. The types are in
`flow/decision.py`.

Invariant: whatever `decide` or `permit` reserves and does not hand out in its result is refunded.

A new stage is a function here, called at its place in `decide` and `permit`; what it needs of the worker is a field of
`DecisionContext`, what it has to remember of the request a slot of `PendingRequest`. Every caller has it from then on.
"""

from msgspec.structs import replace

from din_extproc.admit import headers as limit_headers
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable
from din_extproc.admit.queue import is_queueable
from din_extproc.domain.health import make_origin
from din_extproc.domain.node import Node
from din_extproc.domain.request import Intent, Operation, Priority
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.claims import make_claim
from din_extproc.flow.decision import CandidatePool, Decision, DecisionContext, LongReservation, PendingRequest, Permit, ReservationLedger
from din_extproc.flow.node_request import NodeRequest, build_node_request
from din_extproc.flow.node_selector import OVERFLOWS, PlacementTarget
from din_extproc.flow.queueing import QueueFull
from din_extproc.flow.request_size import compute_request_size, estimate_for_model, refuse_over_context
from din_extproc.flow.screening import screen_request
from din_extproc.flow.timeouts import deduct_wait
from din_extproc.flow.view import UNLISTED, TokenCounter, get_model_facts
from din_extproc.intent.boundary import needs_exact
from din_extproc.intent.paths import EndpointKind, find_endpoint_kind
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.intent.session import find_affinity
from din_extproc.route.table import Routed
from din_extproc.schedule.placement_request import PlacementRequest

_HOUR_S = 3600
_STORED_ELSEWHERE = Refusal(
    RefusalCode.INVALID_REQUEST,
    "previous_response_id is not supported here: several nodes serve the model, and only the one that stored the response knows it. "
    "Send the whole conversation in input.",
    param="previous_response_id",
)
_BREAKS_NODES = Refusal(
    RefusalCode.REQUEST_BREAKS_NODES,
    "Two nodes broke off when they got this request, so it is sent to no other one for ten minutes. Change the request, or report it.",
)
_NO_WEBSOCKET = Refusal(RefusalCode.UPGRADE_REQUIRED, "WebSocket connections are not served; send the request over HTTP with POST")
_NO_BODY = NodeRequest(operation=Operation.CHAT, stream=False, path="", body=b"", strips_usage=False)
"""The request to a node for a request whose body is not available."""


def read_endpoint(
    context: DecisionContext, request: PendingRequest, body: bytes, wall: float
) -> ParsedRequest | EndpointKind | Refusal | None:
    """Stages 1 to 4: whose request it is and what it wants.

    Returns:
        The request as it was read; the endpoint when it is one without a body (the model list); None for OPTIONS, which needs no key.
    """
    head = request.head
    if head.method == "OPTIONS":
        return None
    if head.method == "GET" and head.header("sec-websocket-key"):
        return _NO_WEBSOCKET
    endpoint = find_endpoint_kind(head.method, head.path, context.view.operations)
    if isinstance(endpoint, Refusal):
        return endpoint
    who = context.view.keys.authenticate(head.header("authorization"), head.header("x-api-key"), wall, context.revoked)
    if context.view.identities is not None:
        who = context.view.identities.authenticate(head, who)
    if isinstance(who, Refusal):
        return who
    request.who = who
    request.account = who.tenant.id
    request.origin = make_origin(who.tenant.pseudonym, body)
    if request.origin in context.stopped:
        return _BREAKS_NODES
    if endpoint.operation is Operation.MODELS:
        return endpoint
    return read_request(context, request, body)


def read_request(context: DecisionContext, request: PendingRequest, body: bytes) -> ParsedRequest | Refusal:
    """Stages 3 and 4: the request, and its prompt checked by the tenant's policy for sensitive data, if it has one."""
    view = context.view
    parsed = parse_request(request.head, body, context.calibrators.for_name, view.body_limit, view.operations)
    if isinstance(parsed, Refusal):
        return parsed
    listed = request.who is None or request.who.tenant.listed
    screening = context.view.screenings.get(request.account if listed else UNLISTED)
    if screening is not None:
        parsed = screen_request(context, request, parsed, screening)
        if isinstance(parsed, Refusal):
            return parsed
    request.parsed = parsed
    request.intent = parsed.intent
    request.session, request.prefix = find_affinity(parsed, request.head, context.view.session_header, request.account)
    return parsed


async def decide(
    context: DecisionContext, request: PendingRequest, who: Authenticated, intent: Intent, *, began: float, wall: float
) -> Decision | Refusal:
    """Stages 5 to 9: the decision about a request that was read.

    Args:
        context: The ports.
        request: The request, with its head, ids and, where there is a body, what was read from it.
        who: Who asks.
        intent: What it wants, as it was read.
        began: When the whole request was there, by the monotonic clock.
        wall: Likewise, in seconds since the epoch.
    """
    counter = find_exact_counter(context, request, intent)
    if counter is not None:
        intent = await count_exactly(context, request, intent, counter)
    routed = route(context, request, who, intent, wall)
    if isinstance(routed, Refusal):
        return routed
    pool = select_pool(context, request, routed, intent, began)
    if isinstance(pool, Refusal):
        return pool
    claim = make_claim(context, request, who, pool.intent, pool.target.pool.model)
    members = context.selector.members
    placement = placement_request(request, pool, claim, began)
    chosen: tuple[Node, ...] = ()
    granted: Granted | Refusal
    if placement.long:
        held = await reserve_long(context, request, who.tenant, pool, claim=claim, placement=placement)
        if isinstance(held, Refusal):
            return held
        granted, claim, chosen = held.granted, held.claim, held.nodes
    else:
        granted = await reserve(context, request, who.tenant, pool.intent, claim)
        if isinstance(granted, Refusal):
            return granted
    if pool.intent.timeout_ms is not None or context.selector.members is not members:
        again = confirm_pool(context, request, routed, pool, began)
        if isinstance(again, Refusal):
            context.start(refund(context.ledger, claim.tenant, claim.request_id))
            return again
        if again.target.pool is not pool.target.pool:
            placement, chosen = placement_request(request, again, claim, began), ()
        pool = again
    picked = context.selector.select_nodes(pool.target, placement, chosen)
    if isinstance(picked, Refusal):
        context.start(refund(context.ledger, claim.tenant, claim.request_id))
        return picked
    return Decision(
        intent=pool.intent,
        routed=routed,
        target=pool.target,
        node_request=pool.node_request,
        claim=claim,
        rate_limit_status=granted.status,
        recorded=granted.recorded,
        would_refuse=name_unenforced_limit(granted),
        roomy=granted.roomy,
        selection=picked,
    )


async def decide_permit(
    context: DecisionContext, request: PendingRequest, who: Authenticated, intent: Intent, *, began: float, wall: float
) -> Permit | Refusal:
    """Stages 5 to 8 for a proxy that chooses the node itself. The arguments are those of `decide`.

    It is charged for the model that `decide` would send it to. Where the configuration serves no such model, or no node can take it now,
    that is for the proxy to know: it is charged for the model that its name stands for.
    """
    counter = find_exact_counter(context, request, intent)
    if counter is not None:
        intent = await count_exactly(context, request, intent, counter)
    routed = route(context, request, who, intent, wall)
    target: PlacementTarget | Refusal | None = None
    if isinstance(routed, Refusal):
        if routed.code is RefusalCode.MODEL_NOT_ALLOWED:
            return routed
        model = resolve_requested_model(context, intent, who.tenant)
        if isinstance(model, Refusal):
            return model
    else:
        target = context.selector.select_target(routed, compute_request_size(context, request, intent, routed, routed.model), began)
        model = routed.model if isinstance(target, Refusal) else target.pool.model
        intent = estimate_for_model(context, request, intent, model)
    claim = make_claim(context, request, who, intent, model)
    granted = await reserve(context, request, who.tenant, intent, claim)
    if isinstance(granted, Refusal):
        return granted
    return Permit(
        intent=intent,
        routed=None if isinstance(routed, Refusal) else routed,
        target=None if isinstance(target, Refusal) else target,
        model=model,
        claim=claim,
        rate_limit_status=granted.status,
        recorded=granted.recorded,
        would_refuse=name_unenforced_limit(granted),
    )


# -- stages ----------------------------------------------------------------------------------------------------------------------------


def find_exact_counter(context: DecisionContext, request: PendingRequest, intent: Intent) -> TokenCounter | None:
    """Stage 5: the model's tokenizer, when it is at hand and the estimate could decide wrongly; None: the estimate will do."""
    model = context.calibrators.model_of(intent.model)
    known = get_model_facts(context.view, model or "")
    if known.counter is None or not known.boundaries or request.parsed is None:
        return None
    if intent.truncates or request.parsed.prompt.limit:
        return None
    output = intent.output_each or 1
    boundaries = (*known.boundaries, *(boundary - output for boundary in known.boundaries))
    band = context.calibrators.for_model(model or "").calibration.band
    return known.counter if needs_exact(intent.estimate, band, boundaries) else None


async def count_exactly(context: DecisionContext, request: PendingRequest, intent: Intent, counter: TokenCounter) -> Intent:
    """Stage 5: the intent with the exact length of its prompt; with the estimate when counting fails."""
    if request.parsed is None:
        return intent
    calibrator = context.calibrators.for_name(intent.model)
    counted = request.intent = replace(intent, estimate=await counter.count(request.parsed.prompt, intent.estimate, calibrator))
    return counted


def route(context: DecisionContext, request: PendingRequest, who: Authenticated, intent: Intent, wall: float) -> Routed | Refusal:
    """Stage 6: the rule that takes the request, and its pool."""
    hour = int(wall) // _HOUR_S % 24
    return context.view.table.route(intent, who.tenant, request.head, hour, context.selector.members.get_versions)


def select_pool(context: DecisionContext, request: PendingRequest, routed: Routed, intent: Intent, now: float) -> CandidatePool | Refusal:
    """Stage 7: the rule's pool or its fallback, and what a node there will be asked."""
    target = context.selector.select_target(routed, compute_request_size(context, request, intent, routed, routed.model), now)
    if isinstance(target, Refusal):
        return target
    if refuse_stored_response(request) and len(context.selector.members.get_nodes(target.pool.name)) > 1:
        return _STORED_ELSEWHERE
    own, intent = intent, refuse_over_context(context, request, estimate_for_model(context, request, intent, target.pool.model), target)
    node_request = get_node_request(context, request, intent, target)
    if isinstance(node_request, Refusal) and target.degraded in OVERFLOWS:  # what would only overflow stays where it can be served
        return select_pool(context, request, replace(routed, overflow=False), own, now)
    return node_request if isinstance(node_request, Refusal) else CandidatePool(target, intent, node_request)


def refuse_stored_response(request: PendingRequest) -> bool:
    """Stage 7: whether the request builds on a response that one node has stored."""
    parsed = request.parsed
    if parsed is None or parsed.intent.operation is not Operation.RESPONSES or "previous_response_id" not in parsed.outline.spans:
        return False
    return parsed.outline.value(parsed.body, "previous_response_id") != b"null"


def get_node_request(context: DecisionContext, request: PendingRequest, intent: Intent, target: PlacementTarget) -> NodeRequest | Refusal:
    """Stage 7: the request in the dialect of the pool's engine, by its policy for sensitive data; a placeholder where there is no body."""
    if request.parsed is None:
        return _NO_BODY
    screening = context.view.pool_screenings.get(target.pool.name)
    if screening is not None:
        screened = screen_request(context, request, request.parsed, screening)
        if isinstance(screened, Refusal):
            return screened
        request.parsed = screened
    priority = Priority.STANDARD if request.who is None else request.who.tenant.priority_of(intent.priority)
    return build_node_request(request.parsed, intent, target.pool, priority)


def resolve_requested_model(context: DecisionContext, intent: Intent, tenant: Tenant) -> str | Refusal:
    """Stage 7 of `permit`: the physical model that the name stands for; where no pool serves it, the name itself."""
    name = intent.model.partition("@")[0]
    model = context.calibrators.model_of(intent.model) or name
    if tenant.may_use(name) or tenant.may_use(model):
        return model
    return Refusal(RefusalCode.MODEL_NOT_ALLOWED, "The key may not use this model.", param="model")


async def reserve(context: DecisionContext, request: PendingRequest, tenant: Tenant, intent: Intent, claim: Claim) -> Granted | Refusal:
    """Stage 8: tokens and slots, after a wait where the tenant has a queue."""
    queueing = tenant.queueing
    try:
        if queueing.max_wait_ms and context.queue and context.queue.must_queue(claim, tenant.priority_of(intent.priority)):
            reply = await _wait_in_queue(context, request, tenant, intent, claim)
        else:
            reply = await context.ledger.reserve(claim)
            if queueing.max_wait_ms and isinstance(reply, Denied) and is_queueable(reply):
                reply = await _wait_in_queue(context, request, tenant, intent, claim)
    except LimitsUnavailable:
        return limit_headers.refuse_limits_unavailable()
    if isinstance(reply, QueueFull):
        return limit_headers.refuse_queue_full(reply.vacancy_ms)
    if not isinstance(reply, Denied):
        return reply
    if reply.dimension in limit_headers.SPENT:
        return limit_headers.refuse_spent(reply, context.view.prices.currency, context.clock.wall())
    return limit_headers.refuse_denied(reply, claim)


async def reserve_long(
    context: DecisionContext, request: PendingRequest, tenant: Tenant, pool: CandidatePool, *, claim: Claim, placement: PlacementRequest
) -> LongReservation | Refusal:
    """Stage 8 of a long request: also a slot for long requests, at the first of the nodes that has one."""
    tail = pool.target.ranking.tail
    assert tail is not None  # noqa: S101 - otherwise no request is long
    while True:
        nodes = context.selector.choose(pool.target, placement)
        if isinstance(nodes, Refusal):
            return nodes
        held = replace(claim, budgets=(*claim.budgets, tail.budget(nodes[0])))
        granted = await reserve(context, request, tenant, pool.intent, held)
        if not isinstance(granted, Refusal):
            return LongReservation(granted, held, nodes)
        if granted.code is not RefusalCode.INSUFFICIENT_GPU_CAPACITY:
            return granted
        placement = replace(placement, full=placement.full | {nodes[0].id})


async def _wait_in_queue(
    context: DecisionContext, request: PendingRequest, tenant: Tenant, intent: Intent, claim: Claim
) -> Granted | Denied | QueueFull:
    """The answer after a wait, no longer than tenant and client allow."""
    queueing = tenant.queueing
    wait_ms = queueing.max_wait_ms if intent.timeout_ms is None else min(queueing.max_wait_ms, intent.timeout_ms)
    joined = context.clock.monotonic()
    reply = await context.queue.wait(claim, tenant.priority_of(intent.priority), queueing, wait_ms)
    request.waited_s = context.clock.monotonic() - joined
    return reply


def confirm_pool(
    context: DecisionContext, request: PendingRequest, routed: Routed, pool: CandidatePool, began: float
) -> CandidatePool | Refusal:
    """Stage 8: what the time that the reservation took has left of the client's deadline and of the nodes."""
    now = context.clock.monotonic()
    size = compute_request_size(context, request, pool.intent, routed, pool.target.pool.model)
    target = context.selector.select_target(routed, size, now)
    if isinstance(target, Refusal):
        return target
    intent = deduct_wait(pool.intent, now - began)
    if isinstance(intent, Refusal):
        return intent
    if target.pool.model != pool.target.pool.model:
        return CandidatePool(pool.target, intent, pool.node_request)
    if target.pool is pool.target.pool:
        return CandidatePool(target, intent, pool.node_request)
    node_request = get_node_request(context, request, intent, target)
    if isinstance(node_request, Refusal):
        return node_request if target.degraded not in OVERFLOWS else CandidatePool(pool.target, intent, pool.node_request)
    return CandidatePool(target, intent, node_request)


def placement_request(request: PendingRequest, pool: CandidatePool, claim: Claim, now: float) -> PlacementRequest:
    """Stage 9: the request as the schedulers see it."""
    prompt_tokens, tail, parsed = pool.intent.prompt_tokens, pool.target.ranking.tail, request.parsed
    output_tokens = max(0, claim.tokens - prompt_tokens)
    worst = 0 if parsed is None or pool.intent.estimate.exact else len(parsed.body) + (pool.intent.output_each or 1)
    return PlacementRequest(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        now=now,
        chance=request.chance,
        prefix=request.prefix,
        worst_tokens=worst,
        long=tail is not None and tail.is_long(prompt_tokens, output_tokens),
    )


# -- what several stages use -----------------------------------------------------------------------------------------------------------


def name_unenforced_limit(granted: Granted) -> str:
    """The limit that would have refused it, were it enforced; "" when none would."""
    return "" if granted.shadow_denial is None else granted.shadow_denial.dimension


async def refund(ledger: ReservationLedger, tenant: str, request_id: str) -> None:
    """Give back everything that a request has reserved. While the counters are away, lease and bucket recover by themselves."""
    try:
        await ledger.settle(tenant, request_id, None)
    except LimitsUnavailable:
        return

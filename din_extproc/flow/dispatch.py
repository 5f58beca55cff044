"""From a decision to Envoy's instructions: where it goes, what changes on the way, and what comes back with the access log.

Rule: the body changes by splices only, and every label that settlement needs is in the metadata, so that no worker has to live until then.
"""

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from din_extproc.admit.headers import rate_limit_headers
from din_extproc.admit.ledger import Claim
from din_extproc.domain.node import Pool, in_flight_cluster
from din_extproc.domain.price import NO_PRICES, PriceList
from din_extproc.domain.request import Ending, Intent, Metering, Operation
from din_extproc.domain.usage import Labels, Tags
from din_extproc.domain.verdict import Headers, Send
from din_extproc.flow import answers
from din_extproc.flow.attempt import AttemptPlan
from din_extproc.flow.decision import Decision, PendingRequest, Permit
from din_extproc.flow.timeouts import compute_timeouts
from din_extproc.intent.read import ParsedRequest
from din_extproc.intent.splice import offset_after_splice
from din_extproc.observe.outcome import bound_usage
from din_extproc.route.table import Routed

_RETRY_LONGER = (("x-envoy-retry-on", "retriable-status-codes"), ("x-envoy-retriable-status-codes", "400,413,422"))
"""Statuses with which engines reject a prompt as too long; Envoy retries them on the next node."""
_SECRETS = ("authorization", "x-api-key")
_UNPRICED = frozenset({Metering.REQUEST, Metering.SECONDS})
"""The engine says only in its answer how long the audio was; what costs no tokens costs nothing."""
_UNBOUNDED = "1000000000000"
_NO_METADATA: Mapping[str, str | float | bool] = {}
_as_json = msgspec.json.Encoder().encode


def dispatch(
    granted: Decision, request: PendingRequest, parsed: ParsedRequest, decided_s: float, *, prices: PriceList = NO_PRICES, wall: float = 0.0
) -> Send:
    """The verdict that sends it.

    Args:
        granted: The decision.
        request: What was decided about.
        parsed: Its content.
        decided_s: How long the decision took, the wait in line included.
        prices: What models cost.
        wall: When it began, in seconds since the epoch.
    """
    target, order, head = granted.target, granted.node_request, request.head
    endpoints = [str(node.endpoint) for node in granted.selection.nodes]
    # One engine can serve both pools: asked once more by address, it would be asked for the first one's model.
    fallback_nodes = [endpoint for node in granted.selection.fallback_nodes if (endpoint := str(node.endpoint)) not in endpoints]
    plan = AttemptPlan.of(granted, request) if fallback_nodes else None
    move = _describe_fallback(granted, parsed) if fallback_nodes and plan is None else None
    cluster = target.pool.name
    if target.in_flight_fallback is not None and (plan is not None or move is not None):
        cluster = in_flight_cluster(cluster, target.in_flight_fallback[0].name)
        endpoints += fallback_nodes
    if plan is not None:
        order = plan.before_attempts(order, parsed.body)
    answer_headers: Headers = (
        *answers.make_trace_headers(head.path, request.trace_id),
        *rate_limit_headers(granted.rate_limit_status),
        *order.headers,
    )
    if target.degraded:
        answer_headers = (*answer_headers, ("x-bxagent-degraded", "true"), ("x-din-degraded-reason", target.degraded))
    metadata = _make_metadata(granted, request, parsed, decided_s)
    if prices.header and not granted.intent.stream and (price := _describe_price(prices, granted, parsed, wall)):
        metadata["price"] = price
    if plan is not None and granted.intent.stream and not granted.intent.wants_usage:
        metadata["strip_usage"] = True  # whichever engine answers: translated streams report usage in any case
    if move is not None:
        metadata["move"] = move
    path = _rewrite_path(head.path, order.path)
    return Send(
        cluster=cluster,
        endpoints=tuple(endpoints),
        request_headers=(
            *_trace_headers(request),
            ("x-din-origin", request.origin),
            *_model_headers(granted.routed, target.pool, granted.intent),
            *compute_timeouts(granted.intent, target.pool, granted.selection).headers(),
            *(_RETRY_LONGER if granted.selection.retries_longer else ()),
            *_most_tries(granted.selection.most_tries),
            *(() if path is None else _original_path(head.path, path)),
            *(() if plan is None else (plan.header,)),
        ),
        response_headers=answer_headers,
        metadata=metadata,
        body=order.body if order.body is not parsed.body or parsed.decoded else None,
        path=path,
        remove_headers=("content-encoding",) if parsed.decoded else (),
        needs_response_head=order.dialect is not None or plan is not None,
    )


def _describe_price(prices: PriceList, granted: Decision, parsed: ParsedRequest, wall: float) -> str:
    """Return the numbers of which `usage.lua` computes the answer's cost: prices, then the maximum of credible tokens. "": it can't."""
    intent, node = granted.intent, granted.selection.nodes[0]
    price = prices.price_at(granted.target.pool.model, wall)
    if price is None or intent.operation.spec.metering in _UNPRICED:
        return ""
    once = price.request + parsed.prompt.media * price.media + intent.images * price.generated_image
    most = bound_usage(
        intent.estimate.tokens,
        node.max_seq_len,
        intent.output_tokens or 0,
        one_prompt=intent.operation == Operation.CHAT,
        media=parsed.prompt.media > 0,
    )
    bounds = [str(int(bound)) if bound < math.inf else _UNBOUNDED for bound in most]
    return f"{price.input} {price.cached_input} {price.output} {once} {' '.join(bounds)}"


def make_permit_verdict(granted: Permit, request: PendingRequest, decided_s: float) -> Send:
    """The verdict for a proxy that chooses the node itself: go on, without the key."""
    labels = _make_labels(
        request,
        granted.intent,
        granted.claim,
        model=granted.model,
        alias=granted.intent.model if granted.routed is None else granted.routed.name,
        pool="",
        rule="",
        degraded=False,
        would_refuse=granted.would_refuse,
        recorded=granted.recorded,
        decided_s=decided_s,
    )
    return make_pass_verdict(request, rate_limit_headers(granted.rate_limit_status), _make_base_metadata(labels, granted.intent.operation))


def make_pass_verdict(
    request: PendingRequest, rate_limit_headers: Headers = (), metadata: Mapping[str, str | float | bool] = _NO_METADATA
) -> Send:
    """The verdict for a proxy that chooses the node itself, on a request that costs nothing."""
    named = answers.make_trace_headers(request.head.path, request.trace_id)
    return Send("", (), _trace_headers(request), (*named, *rate_limit_headers), metadata, remove_headers=_SECRETS)


def _describe_fallback(granted: Decision, parsed: ParsedRequest) -> str | None:
    """Return the changes for the pool that takes over: the place of the model's name and the version constraint. None: it can't move."""
    order, at, key = granted.node_request, parsed.outline, granted.intent.operation.spec.model
    if not granted.selection.fallback_nodes or order.edits is None or key not in at.spans:
        return None
    length = len(order.edits[key]) if key in order.edits else at.spans[key][1] - at.spans[key][0]
    return f"{offset_after_splice(at, order.edits, key)} {length} {granted.routed.fallback_versions.text}"


def _most_tries(most: int | None) -> Headers:
    """Return the header that limits Envoy's retries, if few nodes are of the same kind."""
    return () if most is None else (("x-envoy-max-retries", str(most - 1)),)


def _model_headers(routed: Routed, pool: Pool, intent: Intent) -> Headers:
    """The adapter, and the whole version constraint for the node to check when alias or model name add to the client's header."""
    wanted = (routed.versions if pool is routed.pool else routed.fallback_versions).text
    version: Headers = () if wanted == intent.version else (("x-din-model-version", wanted),)
    return version if not pool.adapter else (("x-din-adapter", pool.adapter), *version)


def make_tags(intent: Intent, entry: str) -> Tags:
    """Return the request's intent; `replay` decides again from it."""
    longest = intent.estimate.longest
    return Tags(
        model=intent.model,
        output_tokens=intent.output_tokens,
        version=intent.version,
        task_tier=intent.task_tier,
        timeout_ms=intent.timeout_ms,
        budget_tokens=intent.budget_tokens,
        budget_cost=intent.budget_cost,
        priority="" if intent.priority is None else intent.priority.value,
        answers=intent.answers,
        longest=0 if longest is None else max(1, longest.tokens),
        entry=entry,
    )


def make_refusal_metadata(request: PendingRequest) -> dict[str, str]:
    """Return the labels that the access log returns for a refused request, as far as they are known."""
    metadata = {} if request.span is None else {"span": request.span.text}
    who, intent = request.who, request.intent
    if who is None:
        return metadata
    labels = Labels(tenant=who.tenant.id, key_id=who.key.id, inspected=request.inspected, unlisted=not who.tenant.listed)
    if intent is not None:
        labels = replace(
            labels,
            prompt_estimate=intent.prompt_tokens,
            stream=intent.stream,
            operation=intent.operation,
            tags=make_tags(intent, request.entry),
        )
    metadata["labels"] = _as_json(labels).decode()
    return metadata


def _make_labels(
    request: PendingRequest,
    intent: Intent,
    claim: Claim,
    *,
    model: str,
    alias: str,
    pool: str,
    rule: str,
    degraded: bool,
    left_site: bool = False,
    would_refuse: str,
    recorded: bool,
    decided_s: float,
) -> Labels:
    """The record of the decision that settlement reads."""
    estimate, who, parsed = intent.estimate, request.who, request.parsed
    return Labels(
        request_id=claim.request_id,
        trace_id=request.trace_id,
        origin=request.origin,
        tenant=claim.tenant,
        key_id="" if who is None else who.key.id,
        unlisted=who is not None and not who.tenant.listed,
        model=model,
        alias=alias,
        pool=pool,
        rule=rule,
        reserved_tokens=claim.tokens if recorded else 0,
        prompt_estimate=estimate.tokens,
        features=estimate.features,
        fixed=estimate.fixed,
        stream=intent.stream,
        degraded=degraded,
        operation=intent.operation,
        metering="" if intent.operation.spec.metering is Metering.TOKENS else intent.operation.spec.metering,
        images=intent.images,
        audio_seconds=intent.audio_seconds,
        would_refuse=would_refuse,
        inspected=request.inspected,
        sensitive=None if parsed is None else parsed.sensitive,
        tags=make_tags(intent, request.entry),
        span="" if request.span is None else request.span.text,
        decided_us=round(decided_s * 1e6),
        waited_us=round(request.waited_s * 1e6),
        media=0 if parsed is None else parsed.prompt.media,
        left_site=left_site,
    )


def _trace_headers(request: PendingRequest) -> Headers:
    """The client's own `traceparent` goes on untouched when the exchange leaves no spans."""
    named = ("x-din-trace-id", request.trace_id)
    return (named,) if request.span is None else (named, ("traceparent", request.span.traceparent))


def _make_metadata(granted: Decision, request: PendingRequest, parsed: ParsedRequest, decided_s: float) -> dict[str, str | float | bool]:
    """Return the labels for the access log and the usage filter, for a request whose node is chosen here."""
    intent, order, pool = granted.intent, granted.node_request, granted.target.pool
    labels = _make_labels(
        request,
        intent,
        granted.claim,
        model=pool.model,
        alias=granted.routed.name,
        pool=pool.name,
        rule=granted.routed.rule,
        degraded=bool(granted.target.degraded),
        left_site=granted.selection.nodes[0].remote is not None,
        would_refuse=granted.would_refuse,
        recorded=granted.recorded,
        decided_s=decided_s,
    )
    metadata = _make_base_metadata(labels, intent.operation)
    if order.strips_usage:
        metadata["strip_usage"] = True
    if intent.stream and intent.answers > 1 and order.edits is not None and "best_of" not in parsed.outline.spans:
        metadata["choices"] = intent.answers  # `best_of` asks for more than the stream has; an engine without `n` gives one
    return metadata


def _make_base_metadata(labels: Labels, operation: Operation) -> dict[str, str | float | bool]:
    """The metadata of every request that is sent on: one field for settlement, because every field costs both Envoy and us."""
    metadata: dict[str, str | float | bool] = {"request_id": labels.request_id, "labels": _as_json(labels).decode()}
    spec = operation.spec
    if spec.ending is not Ending.CHAT:
        metadata["dialect"] = spec.ending.value
    if spec.ends:
        metadata["ends"] = " ".join(spec.ends)
    return metadata


def _rewrite_path(path: str, canonical: str) -> str | None:
    """The node's path, None when that is what the client wrote. A query goes no further: engines read none, and some hold keys."""
    return None if path == canonical else canonical


def _original_path(path: str, canonical: str) -> Headers:
    """The client's path under the name by which Envoy's own answers find it, without the query. None is needed where only that goes."""
    instance = answers.make_problem_instance(path)
    return () if instance == canonical else (("x-envoy-original-path", instance),)

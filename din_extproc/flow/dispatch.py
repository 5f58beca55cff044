"""From a granted request to what Envoy is told: where it goes, what changes on the way, and what comes back with the access log.

Rule: the body changes by splices only, and every label that settlement needs is in the metadata, so that no worker has to live until then.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.headers import rate_limit_headers
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, RateLimitStatus
from din_extproc.domain.node import Pool, in_flight_cluster
from din_extproc.domain.request import Intent, Operation, RequestHead
from din_extproc.domain.usage import Labels, Tags
from din_extproc.domain.verdict import Headers, Send
from din_extproc.flow import answers
from din_extproc.flow.node_order import NodeRequest
from din_extproc.flow.node_selector import NodeSelection, PlacementTarget
from din_extproc.flow.timeouts import limits
from din_extproc.flow.trace import SpanContext
from din_extproc.intent.read import ParsedRequest
from din_extproc.intent.splice import offset_after_splice
from din_extproc.route.table import Routed

_as_json = msgspec.json.Encoder().encode
_DIALECTS = {Operation.MESSAGES: "messages", Operation.RESPONSES: "responses"}
"""How clients of an operation expect errors in their stream, where that is not as chat completions have them."""


class Decision(Struct, frozen=True, gc=False):
    """Everything that was decided about one request."""

    trace_id: str
    key_id: str
    reading: ParsedRequest
    intent: Intent
    order: NodeRequest
    routed: Routed
    target: PlacementTarget
    picked: NodeSelection
    claim: Claim
    standing: RateLimitStatus
    would_refuse: str = ""
    """The limit that would have refused it, were it enforced."""
    span: SpanContext | None = None
    """None: it leaves no spans."""
    decided_s: float = 0.0
    """How long all of that took, `waited_s` included."""
    waited_s: float = 0.0
    """In line for tokens or slots."""


def dispatch(granted: Decision, head: RequestHead) -> Send:
    """The verdict that sends it."""
    reading, target, order = granted.reading, granted.target, granted.order
    answer_headers: Headers = (("x-din-trace-id", granted.trace_id), *rate_limit_headers(granted.standing), *order.headers)
    if target.degraded:
        answer_headers = (*answer_headers, ("x-bxagent-degraded", "true"), ("x-din-degraded-reason", target.degraded))
    endpoints = [str(node.endpoint) for node in granted.picked.nodes]
    cluster, metadata = target.pool.name, _metadata(granted)
    path = _path(head.path, order.path)
    move = _move(granted)
    if move is not None and target.spare is not None:
        spares = [endpoint for node in granted.picked.spares if (endpoint := str(node.endpoint)) not in endpoints]
        if spares:  # one engine can serve both pools: asked once more by address, it would be asked for the first one's model
            cluster = in_flight_cluster(cluster, target.spare[0].name)
            endpoints += spares
            metadata["move"] = move
    return Send(
        cluster=cluster,
        endpoints=tuple(endpoints),
        request_headers=(
            *_trace(granted),
            *_version(granted.routed, target.pool, granted.intent),
            *limits(granted.intent, target.pool, granted.picked).headers(),
            *(() if path is None else _original(head.path, path)),
        ),
        response_headers=answer_headers,
        metadata=metadata,
        body=order.body if order.body is not reading.body or reading.decoded else None,
        path=path,
        remove_headers=("content-encoding",) if reading.decoded else (),
        needs_response_head=order.dialect is not None,
    )


def _move(granted: Decision) -> str | None:
    """What changes for the pool that takes over: where the model's name stands, the constraint on its version. None: it can't move."""
    order, at = granted.order, granted.reading.outline
    if not granted.picked.spares or order.edits is None or "model" not in at.spans:
        return None
    length = len(order.edits["model"]) if "model" in order.edits else at.spans["model"][1] - at.spans["model"][0]
    return f"{offset_after_splice(at, order.edits, 'model')} {length} {granted.routed.fallback_versions.text}"


def _version(routed: Routed, pool: Pool, intent: Intent) -> Headers:
    """The whole constraint for the node to check, when alias or model name add to what the client's header says."""
    wanted = (routed.versions if pool is routed.pool else routed.fallback_versions).text
    return () if wanted == intent.version else (("x-din-model-version", wanted),)


def tags(intent: Intent) -> Tags:
    """What the request asked for, for whoever decides about it again."""
    priority = "" if intent.priority is None else intent.priority.value
    longest = intent.estimate.longest
    prompt = 0 if longest is None else max(1, longest.tokens)
    return Tags(intent.model, intent.output_tokens, intent.version, intent.task_tier, priority, intent.answers, prompt)


def refused_metadata(who: Authenticated, intent: Intent | None) -> dict[str, str]:
    """What the access log brings back of a request that was refused after its key was proven. `intent`: None when it was not read."""
    labels = Labels(tenant=who.tenant.id, key_id=who.key.id)
    if intent is not None:
        labels = replace(
            labels,
            prompt_estimate=intent.prompt_tokens,
            stream=intent.stream,
            operation=intent.operation,
            tags=tags(intent),
        )
    return {"labels": _as_json(labels).decode()}


def _trace(granted: Decision) -> Headers:
    """The client's own `traceparent` goes on untouched when the exchange leaves no spans."""
    named = ("x-din-trace-id", granted.trace_id)
    return (named,) if granted.span is None else (named, ("traceparent", granted.span.traceparent))


def _metadata(granted: Decision) -> dict[str, str | float | bool]:
    """One field for settlement, because every field costs both Envoy and us; the others are for the filter that reads the answer."""
    intent, target, claim = granted.intent, granted.target, granted.claim
    estimate, pool = intent.estimate, target.pool
    labels = Labels(
        claim.request_id,
        granted.trace_id,
        claim.tenant,
        granted.key_id,
        pool.model,
        granted.routed.name,
        pool.name,
        granted.routed.rule,
        claim.tokens,
        estimate.tokens,
        estimate.features,
        estimate.fixed,
        intent.stream,
        bool(target.degraded),
        intent.operation,
        granted.would_refuse,
        granted.reading.sensitive,
        tags(intent),
        "" if granted.span is None else granted.span.text,
        round(granted.decided_s * 1e6),
        round(granted.waited_s * 1e6),
        granted.reading.prompt.media,
    )
    metadata: dict[str, str | float | bool] = {"request_id": claim.request_id, "labels": _as_json(labels).decode()}
    if granted.order.strips_usage:
        metadata["strip_usage"] = True
    if intent.operation in _DIALECTS:
        metadata["dialect"] = _DIALECTS[intent.operation]
    if intent.stream and intent.answers > 1 and _tells_choices(granted):
        metadata["choices"] = intent.answers
    return metadata


def _tells_choices(granted: Decision) -> bool:
    """Whether every answer that was asked for is a choice of the stream: `best_of` asks for more, an engine that has no `n` gives one."""
    return "best_of" not in granted.reading.outline.spans and granted.order.edits is not None


def _path(path: str, canonical: str) -> str | None:
    """The node's path, None when that is what the client wrote. A query goes no further: engines read none, and some hold keys."""
    return None if path == canonical else canonical


def _original(path: str, canonical: str) -> Headers:
    """The client's path under the name by which Envoy's own answers find it, without the query. None is needed where only that goes."""
    asked = answers.instance(path)
    return () if asked == canonical else (("x-envoy-original-path", asked),)

"""One attempt at a node of two pools that take different requests: the request is translated for the engine that is asked this time.

Rule: nothing is decided here. The request was admitted and its nodes were chosen before its first attempt; Envoy asks again for an attempt
because its cluster holds the nodes of both pools, and the decision left a plan for that in a header.
"""

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import ATTEMPT_PLAN, ATTEMPT_POOL, DROPPED, EVERY_ATTEMPT
from din_extproc.domain.request import Priority, RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode, Send
from din_extproc.flow.decision import Decision, DecisionContext, PendingRequest
from din_extproc.flow.node_request import NodeRequest, answer_fields, build_node_request
from din_extproc.flow.screening import screen_prompt
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.southbound.engines import find_dialect

_ONLY_FALLBACK = "fallback"
_UNCHANGED_FOR_OTHERS = frozenset({"model", "stream_options"})
"""Values that are set for an engine with OpenAI's interface and mean the same to every other one."""
_PARTS = 4


class AttemptPlan(Struct, frozen=True, gc=False):
    """The parts of a decision that the attempts of its request need."""

    every: bool
    """Envoy has the client's own request, and attempts at the first pool are translated, too."""
    priority: Priority
    path: str
    """The operation's."""
    fallback: str
    """The pool that takes over."""
    versions: str
    """The constraint on the versions of its nodes."""

    @classmethod
    def of(cls, granted: Decision, request: PendingRequest) -> "AttemptPlan | None":
        """Return the plan of a request that may move to a pool that takes other requests; None: it stays, or moves as it is."""
        pool, in_flight_fallback, order = granted.target.pool, granted.target.in_flight_fallback, granted.node_request
        if in_flight_fallback is None or not granted.selection.fallback_nodes or pool.takes_same_bytes(in_flight_fallback[0]):
            return None
        priority = Priority.STANDARD if request.who is None else request.who.tenant.priority_of(granted.intent.priority)
        return cls(
            every=order.edits is None or not _UNCHANGED_FOR_OTHERS.issuperset(order.edits),
            priority=priority,
            path=granted.intent.operation.value,
            fallback=in_flight_fallback[0].name,
            versions=granted.routed.fallback_versions.text,
        )

    @classmethod
    def parse(cls, text: str) -> "AttemptPlan | None":
        """Read the header's value; None: it is no plan."""
        parts = text.split(" ", _PARTS)
        if len(parts) < _PARTS:
            return None
        scope, priority, path, fallback, *versions = parts
        return cls(scope == EVERY_ATTEMPT, Priority(priority), path, fallback, "".join(versions))

    def before_attempts(self, order: NodeRequest, body: bytes) -> NodeRequest:
        """Return what Envoy gets before the first attempt. Attempts say themselves what they leave out."""
        return replace(order, path=self.path, body=body, headers=()) if self.every else order

    @property
    def header(self) -> tuple[str, str]:
        """The request header that carries it."""
        scope = EVERY_ATTEMPT if self.every else _ONLY_FALLBACK
        return ATTEMPT_PLAN, f"{scope} {self.priority.value} {self.path} {self.fallback} {self.versions}".rstrip()


def moved_request(granted: Decision, parsed: ParsedRequest) -> NodeRequest | None:
    """Return what a node of the pool that takes over is asked, as far as its answer's translation needs it; None: it needs none."""
    if granted.target.in_flight_fallback is None or not granted.selection.fallback_nodes:
        return None
    pool, intent = granted.target.in_flight_fallback[0], granted.intent
    dialect = find_dialect(pool.engine, pool.api, intent.operation)
    if dialect is None:
        return None
    return NodeRequest(
        operation=intent.operation,
        stream=intent.stream,
        path="",
        body=b"",
        strips_usage=False,
        dialect=dialect,
        model=pool.served_model,
        fields=answer_fields(parsed),
    )


def translate_attempt(context: DecisionContext, head: RequestHead, body: bytes) -> Send | Refusal:
    """Return the request in the dialect of the engine that Envoy has chosen.

    Args:
        context: The worker's.
        head: The request as the attempt began. Earlier attempts have left their changes in it.
        body: The request's body as it was before any attempt.
    """
    plan, pool = AttemptPlan.parse(head.header(ATTEMPT_PLAN)), context.view.pools.get(head.header(ATTEMPT_POOL))
    if plan is None or pool is None:
        return _not_taken("this gateway no longer knows the pool.")
    attempt_head = RequestHead(method=head.method, path=plan.path, headers=head.headers)
    parsed = parse_request(attempt_head, body, context.calibrators.for_name, len(body), context.view.operations)
    screening = context.view.pool_screenings.get(pool.name)
    if screening is not None and not isinstance(parsed, Refusal):
        parsed = screen_prompt(parsed, screening, head, context.calibrators.for_name)
    order = parsed if isinstance(parsed, Refusal) else build_node_request(parsed, parsed.intent, pool, plan.priority)
    if isinstance(order, Refusal):
        return _not_taken(order.message)
    moved = pool.name == plan.fallback
    headers = (*order.headers, ("x-din-model-version", plan.versions)) if moved and plan.versions else order.headers
    given = {name for name, _ in headers}
    return Send(
        cluster="",
        endpoints=(),
        request_headers=headers,
        response_headers=(),
        metadata={"moved_to": pool.name, "moved_model": pool.model} if moved else {},
        body=order.body,
        path=order.path,
        remove_headers=tuple(name for name in (DROPPED, *(("x-din-model-version",) if moved else ())) if name not in given),
    )


def _not_taken(why: str) -> Refusal:
    return Refusal(
        RefusalCode.UPSTREAM_ERROR, f"The nodes of the model failed, and the pool that takes over can't serve the request: {why}"
    )

"""The role `explain`: where a request would go and why: over the nodes of the configuration, or those that a running sidecar knows.

Rule: the same pipeline as in service; only the counters are not asked.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.identities import IDENTITY_CONFLICT
from din_extproc.admit.keys import MISSING_KEY, Authenticated
from din_extproc.admit.ledger import Claim, Granted, RateLimitStatus
from din_extproc.admit.reservation import OutputHistory
from din_extproc.domain.health import BreakerSnapshots
from din_extproc.domain.membership import HeartbeatReading, NodeState
from din_extproc.domain.node import DROPPED, Node
from din_extproc.domain.request import NO_PEER, PeerConnection, Priority, RequestHead
from din_extproc.domain.tenant import ApiKey, Queueing
from din_extproc.domain.verdict import Refusal
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.decision import Decision, DecisionContext, PendingRequest
from din_extproc.flow.node_request import NodeRequest
from din_extproc.flow.node_selector import NodeSelector, PlacementTarget, RequestSize
from din_extproc.flow.pipeline import decide, get_node_request, read_request
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.timeouts import compute_timeouts
from din_extproc.flow.view import DecisionView
from din_extproc.roles.operate.unknown_tenant import unknown_tenant_message
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.route.table import Routed
from din_extproc.route.versions import Constraint
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pick import NodeShape, filter_shapes, group_by_shape
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explanation import Candidate, ExplainedIntent, Explanation, refused
from din_extproc.tools.virtual_time import LEASE_MS, Pause, VirtualClock, resume, run_now

_HOUR_S = 3600
_ANY_KEY = ApiKey(id="", salt=b"", digest=b"")
"""Stands for a key of the tenant without limits of its own."""

Rows = Sequence[MemberForm]


class ExplainFailed(Exception):  # noqa: N818 - it says what the request is
    """There is nothing to explain: no such tenant, or the file holds no request."""


class RecordedRequest(Struct, frozen=True):
    """A recorded request. `body` is the JSON body itself; a form is a text, each character a byte."""

    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    method: str = "POST"
    headers: dict[str, str] = {}
    claims: dict[str, Any] | None = None
    """Those of a verified token."""
    peer: PeerConnection = NO_PEER
    """Envoy's attributes of the connection: the first `uri` and `dns` name in the client's certificate, and its `address` and port."""

    @property
    def sent(self) -> bytes:
        """The body's bytes."""
        raw = bytes(self.body)
        return msgspec.json.decode(raw, type=str).encode("latin-1", "replace") if raw.startswith(b'"') else raw

    @property
    def head(self) -> RequestHead:
        """As Envoy would pass it on."""
        return RequestHead(self.method, self.path, {name.lower(): value for name, value in self.headers.items()}, self.claims, self.peer)


def explain(settings: Settings, tenant_id: str, text: bytes, rows: Rows | None = None) -> Explanation:
    """Explain one request.

    Args:
        settings: A sound configuration.
        tenant_id: Who asks; "": whom claims or connection of the request name.
        text: A JSON body for chat completions, or an object of `path`, `headers`, `method`, `claims`, `peer` and `body`.
        rows: The nodes that a running sidecar knows, with what they say of their load; None: those of the configuration, idle.

    Raises:
        ExplainFailed: the tenant is unknown or the text is no request.
    """
    recorded = _request(text)
    view = make_view(settings, {})
    who = _authenticate(settings, view, tenant_id, recorded.head)
    if isinstance(who, Refusal):
        return refused(who)
    tenant = who.tenant
    clock = VirtualClock(datetime.now(UTC).timestamp())
    selector = _RecordingSelector(LoadModel(), PoolMembership.from_pools(settings.pools) if rows is None else members_of(rows))
    selector.in_flight = settings.in_flight
    _apply_state(selector, rows or ())
    context = DecisionContext(
        view=view,
        ledger=_Unlimited(),
        selector=selector,
        calibrators=TokenCalibrators(view.table.preferred_model),
        outputs=OutputHistory(),
        clock=clock,
        start=run_now,
        queue=_Unlimited(),
        lease_ms=LEASE_MS,
    )
    request = PendingRequest()
    request.head, request.who, request.account = recorded.head, who, tenant.id
    parsed = read_request(context, request, recorded.sent)
    if isinstance(parsed, Refusal):
        return refused(parsed)
    intent = ExplainedIntent.of(parsed.intent, request.prefix, request.session)
    tried = view.table.evaluate_rules(parsed.intent, tenant, request.head, int(clock.wall()) // _HOUR_S % 24, selector.members.get_versions)
    decided = resume(decide(context, request, who, parsed.intent, began=clock.monotonic(), wall=clock.wall()))
    assert not isinstance(decided, Pause)  # noqa: S101 - nothing here is waited for
    if selector.routed is None or selector.size is None:
        assert isinstance(decided, Refusal)  # noqa: S101 - what passes has a route
        return refused(decided, intent, tried)
    routed = selector.routed
    known = Explanation(
        sent=False,
        tenant=tenant.id,
        identity=who.key.id or None,
        intent=intent,
        rules=tried,
        rule=routed.rule,
        model=routed.model,
        pool=routed.pool.name,
        fallback=None if routed.fallback is None else routed.fallback.name,
    )
    return _placed(
        context, known=known, selector=selector, request=request, routed=routed, size=selector.size, decided=decided, rows=rows or ()
    )


def _authenticate(settings: Settings, view: DecisionView, tenant_id: str, head: RequestHead) -> Authenticated | Refusal:
    """The tenant with any key, and the identities of the request: as in service, they must agree."""
    tenant = settings.find_tenant(tenant_id) if tenant_id else None
    if tenant_id and tenant is None:
        raise ExplainFailed(unknown_tenant_message(settings, tenant_id))
    by_key = MISSING_KEY if tenant is None else Authenticated(tenant, _ANY_KEY)
    if view.identities is None or (head.claims is None and head.peer == NO_PEER):
        found: Authenticated | Refusal = by_key
    else:
        found = view.identities.authenticate(head, MISSING_KEY)
        if isinstance(found, Authenticated) and tenant is not None and found.tenant.id != tenant.id:
            return IDENTITY_CONFLICT
    if found is MISSING_KEY:
        raise ExplainFailed("the request has no tenant: name one with --tenant, or give the request `claims` or a `peer` that names one")
    return found


class _RecordingSelector(NodeSelector):
    """The node selector of a decision that is explained: it keeps what it was asked for and what it answered."""

    __slots__ = ("placement", "routed", "scores", "size", "target_found")

    def __init__(self, load: LoadModel, members: PoolMembership) -> None:
        super().__init__(load, members)
        self.routed: Routed | None = None
        self.size: RequestSize | None = None
        self.target_found: PlacementTarget | Refusal | None = None
        self.placement: PlacementRequest | None = None
        self.scores: dict[str, tuple[float, str]] = {}
        """By node id, of every node that can take the request, at the moment of the choice."""

    def select_target(self, routed: Routed, size: RequestSize, now: float) -> PlacementTarget | Refusal:
        self.routed, self.size = routed, size
        self.target_found = super().select_target(routed, size, now)
        return self.target_found

    def choose(self, target: PlacementTarget, placement: PlacementRequest) -> tuple[Node, ...] | Refusal:
        self.placement = placement
        scorer = target.ranking.for_adapter(target.pool, self.load) if target.pool.adapter else target.ranking.strategy
        self.scores = {node.id: scorer.score(node, placement) for node in target.ranking.nodes}
        return super().choose(target, placement)


class _Unlimited:
    """Counters that grant everything, and the queue before them, in which no request waits."""

    async def reserve(self, claim: Claim) -> Granted:  # noqa: ARG002 - the port's signature
        return Granted(RateLimitStatus())

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:  # noqa: ARG002 - the port's signature
        return True

    def __len__(self) -> int:
        return 0

    def must_queue(self, claim: Claim, priority: Priority) -> bool:  # noqa: ARG002 - the port's signature
        return False

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, deadline_ms: int) -> Granted:  # noqa: ARG002
        return Granted(RateLimitStatus())


def _apply_state(selector: NodeSelector, rows: Rows) -> None:
    """Know of nodes what a running sidecar knows."""
    selector.on_breakers(BreakerSnapshots({row.node.id: row.health.to_breaker() for row in rows if row.health is not None}))
    for row in rows:
        if row.beat is not None:
            selector.load.on_reading(row.node.id, HeartbeatReading(row.beat, 0.0, row.trust))


def _placed(
    context: DecisionContext,
    known: Explanation,
    selector: _RecordingSelector,
    request: PendingRequest,
    routed: Routed,
    size: RequestSize,
    decided: Decision | Refusal,
    rows: Rows,
) -> Explanation:
    """The rest of the way: pool or fallback, node by node."""
    target, intent, placement = selector.target_found, request.intent, selector.placement
    known = replace(known, alias=routed.name)
    own = _dropped(routed.pool.name, selector, routed.versions, size, rows)
    if isinstance(decided, Refusal) and (isinstance(target, Refusal) or target is None or intent is None):
        return _answered(known, decided, own)
    assert isinstance(target, PlacementTarget)  # noqa: S101 - see above
    assert intent is not None  # noqa: S101 - see above
    if target.degraded:
        own += _dropped(target.pool.name, selector, routed.fallback_versions, size, rows)
    found = replace(
        known,
        degraded=target.degraded or None,
        scheduler=target.pool.scheduler,
        long=placement is not None and placement.long,
    )
    node_request = decided.node_request if isinstance(decided, Decision) else get_node_request(context, request, intent, target)
    if isinstance(node_request, NodeRequest):
        left_out = next((value for name, value in node_request.headers if name == DROPPED), None)
        found = replace(found, node_path=None if node_request.dialect is None else node_request.path, left_out=left_out)
    if isinstance(decided, Refusal):
        return _answered(found, decided, own)
    dropped = {each.node for each in own}
    names = tuple(node.id for node in decided.selection.nodes)
    ranked = [_ranked(node_id, target, names, score) for node_id, score in selector.scores.items() if node_id not in dropped]
    ranked.sort(key=lambda each: (each.place is None, each.place, each.score))
    wait = compute_timeouts(decided.intent, target.pool, decided.selection)
    found = replace(found, nodes=names, candidates=(*ranked, *own), timeout_ms=wait.total_ms, first_byte_ms=wait.first_byte_ms)
    fallback = decided.selection.fallback_nodes[0] if decided.selection.fallback_nodes else None
    endpoints = [decided.selection.nodes[0], *([fallback] if fallback is not None else [])]
    leaves = tuple(f"{node.id} at {node.remote.host}" for node in endpoints if node.remote is not None)
    return replace(found, sent=True, moves_to=None if fallback is None else fallback.id, leaves_site_to=leaves)


def _ranked(node_id: str, target: PlacementTarget, names: tuple[str, ...], score: tuple[float, str]) -> Candidate:
    place = names.index(node_id) + 1 if node_id in names else None
    return Candidate(node=node_id, pool=target.pool.name, place=place, score=round(score[0], 3), why=score[1])


def _answered(known: Explanation, refusal: Refusal, candidates: tuple[Candidate, ...]) -> Explanation:
    code = refusal.code
    return replace(known, candidates=candidates, refusal=code.code, status=code.status, message=refusal.message)


def _dropped(pool: str, selector: NodeSelector, versions: Constraint, size: RequestSize, rows: Rows) -> tuple[Candidate, ...]:
    """The nodes of a pool that can't take the request, and those that would belong to it but take nothing now."""
    everyone = selector.members.get_nodes(pool)
    nodes = selector.traffic_split.filter_excluded(everyone)
    summaries = {row.node.id: row.health.summary for row in rows if row.health is not None}
    shapes = filter_shapes(group_by_shape(nodes), size.to_demand(versions))
    fit = () if isinstance(shapes, Refusal) else shapes
    found = [
        Candidate(node=node.id, pool=pool, why=_why(node, versions, size))
        for node in nodes
        if NodeShape(node.version, node.max_seq_len) not in fit
    ]
    found += [
        Candidate(node=node.id, pool=pool, why=f"left out: {summaries.get(node.id, '')}")
        for node in everyone
        if (snapshot := selector.traffic_split.get_snapshot(node.id)) is not None and snapshot.excluded
    ]
    models = {node.model for node in everyone} or {row.node.model for row in rows if pool == row.node.pool}
    found += [
        Candidate(node=row.node.id, pool=pool, why=f"{row.state.value}: {row.reasons[-1] if row.reasons else 'no reason given'}")
        for row in rows
        if row.state is not NodeState.READY and row.node.model in models and row.node.pool in {"", pool}
    ]
    return tuple(found)


def _why(node: Node, versions: Constraint, size: RequestSize) -> str:
    if not versions.allows(node.version):
        return f"its version {node.version} does not meet {versions.text}"
    return f"it takes {node.max_seq_len} tokens; prompt and output need about {size.tokens}"


def members_of(rows: Rows) -> PoolMembership:
    """The nodes that requests may go to, as a running sidecar sees them."""
    nodes: dict[str, tuple[Node, ...]] = {}
    for row in rows:
        for pool in row.pools if row.state is NodeState.READY else ():
            nodes[pool] = (*nodes.get(pool, ()), row.node.to_registration().node)
    return PoolMembership(nodes, {})


def _request(text: bytes) -> RecordedRequest:
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return RecordedRequest(body=msgspec.Raw(text))  # a body that is no JSON object is explained too: it is refused
    if "body" not in parts:
        return RecordedRequest(body=msgspec.Raw(text))
    try:
        return msgspec.json.decode(text, type=RecordedRequest)
    except msgspec.ValidationError as error:
        raise ExplainFailed(f"the request does not have the shape {{path, headers, method, body}}: {error}") from None

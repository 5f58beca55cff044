"""The role `explain`: where a request would go and why: over the nodes of the configuration, or those that a running sidecar knows.

Rule: the same reading, routing and placing as in service; only the counters are not asked.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.health import BreakerSnapshots
from din_extproc.domain.membership import HeartbeatReading, NodeState
from din_extproc.domain.node import Node
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Refusal
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.node_order import DROPPED, order
from din_extproc.flow.node_selector import NodeSelector, PlacementTarget, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.screening import screened
from din_extproc.flow.timeouts import limits
from din_extproc.flow.view import facts
from din_extproc.intent.prefix import hash_prefix
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.roles.operate.unknown_tenant import stranger
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.route.table import Routed
from din_extproc.route.versions import Constraint
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pick import Demand, NodeShape, filter_shapes, group_by_shape
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explanation import Candidate, ExplainedIntent, Explanation, refused

Rows = Sequence[MemberForm]


class ExplainFailed(Exception):  # noqa: N818 - it says what the request is
    """There is nothing to explain: no such tenant, or the file holds no request."""


class RecordedRequest(Struct, frozen=True):
    """A recorded request. `body` is the JSON body itself."""

    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    method: str = "POST"
    headers: dict[str, str] = {}


def explain(settings: Settings, tenant_id: str, text: bytes, rows: Rows | None = None) -> Explanation:
    """Explain one request.

    Args:
        settings: A sound configuration.
        tenant_id: Who asks.
        text: A JSON body for chat completions, or an object of `path`, `headers`, `method` and `body`.
        rows: The nodes that a running sidecar knows, with what they say of their load; None: those of the configuration, idle.

    Raises:
        Unexplained: the tenant is unknown or the text is no request.
    """
    tenant = next((tenant for tenant in settings.tenants if tenant.id == tenant_id), None)
    if tenant is None:
        raise ExplainFailed(stranger(settings, tenant_id))
    request = _request(text)
    head = RequestHead(request.method, request.path, {name.lower(): value for name, value in request.headers.items()})
    view = make_view(settings, {})
    gauges = TokenCalibrators(view.table.preferred_model)
    reading = parse_request(head, bytes(request.body), gauges.named, view.body_limit)
    if isinstance(reading, Refusal):
        return refused(reading)
    screening = view.screenings.get(tenant.id)
    if screening is not None:
        reading = screened(reading, screening, head, gauges.named)
        if isinstance(reading, Refusal):
            return refused(reading)
    wish = ExplainedIntent.of(reading.intent, hash_prefix(reading.prompt))
    members = PoolMembership.of(settings.pools) if rows is None else members_of(rows)
    asked = (reading.intent, tenant, head, datetime.now(UTC).hour, members.versions)
    routed, tried = view.table.route(*asked), view.table.evaluate_rules(*asked)
    if isinstance(routed, Refusal):
        return refused(routed, wish, tried)
    placer = NodeSelector(LoadModel(), members)
    placer.moves = settings.in_flight
    placer.judge(BreakerSnapshots({row.node.id: row.health.standing() for row in rows or () if row.health is not None}))
    for row in rows or ():
        if row.beat is not None:
            placer.load.on_reading(row.node.id, HeartbeatReading(row.beat, 0.0))
    size = RequestSize.of(reading.intent, gauges.of(routed.model).calibration.band)
    known = Explanation(
        sent=False,
        intent=wish,
        rules=tried,
        rule=routed.rule,
        model=routed.model,
        pool=routed.pool.name,
        fallback=None if routed.fallback is None else routed.fallback.name,
    )
    output = reading.intent.output_tokens
    if output is None:
        output = facts(view, routed.model).output_tokens_default * reading.intent.answers
    ask = PlacementRequest(reading.intent.prompt_tokens, output, 0.0, prefix=hash_prefix(reading.prompt))
    return _placed(known=known, placer=placer, routed=routed, size=size, reading=reading, ask=ask, rows=rows or ())


def _placed(
    known: Explanation, placer: NodeSelector, routed: Routed, size: RequestSize, reading: ParsedRequest, ask: PlacementRequest, rows: Rows
) -> Explanation:
    """The rest of the way: pool or fallback, node by node."""
    target = placer.target(routed, size, 0.0)
    own = _dropped(routed.pool.name, placer, routed.versions, size, rows)
    if isinstance(target, Refusal):
        return _answered(known, target, own)
    if target.degraded:
        own += _dropped(target.pool.name, placer, routed.fallback_versions, size, rows)
    tail = target.ranking.tail
    found = replace(known, degraded=target.degraded or None, scheduler=target.pool.scheduler, long=tail is not None and tail.is_long(ask))
    asked = order(reading, reading.intent, target.pool)
    if isinstance(asked, Refusal):
        return _answered(found, asked, own)
    left_out = next((value for name, value in asked.headers if name == DROPPED), None)
    found = replace(found, node_path=None if asked.dialect is None else asked.path, left_out=left_out)
    dropped = {each.node for each in own}
    nodes = [node for node in placer.members.nodes(target.pool.name) if node.id not in dropped]
    scores = {node.id: target.ranking.strategy.score(node, ask) for node in nodes}
    picked = placer.pick(target, ask)
    if isinstance(picked, Refusal):
        return _answered(found, picked, own)
    names = tuple(node.id for node in picked.nodes)
    ranked = [_ranked(node_id, target, names, score) for node_id, score in scores.items()]
    ranked.sort(key=lambda each: (each.place or len(ranked) + 1, each.score))
    wait = limits(reading.intent, target.pool, picked)
    found = replace(found, nodes=names, candidates=(*ranked, *own), timeout_ms=wait.total_ms, first_byte_ms=wait.first_byte_ms)
    return replace(found, sent=True, moves_to=picked.spares[0].id if picked.spares else None)


def _ranked(node_id: str, target: PlacementTarget, names: tuple[str, ...], score: tuple[float, str]) -> Candidate:
    place = names.index(node_id) + 1 if node_id in names else None
    return Candidate(node=node_id, pool=target.pool.name, place=place, score=round(score[0], 3), why=score[1])


def _answered(known: Explanation, refusal: Refusal, candidates: tuple[Candidate, ...]) -> Explanation:
    code = refusal.code
    return replace(known, candidates=candidates, refusal=code.code, status=code.status, message=refusal.message)


def _dropped(pool: str, placer: NodeSelector, versions: Constraint, size: RequestSize, rows: Rows) -> tuple[Candidate, ...]:
    """The nodes of a pool that can't take the request, and those that would belong to it but take nothing now."""
    everyone = placer.members.nodes(pool)
    nodes = placer.shares.left(everyone)
    said = {row.node.id: row.health.said for row in rows if row.health is not None}
    shapes = filter_shapes(group_by_shape(nodes), Demand(size.tokens, size.at_least, versions.text, versions.allows))
    fit = () if isinstance(shapes, Refusal) else shapes
    found = [
        Candidate(node=node.id, pool=pool, why=_why(node, versions, size))
        for node in nodes
        if NodeShape(node.version, node.max_seq_len) not in fit
    ]
    found += [
        Candidate(node=node.id, pool=pool, why=f"left out: {said.get(node.id, '')}")
        for node in everyone
        if (standing := placer.shares.standing(node.id)) is not None and standing.excluded
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
            nodes[pool] = (*nodes.get(pool, ()), row.node.registration().node)
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

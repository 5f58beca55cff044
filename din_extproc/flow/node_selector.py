"""From a pool to a node: the pool or its fallback, the nodes that fit, and the strategy that ranks them.

Rule: what depends on nodes alone is kept in the route cache; what depends on this moment's load is asked each time. Nodes whose breaker
is open are as if they were not there, except in the reason that a client gets.
"""

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.health import BreakerSnapshots
from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import Intent
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.traffic_split import TrafficSplit, refuse_excluded
from din_extproc.route.cache import SEGMENT_TOKENS, RouteCache
from din_extproc.route.table import Routed
from din_extproc.route.versions import Constraint
from din_extproc.schedule.load import LoadModel, NodeLease
from din_extproc.schedule.pick import Demand, Fleet, NodeShape, Picker, Ranking, build_ranking, filter_shapes, group_by_shape
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.predicted_time import PredictedTime

_TRIED_NODES = 3
"""Named to Envoy: the chosen one and those that retries may try, in order."""
_FALLBACK_NODES = 2
"""Of the pool that takes over, likewise: the second one in case that a node goes before Envoy is asked for it."""
_FALLBACK_NODES_TRIED, _FALLBACK_NODES_TTL_S = 8, 0.1
"""So many requests, within so long, are given the same ones: few need them, and choosing costs each of them."""
_ANOTHER_CHANCE = 0x5DEECE66D5DEECE6
_LOOKED_AT = 8
"""Nodes that a strategy names while some get only a part of their requests."""


POOL_FULL, TOO_SLOW = "pool_full", "deadline"
OVERFLOWS = frozenset({POOL_FULL, TOO_SLOW})
"""Reasons for which the fallback gets a request that the pool could serve, too."""


class RequestSize(Struct, frozen=True, gc=False):
    """The context length in tokens that a request needs: its longest prompt and the output of one response."""

    tokens: int
    min_tokens: int
    """Lower bound of the estimate. Equal to `tokens` when the prompt was counted exactly."""
    max_tokens: int
    """Upper bound of the estimate, likewise."""
    prompt_tokens: int = 0
    """With `output_tokens`, what the answer's time depends on."""
    output_tokens: int = 0
    within_s: float | None = None
    """The client's deadline, where it decides about the pool; None: it does not."""

    @classmethod
    def of(cls, intent: Intent, band: float, *, caps_output: bool = False) -> "RequestSize":
        """By the estimate, and by what share of it, but for what was counted, it may be wrong; no output asked for: one token.

        Of a prompt that the engine cuts, and of an output that it caps, one token has to fit.
        """
        output = 1 if intent.output_each is None or caps_output else intent.output_each
        if intent.truncates:
            return cls(1 + output, 1 + output, 1 + output)
        estimate = intent.estimate.longest or intent.estimate
        tokens = estimate.tokens + output
        slack = 0 if estimate.exact else int(band * (estimate.tokens - estimate.fixed))
        return cls(tokens, tokens - slack, tokens + slack)

    def to_demand(self, versions: Constraint) -> Demand:
        """Return the request's requirements for nodes."""
        return Demand(self.tokens, self.min_tokens, self.max_tokens, versions.text, versions.allows)


class PlacementTarget(Struct, frozen=True, gc=False):
    """A possible destination of a request: a pool and its nodes."""

    pool: Pool
    ranking: Ranking
    degraded: str = ""
    """Reason why it is not the pool that the rule names first; "": it is."""
    in_flight_fallback: tuple[Pool, Ranking] | None = None
    """The pool that takes over in flight when this one's nodes fail."""


class NodeSelection(Struct, frozen=True, gc=False):
    """The destination of a request."""

    nodes: tuple[Node, ...]
    """The chosen one, then those for retries."""
    lease: NodeLease
    """The chosen one's until `free`."""
    timeout_ms: int | None = None
    """Timeout of the response; None: the pool's."""
    retries_longer: bool = False
    """The chosen one's context may turn out too short: then the next one, whose context is longer, is to be tried."""
    fallback_nodes: tuple[Node, ...] = ()
    """Of the pool that takes over: the one that is tried last, and its substitutes. Before them `nodes` has one for every try."""
    most_tries: int | None = None
    """So many at most, because any further one would be at a node of another kind; None: as often as Envoy is configured to."""


class InFlightFallback(Struct, frozen=True, gc=False):
    """Envoy's abilities for a request in flight."""

    pairs: frozenset[tuple[str, str]] = frozenset()
    """Pools, each with one to which requests can be moved."""
    tries: int = 1
    """In the first of the two, before that."""

    def intersect(self, known: "InFlightFallback") -> "InFlightFallback":
        """Those that are known already, as they are."""
        return InFlightFallback(self.pairs & known.pairs, known.tries)


class _FallbackNodes:
    """Nodes of a pool that takes over, chosen a moment ago."""

    __slots__ = ("left", "nodes", "ranking", "until")

    def __init__(self, ranking: Ranking, nodes: tuple[Node, ...], until: float) -> None:
        self.ranking = ranking
        self.nodes = nodes
        self.until = until
        self.left = _FALLBACK_NODES_TRIED


class NodeSelector:
    """One worker's view of its nodes.

    Args:
        load: What the worker's own requests take.
        members: The nodes of every pool.
        cache_ttl_s: How long the route cache keeps an entry, in seconds; a change of nodes empties it at once.
    """

    __slots__ = ("_fallback_nodes", "_fleets", "_predicted", "_ranked", "_whole", "cache", "in_flight", "load", "members", "traffic_split")

    def __init__(self, load: LoadModel, members: PoolMembership, cache_ttl_s: float = 2.0) -> None:
        self.load = load
        self.members = members
        self.cache: RouteCache[Ranking | Refusal] = RouteCache(cache_ttl_s)
        self._fleets: dict[str, Fleet] = {}
        """By pool name."""
        self._whole: dict[str, Fleet] = {}
        """Likewise, with the nodes that are left out: worked out when a request is refused."""
        self.traffic_split = TrafficSplit()
        self.in_flight = InFlightFallback()
        self._predicted: dict[str, tuple[Ranking, PredictedTime]] = {}
        """By pool name."""
        self._fallback_nodes: dict[str, _FallbackNodes] = {}
        """By pool name."""
        self._ranked: dict[tuple[str, tuple[NodeShape, ...]], Ranking] = {}
        """By pool name and shapes. Rankings outlive the cache's entries, so that a turn that was taken stays taken."""

    def select_target(self, routed: Routed, size: RequestSize, now: float) -> PlacementTarget | Refusal:
        """The pool, or its fallback when no node of the pool can take the request; the pool's own reason when neither can.

        Args:
            routed: What the route table says.
            size: How long the request is.
            now: Seconds, any monotonic clock.
        """
        gate = self.traffic_split.get_throttle(routed.pool.name)
        first = self._get_ranking(routed.pool, routed.versions, size, now)
        if isinstance(first, Refusal):
            why, refusal = first.code.code, first
            if gate is not None and gate.excluded_until is not None and first.code is RefusalCode.NO_HEALTHY_NODE:
                refusal = refuse_excluded(gate, now)
        elif gate is None or not (why := self.traffic_split.find_divert_reason(routed.pool.name, gate, now)):
            if size.tokens > first.longest and (longer := self._select_longer_fallback(routed, size, now)) is not None:
                return longer
            if routed.overflow and (crowded := self._find_crowding(routed.pool.name, first, size, now)):
                other = self._select_fallback(routed, size, now)
                if other is not None and not self._find_crowding(other[0].name, other[1], size, now):
                    return PlacementTarget(other[0], other[1], crowded)
            return PlacementTarget(routed.pool, first, in_flight_fallback=self._in_flight_fallback(routed, size, now))
        else:
            refusal = refuse_excluded(None, now)
        second = self._select_fallback(routed, size, now)
        if second is not None:
            return PlacementTarget(second[0], second[1], why)
        if isinstance(first, Refusal) or (gate is not None and gate.trial_sampler is not None):
            return refusal
        return PlacementTarget(routed.pool, first)

    def choose(self, target: PlacementTarget, request: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """Rank the nodes. Refused: it is a long request, and no node has a slot for it."""
        ranking, tries = target.ranking, self._tries(target)
        picker: Picker = ranking.strategy if ranking.tail is None or not request.long else ranking.tail
        if target.pool.adapter:
            picker = ranking.for_adapter(target.pool, self.load)
        among = max(tries, _LOOKED_AT) if ranking.mixed else tries
        nodes = (
            picker.pick(among, request)
            if not self.traffic_split.any_partial
            else self._split_traffic(target.pool.name, picker, among, request)
        )
        if ranking.tail is not None and not isinstance(nodes, Refusal) and nodes[0].id in request.full:
            return ranking.tail.refuse()
        if not ranking.mixed or isinstance(nodes, Refusal):
            return nodes
        return tuple([node for node in nodes if node.kind == nodes[0].kind][:tries])

    def select_nodes(self, target: PlacementTarget, request: PlacementRequest, chosen: tuple[Node, ...] = ()) -> NodeSelection | Refusal:
        """Choose a node, which has the request from now on: the first of `chosen` if it still serves. Refuses as `choose` does."""
        nodes = chosen if chosen and chosen[0] in target.ranking.nodes else self.choose(target, request)
        if isinstance(nodes, Refusal):
            return nodes
        tail, tries = target.ranking.tail, self._tries(target)
        longer = tries > 1 and request.worst_tokens > nodes[0].max_seq_len < target.ranking.longest
        if longer:
            nodes = _longer_second(nodes, target.ranking, tries)
            longer = len(nodes) > 1 and nodes[1].max_seq_len > nodes[0].max_seq_len
        most_tries = len(nodes) if target.ranking.mixed and len(nodes) < self.in_flight.tries else None
        spares: tuple[Node, ...] = ()
        if (
            target.in_flight_fallback is not None
            and (spares := self._select_fallback_nodes(target.in_flight_fallback[0].name, target.in_flight_fallback[1], request))
            and len(nodes) < tries
        ):
            nodes = (nodes * tries)[:tries]
        lease = NodeLease(nodes[0].id, request.prompt_tokens, request.output_tokens, long=request.long)
        timeout_ms = tail.timeout_ms if tail is not None and request.long else None
        picked = NodeSelection(nodes, lease, timeout_ms, longer, spares, most_tries=None if spares else most_tries)
        self.load.add_lease(picked.lease, request.now)
        if target.pool.adapter:
            self.load.adapters.use(picked.lease.node_id, target.pool.adapter, request.now, target.pool.adapters.slots)
        return picked

    def _tries(self, target: PlacementTarget) -> int:
        """Return the number of nodes that are named to Envoy."""
        return _TRIED_NODES if target.in_flight_fallback is None else self.in_flight.tries

    def release(self, lease: NodeLease) -> None:
        """The request has ended."""
        self.load.remove_lease(lease)

    def on_membership(self, delta: MembershipDelta) -> None:
        """Add the nodes that joined and remove those that left: later decisions name no removed node."""
        self.set_members(self.members.apply_delta(delta))

    def on_breakers(self, breakers: BreakerSnapshots) -> None:
        """Breakers opened or closed: no decision from here on names a node that is left out."""
        touched = self.traffic_split.on_breakers(breakers)
        everyone = {pool: self.members.get_nodes(pool) for pool in self.members.pools}
        pools = {pool: nodes for pool, nodes in everyone.items() if any(node.id in touched for node in nodes)}
        for pool in pools:
            self._fleets.pop(pool, None)
        self._ranked = {key: ranked for key, ranked in self._ranked.items() if key[0] not in pools}
        self.cache.clear()
        self.traffic_split.update_pools(pools | {pool: everyone[pool] for pool in breakers.pools if pool in everyone})

    def set_members(self, members: PoolMembership) -> None:
        """Nodes came, went or changed: the cache is empty at once, and only the pools they concern are ranked anew."""
        before, self.members = self.members, members
        self.load.retain(members.ids)
        self.cache.clear()
        self._fleets = {pool: fleet for pool, fleet in self._fleets.items() if members.get_nodes(pool) is before.get_nodes(pool)}
        self._ranked = {key: ranked for key, ranked in self._ranked.items() if key[0] in self._fleets}
        self._reset_rankings()

    def reset(self, members: PoolMembership) -> None:
        """The pools themselves may have changed."""
        self.members = members
        self.load.retain(members.ids)
        self.cache.clear()
        self._fleets.clear()
        self._ranked.clear()
        self._predicted.clear()
        self._fallback_nodes.clear()
        self._reset_rankings()

    def _reset_rankings(self) -> None:
        """There are other nodes than before."""
        self._whole.clear()
        self.traffic_split.retain(self.members.ids)
        self.traffic_split.update_pools({pool: self.members.get_nodes(pool) for pool in self.members.pools})

    def _select_fallback(self, routed: Routed, size: RequestSize, now: float) -> tuple[Pool, Ranking] | None:
        """The rule's other pool, when it can take the request now."""
        if routed.fallback is None:
            return None
        second = self._get_ranking(routed.fallback, routed.fallback_versions, size, now)
        if isinstance(second, Refusal):
            return None
        gate = self.traffic_split.get_throttle(routed.fallback.name)
        if gate is not None and self.traffic_split.find_divert_reason(routed.fallback.name, gate, now):
            return None
        return routed.fallback, second

    def _find_crowding(self, pool: str, ranking: Ranking, size: RequestSize, now: float) -> str:
        """Return why none of the nodes should take one more request: `pool_full`, `deadline`; "" if one should."""
        if all(self.load.node_load(node.id).is_full(node) for node in ranking.nodes):
            return POOL_FULL
        if size.within_s is None:
            return ""
        known = self._predicted.get(pool)
        if known is None or known[0] is not ranking:
            known = self._predicted[pool] = (ranking, PredictedTime(ranking.nodes, self.load))
        wanted = PlacementRequest(size.prompt_tokens, size.output_tokens, now)
        return TOO_SLOW if known[1].shortest(wanted) > size.within_s else ""

    def _select_longer_fallback(self, routed: Routed, size: RequestSize, now: float) -> PlacementTarget | None:
        """The rule's other pool for a request that is too long for this one by the estimate, when it holds it by the estimate."""
        second = self._select_fallback(routed, size, now)
        if second is None or size.tokens > second[1].longest:
            return None
        return PlacementTarget(second[0], second[1], RefusalCode.CONTEXT_LENGTH_EXCEEDED.code)

    def _in_flight_fallback(self, routed: Routed, size: RequestSize, now: float) -> tuple[Pool, Ranking] | None:
        """The pool that takes over in flight, of those nodes that can take the request."""
        fallback = routed.fallback
        if (
            fallback is None
            or routed.pool.adapter
            or fallback.adapter
            or (routed.pool.name, fallback.name) not in self.in_flight.pairs
            or self.traffic_split.get_throttle(fallback.name) is not None
        ):
            return None
        found = self._get_ranking(fallback, routed.fallback_versions, size, now)
        return None if isinstance(found, Refusal) else (fallback, found)

    def _select_fallback_nodes(self, pool: str, ranking: Ranking, request: PlacementRequest) -> tuple[Node, ...]:
        """Of the pool that takes over. What counts is who serves now: whom to try is found out by requests of that pool."""
        known = self._fallback_nodes.get(pool)
        if known is None or known.ranking is not ranking or not known.left or request.now > known.until:
            if self.traffic_split.any_partial:
                nodes = self.traffic_split.order_without_trials(ranking.strategy.pick(_LOOKED_AT, request), _FALLBACK_NODES)
            else:
                nodes = ranking.strategy.pick(_FALLBACK_NODES, request)
            known = self._fallback_nodes[pool] = _FallbackNodes(ranking, nodes, request.now + _FALLBACK_NODES_TTL_S)
        known.left -= 1
        return known.nodes

    def _split_traffic(self, pool: str, picker: Picker, tries: int, request: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """Choose while some nodes get only a fraction of their requests. A skipped node forfeits its turn: the strategy picks again."""
        shares, among = self.traffic_split, max(1, len(self.members.get_nodes(pool)))
        shares.count_request(pool)
        nodes = picker.pick(_LOOKED_AT, request)
        if isinstance(nodes, Refusal):
            return nodes
        first = shares.select_due_node(pool, nodes[:1], among, request.now)
        if first is None and not shares.are_all_partial(nodes):
            again = picker.pick(_LOOKED_AT, replace(request, chance=request.chance ^ _ANOTHER_CHANCE))
            nodes = nodes if isinstance(again, Refusal) else again
        if first is None:
            first = shares.select_due_node(pool, nodes, among, request.now) or shares.select_largest_share(nodes, request.now)
        return shares.order_for_retries(first, nodes, tries)

    def _get_ranking(self, pool: Pool, versions: Constraint, size: RequestSize, now: float) -> Ranking | Refusal:
        segment = size.max_tokens // SEGMENT_TOKENS
        key = (pool.name, versions.text, segment)
        found = self.cache.find(key, now)
        if found is None:
            upper = (segment + 1) * SEGMENT_TOKENS - 1
            found = self.cache.store(key, self._rank(pool, versions, RequestSize(upper, upper, upper)), now)
        if isinstance(found, Refusal):  # a node's limit may lie within the segment, or within the estimate's error
            found = self._rank(pool, versions, size)
        if not pool.adapter or isinstance(found, Refusal):
            return found
        return found.for_adapter(pool, self.load).refuse(now) or found

    def _rank(self, pool: Pool, versions: Constraint, size: RequestSize) -> Ranking | Refusal:
        nodes = self._fleets.get(pool.name)
        if nodes is None:
            nodes = self._fleets[pool.name] = group_by_shape(self.traffic_split.filter_excluded(self.members.get_nodes(pool.name)))
        demand = size.to_demand(versions)
        shapes = filter_shapes(nodes, demand)
        if isinstance(shapes, Refusal):
            return self._refuse(pool, demand, shapes)
        key = (pool.name, shapes)
        ranked = self._ranked.get(key)
        if ranked is None:
            chosen = tuple(node for shape in shapes for node in nodes[shape])
            ranked = self._ranked[key] = build_ranking(pool, chosen, self.load)
        return ranked

    def _refuse(self, pool: Pool, demand: Demand, refusal: Refusal) -> Refusal:
        """The reason. Where a node that is left out could take the request, that is the reason, not what the others lack."""
        everyone = self.members.get_nodes(pool.name)
        if self.traffic_split.filter_excluded(everyone) is everyone:
            return refusal
        whole = self._whole.get(pool.name)
        if whole is None:
            whole = self._whole[pool.name] = group_by_shape(everyone)
        reason = filter_shapes(whole, demand)
        return reason if isinstance(reason, Refusal) else refuse_excluded(None, 0.0)


def _longer_second(nodes: tuple[Node, ...], ranking: Ranking, tries: int) -> tuple[Node, ...]:
    """The chosen node, then one of its kind with a longer context: the best of those that were named, else any of the longest."""
    first = nodes[0]
    longer = next((node for node in nodes if node.max_seq_len > first.max_seq_len), None)
    if longer is None:
        same = [node for node in ranking.nodes if node.kind == first.kind] if ranking.mixed else ranking.nodes
        longer = max(same, key=lambda node: node.max_seq_len)
    rest = (node for node in nodes[1:] if node is not longer)
    return (first, longer, *rest)[:tries]

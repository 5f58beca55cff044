"""From a pool to a node: the pool or its fallback, the nodes that fit, and the strategy that ranks them.

Rule: what depends on nodes alone is kept in the route cache; what depends on this moment's load is asked each time.
"""

from msgspec import Struct

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.members import Members
from din_extproc.route.cache import SEGMENT_TOKENS, RouteCache
from din_extproc.route.table import Routed
from din_extproc.route.versions import Constraint
from din_extproc.schedule.load import Load
from din_extproc.schedule.pick import STRATEGIES, Demand, Fleet, Shape, Strategy, fitting, fleet

_TRIED_NODES = 3
"""Named to Envoy: the chosen one and those that retries may try, in order."""


class Size(Struct, frozen=True, gc=False):
    """How long prompt and requested output are, in tokens."""

    tokens: int
    at_least: int
    """Where the estimate may be too high: the request is at least this long. Equal to `tokens` when it was counted."""


class Target(Struct, frozen=True, gc=False):
    """Where a request can go."""

    pool: Pool
    strategy: Strategy
    degraded: str = ""
    """Why it is not the pool that the rule names first, "" when it is."""


class Placer:
    """One worker's view of its nodes.

    Args:
        load: What the worker's own requests take.
        members: The nodes of every pool.
    """

    __slots__ = ("_fleets", "_load", "_ranked", "cache", "members")

    def __init__(self, load: Load, members: Members) -> None:
        self._load = load
        self.members = members
        self.cache: RouteCache[Strategy | Refusal] = RouteCache()
        self._fleets: dict[str, Fleet] = {}
        """By pool name."""
        self._ranked: dict[tuple[str, tuple[Shape, ...]], Strategy] = {}
        """By pool name and shapes. Strategies outlive the cache's entries, so that a turn that was taken stays taken."""

    def target(self, routed: Routed, size: Size, now: float) -> Target | Refusal:
        """The pool, or its fallback when no node of the pool can take the request; the pool's own reason when neither can.

        Args:
            routed: What the route table says.
            size: How long the request is.
            now: Seconds, any monotonic clock.
        """
        first = self._strategy(routed.pool, routed.versions, size, now)
        if not isinstance(first, Refusal):
            return Target(routed.pool, first)
        if routed.fallback is not None:
            second = self._strategy(routed.fallback, routed.fallback_versions, size, now)
            if not isinstance(second, Refusal):
                return Target(routed.fallback, second, first.code.code)
        return first

    def pick(self, target: Target, tokens: int) -> tuple[Node, ...]:
        """The chosen node, then those for retries. The tokens are the chosen one's until `free`."""
        nodes = target.strategy.pick(_TRIED_NODES)
        self._load.take(nodes[0].id, tokens)
        return nodes

    def free(self, node_id: str, tokens: int) -> None:
        """The request that took the tokens has ended."""
        self._load.give(node_id, tokens)

    def in_use(self) -> dict[str, int]:
        """Tokens in flight by node id, of nodes that have any."""
        return dict(self._load.tokens)

    def change(self, members: Members) -> None:
        """Nodes came, went or changed: the cache is empty at once (R04), and only the pools they concern are ranked anew."""
        before, self.members = self.members, members
        self.cache.clear()
        self._fleets = {pool: fleet for pool, fleet in self._fleets.items() if members.nodes(pool) is before.nodes(pool)}
        self._ranked = {key: ranked for key, ranked in self._ranked.items() if key[0] in self._fleets}

    def forget(self, members: Members) -> None:
        """The pools themselves may have changed."""
        self.members = members
        self.cache.clear()
        self._fleets.clear()
        self._ranked.clear()

    def _strategy(self, pool: Pool, versions: Constraint, size: Size, now: float) -> Strategy | Refusal:
        segment = size.tokens // SEGMENT_TOKENS
        key = (pool.name, versions.text, segment)
        found = self.cache.find(key, now)
        if found is None:
            upper = (segment + 1) * SEGMENT_TOKENS - 1
            found = self.cache.keep(key, self._rank(pool, versions, upper, upper), now)
        if isinstance(found, Refusal):  # a node's limit may lie within the segment, or within the estimate's error
            return self._rank(pool, versions, size.tokens, size.at_least)
        return found

    def _rank(self, pool: Pool, versions: Constraint, tokens: int, at_least: int) -> Strategy | Refusal:
        nodes = self._fleets.get(pool.name)
        if nodes is None:
            nodes = self._fleets[pool.name] = fleet(self.members.nodes(pool.name))
        shapes = fitting(nodes, Demand(tokens, at_least, versions.text, versions.allows))
        if isinstance(shapes, Refusal):
            return shapes
        key = (pool.name, shapes)
        ranked = self._ranked.get(key)
        if ranked is None:
            chosen = tuple(node for shape in shapes for node in nodes[shape])
            ranked = self._ranked[key] = STRATEGIES[pool.scheduler](chosen, self._load)
        return ranked

"""From a pool to a node: the pool or its fallback, the nodes that fit, and the strategy that ranks them.

Rule: what depends on nodes alone is kept in the route cache; what depends on this moment's load is asked each time.
"""

from collections.abc import Iterable

from msgspec import Struct

from din_extproc.domain.membership import Reading
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import Estimate
from din_extproc.domain.usage import Pace
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.members import Members
from din_extproc.route.cache import SEGMENT_TOKENS, RouteCache
from din_extproc.route.table import Routed
from din_extproc.route.versions import Constraint
from din_extproc.schedule.ask import Ask
from din_extproc.schedule.load import Load, Taken
from din_extproc.schedule.pick import Demand, Fleet, Ranking, Shape, fitting, fleet, ranking

_TRIED_NODES = 3
"""Named to Envoy: the chosen one and those that retries may try, in order."""


class Size(Struct, frozen=True, gc=False):
    """How long prompt and requested output are, in tokens."""

    tokens: int
    at_least: int
    """Where the estimate may be too high: the request is at least this long. Equal to `tokens` when it was counted."""

    @classmethod
    def of(cls, estimate: Estimate, output_tokens: int | None, band: float) -> "Size":
        """By the estimate, and by what share of it, but for what was counted, it may be wrong; no output asked for: one token."""
        tokens = estimate.tokens + (1 if output_tokens is None else output_tokens)
        return cls(tokens, tokens if estimate.exact else tokens - int(band * (estimate.tokens - estimate.fixed)))


class Target(Struct, frozen=True, gc=False):
    """Where a request can go."""

    pool: Pool
    ranking: Ranking
    degraded: str = ""
    """Why it is not the pool that the rule names first, "" when it is."""


class Picked(Struct, frozen=True, gc=False):
    """Where a request goes."""

    nodes: tuple[Node, ...]
    """The chosen one, then those for retries."""
    taken: Taken
    """The chosen one's until `free`."""
    timeout_ms: int | None = None
    """How long the answer may take; None: as long as any."""


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
        self.cache: RouteCache[Ranking | Refusal] = RouteCache()
        self._fleets: dict[str, Fleet] = {}
        """By pool name."""
        self._ranked: dict[tuple[str, tuple[Shape, ...]], Ranking] = {}
        """By pool name and shapes. Rankings outlive the cache's entries, so that a turn that was taken stays taken."""

    def target(self, routed: Routed, size: Size, now: float) -> Target | Refusal:
        """The pool, or its fallback when no node of the pool can take the request; the pool's own reason when neither can.

        Args:
            routed: What the route table says.
            size: How long the request is.
            now: Seconds, any monotonic clock.
        """
        first = self._ranking(routed.pool, routed.versions, size, now)
        if not isinstance(first, Refusal):
            return Target(routed.pool, first)
        if routed.fallback is not None:
            second = self._ranking(routed.fallback, routed.fallback_versions, size, now)
            if not isinstance(second, Refusal):
                return Target(routed.fallback, second, first.code.code)
        return first

    def pick(self, target: Target, ask: Ask) -> Picked | Refusal:
        """Choose a node, which has the request from now on. Refused: it is a long one, and no node has a slot for it."""
        tail = target.ranking.tail
        if tail is None or not tail.is_long(ask):
            nodes = target.ranking.strategy.pick(_TRIED_NODES, ask)
            picked = Picked(nodes, Taken(nodes[0].id, ask.prompt_tokens, ask.output_tokens))
        else:
            found = tail.pick(_TRIED_NODES, ask)
            if isinstance(found, Refusal):
                return found
            picked = Picked(found, Taken(found[0].id, ask.prompt_tokens, ask.output_tokens, long=True), tail.timeout_ms)
        self._load.take(picked.taken, ask.now)
        return picked

    def free(self, taken: Taken) -> None:
        """The request has ended."""
        self._load.give(taken)

    def hear(self, node_id: str, reading: Reading) -> None:
        """A node has said how it does."""
        self.members.hear(node_id, reading)
        self._load.hear(node_id, reading)

    def learn(self, paces: Iterable[Pace]) -> None:
        """Finished exchanges have taught how quick nodes are."""
        self._load.learn(paces)

    def in_use(self) -> dict[str, int]:
        """Tokens in flight by node id, of nodes that have any."""
        return self._load.in_use()

    def change(self, members: Members) -> None:
        """Nodes came, went or changed: the cache is empty at once (R04), and only the pools they concern are ranked anew."""
        before, self.members = self.members, members
        self._load.keep(members.ids)
        self.cache.clear()
        self._fleets = {pool: fleet for pool, fleet in self._fleets.items() if members.nodes(pool) is before.nodes(pool)}
        self._ranked = {key: ranked for key, ranked in self._ranked.items() if key[0] in self._fleets}

    def forget(self, members: Members) -> None:
        """The pools themselves may have changed."""
        self.members = members
        self._load.keep(members.ids)
        self.cache.clear()
        self._fleets.clear()
        self._ranked.clear()

    def _ranking(self, pool: Pool, versions: Constraint, size: Size, now: float) -> Ranking | Refusal:
        segment = size.tokens // SEGMENT_TOKENS
        key = (pool.name, versions.text, segment)
        found = self.cache.find(key, now)
        if found is None:
            upper = (segment + 1) * SEGMENT_TOKENS - 1
            found = self.cache.keep(key, self._rank(pool, versions, upper, upper), now)
        if isinstance(found, Refusal):  # a node's limit may lie within the segment, or within the estimate's error
            return self._rank(pool, versions, size.tokens, size.at_least)
        return found

    def _rank(self, pool: Pool, versions: Constraint, tokens: int, at_least: int) -> Ranking | Refusal:
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
            ranked = self._ranked[key] = ranking(pool, chosen, self._load)
        return ranked

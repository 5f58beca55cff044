"""The traffic shares of nodes and pools whose breakers are not closed, as one worker applies them.

Rule: shares are counted, never drawn: a node at a twentieth gets every twentieth of the requests that would be its own. Closed breakers
cost nothing; the set of open ones is computed when it changes, not per request.
"""

from collections.abc import Mapping

from msgspec import Struct

from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState
from din_extproc.domain.node import Node
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode

_TRIAL_RETRY_S = 1.0
_ONE = 1.0 - 1e-9
_MOST_CREDIT = 2.0


class FractionalSampler:
    """Selects a fraction of the requests, evenly spaced: the fraction that a breaker lets through."""

    __slots__ = ("_credit", "_last_request_number", "breaker")

    def __init__(self, breaker: BreakerSnapshot, request_number: int) -> None:
        self.breaker = breaker
        self._credit = 0.0
        self._last_request_number = request_number

    def take_credit(self, request_number: int, among: int, now: float) -> bool:
        """Return whether to select this request, one of a sequence that `among` samplers share. Unused credit is kept for one request."""
        earned = (request_number - self._last_request_number) * self.breaker.share(now) / among
        self._last_request_number = request_number
        self._credit = min(_MOST_CREDIT, self._credit + earned)
        if self._credit < _ONE:
            return False
        self._credit -= 1.0
        return True


class PoolThrottle(Struct, frozen=True):
    """A pool of which something is known."""

    excluded_until: float | None = None
    """Every node is open or cooling; until when at least. None: not so."""
    trial_sampler: FractionalSampler | None = None
    """None of its nodes may have more than trial requests."""
    breaker_sampler: FractionalSampler | None = None
    """The pool's own."""


_NOTHING = PoolThrottle()


class TrafficSplit:
    """The standings of one worker, and the turns that it counted."""

    __slots__ = ("_open", "_partial", "_pool_request_numbers", "_pools", "_request_numbers", "_samplers", "_throttles")

    def __init__(self) -> None:
        self._open: dict[str, BreakerSnapshot] = {}
        """By node id."""
        self._partial: dict[str, BreakerSnapshot] = {}
        """By node id, of nodes that get a part."""
        self._pools: dict[str, BreakerSnapshot] = {}
        self._throttles: dict[str, PoolThrottle] = {}
        """By pool, as are the next two."""
        self._pool_request_numbers: dict[str, int] = {}
        self._request_numbers: dict[str, int] = {}
        self._samplers: dict[tuple[str, str], FractionalSampler] = {}
        """By pool and node id."""

    def on_breakers(self, breakers: BreakerSnapshots) -> frozenset[str]:
        """Breakers changed. Returns the nodes of which something else holds now."""
        for node_id, breaker in breakers.nodes.items():
            self._open.pop(node_id, None)
            self._partial.pop(node_id, None)
            if breaker.excluded:
                self._open[node_id] = breaker
            elif breaker.state is not BreakerState.CLOSED:
                self._partial[node_id] = breaker
        for pool, breaker in breakers.pools.items():
            self._pools.pop(pool, None)
            if breaker.state is not BreakerState.CLOSED:
                self._pools[pool] = breaker
        self._samplers = {key: meter for key, meter in self._samplers.items() if key[1] not in breakers.nodes}
        return frozenset(breakers.nodes)

    def retain(self, node_ids: set[str]) -> None:
        """Forget every other node."""
        for known in (self._open, self._partial):
            for node_id in known.keys() - node_ids:
                del known[node_id]

    def update_pools(self, pools: Mapping[str, tuple[Node, ...]]) -> None:
        """Work out how these pools stand, by name with all their nodes, after something about them has changed."""
        for name, nodes in pools.items():
            request_number = self._pool_request_numbers.setdefault(name, 0)
            breaker = self._pools.get(name)
            gate = PoolThrottle(
                *self._summarize_nodes(nodes, request_number), None if breaker is None else FractionalSampler(breaker, request_number)
            )
            if gate == _NOTHING:
                self._throttles.pop(name, None)
            else:
                self._throttles[name] = gate

    def filter_excluded(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Those that are not left out; the same tuple when none is."""
        opened = self._open
        if not opened or not any(node.id in opened for node in nodes):
            return nodes
        return tuple(node for node in nodes if node.id not in opened)

    def get_throttle(self, pool: str) -> PoolThrottle | None:
        """The throttle of the pool; None: there is none."""
        return self._throttles.get(pool)

    def find_divert_reason(self, pool: str, gate: PoolThrottle, now: float) -> str:
        """Return why the request must go to another pool; "": it passes. Call it once per request: it counts."""
        number = self._pool_request_numbers[pool] = self._pool_request_numbers[pool] + 1
        if gate.trial_sampler is not None and not gate.trial_sampler.take_credit(number, 1, now):
            return "half_open"
        if gate.breaker_sampler is not None and not gate.breaker_sampler.take_credit(number, 1, now):
            return f"breaker_{gate.breaker_sampler.breaker.state.value}"
        return ""

    @property
    def any_partial(self) -> bool:
        """Return whether any node gets only a part of its requests."""
        return bool(self._partial)

    def count_request(self, pool: str) -> int:
        """One more request for a node of the pool. Returns which one it is."""
        number = self._request_numbers[pool] = self._request_numbers.get(pool, 0) + 1
        return number

    def select_due_node(self, pool: str, nodes: tuple[Node, ...], among: int, now: float) -> Node | None:
        """The first of these that may have the pool's present number, of so many nodes that share turns; None: none."""
        number = self._request_numbers[pool]
        for node in nodes:
            breaker = self._partial.get(node.id)
            if breaker is None:
                return node
            meter = self._samplers.get((pool, node.id))
            if meter is None:
                meter = self._samplers[pool, node.id] = FractionalSampler(breaker, number - 1)
            if meter.take_credit(number, among, now):
                return node
        return None

    def are_all_partial(self, nodes: tuple[Node, ...]) -> bool:
        """Return whether each of the nodes gets only a part of its requests."""
        return all(node.id in self._partial for node in nodes)

    def select_largest_share(self, nodes: tuple[Node, ...], now: float) -> Node:
        """The one with the largest share, for when none is due."""
        return max(nodes, key=lambda node: 1.0 if (breaker := self._partial.get(node.id)) is None else breaker.share(now))

    def order_for_retries(self, first: Node, nodes: tuple[Node, ...], count: int) -> tuple[Node, ...]:
        """The first, then those that a retry may try: whole ones, then those that ramp up; one on trial only where there is no other."""
        rest = sorted((node for node in nodes if node is not first), key=lambda node: self._rank(node.id))
        while len(rest) > 1 and self._rank(rest[-1].id) > 1:
            rest.pop()
        return (first, *rest[: count - 1])

    def order_without_trials(self, nodes: tuple[Node, ...], count: int) -> tuple[Node, ...]:
        """Of these, whole ones, then those that ramp up; none on trial."""
        return tuple(sorted((node for node in nodes if self._rank(node.id) <= 1), key=lambda node: self._rank(node.id)))[:count]

    def get_snapshot(self, node_id: str) -> BreakerSnapshot | None:
        """Return the snapshot of a node's breaker; None: it is closed."""
        return self._open.get(node_id) or self._partial.get(node_id)

    def _rank(self, node_id: str) -> int:
        breaker = self._partial.get(node_id)
        return 0 if breaker is None else 1 if breaker.state is BreakerState.RAMPING else 2

    def _summarize_nodes(self, nodes: tuple[Node, ...], request_number: int) -> tuple[float | None, FractionalSampler | None]:
        """Until when all of them are left out, or the trial that all of them are on at most."""
        found = []
        for node in nodes:
            breaker = self.get_snapshot(node.id)
            if breaker is None or breaker.state is BreakerState.RAMPING:
                return None, None
            found.append(breaker)
        trial = next((each for each in found if each.state is BreakerState.HALF_OPEN), None)
        if trial is not None:
            return None, FractionalSampler(trial, request_number)
        return min((each.until or 0.0 for each in found), default=None), None


def refuse_excluded(gate: PoolThrottle | None, now: float) -> Refusal:
    """The answer while every node that could take the request is left out, with the time until one is tried again."""
    wait_s = _TRIAL_RETRY_S if gate is None or gate.excluded_until is None else max(_TRIAL_RETRY_S, gate.excluded_until - now)
    headers: Headers = (("retry-after", str(-int(-wait_s // 1))), ("retry-after-ms", str(round(wait_s * 1000))))
    message = "Every node that could answer has failed lately, or is busy, and is left alone for a while."
    return Refusal(RefusalCode.NO_HEALTHY_NODE, message, retry_after_ms=round(wait_s * 1000), headers=headers)

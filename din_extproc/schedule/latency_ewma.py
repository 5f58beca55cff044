"""Latency: the node whose recent P99, times the requests in line there, is least (R20). For nodes that differ in pace but not in size.

Rule: a P99 that nobody confirms fades toward what is usual in the pool, so that no node is feared or trusted for ever; and what is
under way counts, or every request would run to the node that was quickest a moment ago.
"""

from math import exp, log
from typing import Annotated

from msgspec import Meta, Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pace import HALF_LIFE_S
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SIZE, sample
from din_extproc.schedule.typical import Typical

_NOTHING_KNOWN_MS = 1000.0


class LatencyEwmaOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How it remembers."""

    half_life_s: Annotated[float, Meta(gt=0, le=3600)] = HALF_LIFE_S
    """After so long an old reading counts half: against newer ones, and against what is usual when none comes."""


class LatencyEwma:
    """Ranks a sample of one set of nodes by P99 times requests."""

    __slots__ = ("_decay", "_load", "_loads", "_nodes", "_typical")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, options: LatencyEwmaOptions) -> None:
        self._nodes = nodes
        self._load = load
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._typical = Typical(nodes, load)
        self._decay = log(2) / options.half_life_s

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:
        """The node with the shortest wait in sight, then the next ones: at most `count`, all different."""
        nodes, loads = self._nodes, self._loads
        self._typical.follow()
        ranks = []
        for place, index in enumerate(sample(len(nodes), SIZE, ask.chance)):
            load = loads[index]
            requests = load.requests_in_use
            ranks.append((load.is_full(nodes[index]), self._p99_ms(index, ask.now) * (requests + 1), place, index))
        ranks.sort()
        return tuple([nodes[rank[3]] for rank in ranks[:count]])

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:
        """Milliseconds times requests."""
        self._typical.follow()
        p99_ms = self._p99_ms(self._nodes.index(node), ask.now)
        requests = self._load.of(node.id).requests_in_use + 1
        return p99_ms * requests, f"P99 {p99_ms:.0f} ms, {requests} in line"

    def _p99_ms(self, index: int, now: float) -> float:
        load, usual = self._loads[index], self._typical.p99_ms
        if usual is None:
            return _NOTHING_KNOWN_MS
        if load.p99_ms is None:
            return usual
        return usual + (load.p99_ms - usual) * exp((load.p99_at - now) * self._decay)

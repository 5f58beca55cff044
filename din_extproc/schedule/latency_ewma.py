"""Latency strategy: the node with the smallest recent P99 times requests. For nodes that differ in speed but not in size.

A P99 without new readings decays toward the pool's mean. Requests in flight count, or all would go to the node that was fastest last.
"""

from math import exp, log
from typing import Annotated

from msgspec import Meta, Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pace import HALF_LIFE_S
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SAMPLE_SIZE, sample
from din_extproc.schedule.typical import Typical

_DEFAULT_P99_MS = 1000.0


class LatencyEwmaOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the latency strategy."""

    half_life_s: Annotated[float, Meta(gt=0, le=3600)] = HALF_LIFE_S
    """The age at which a reading has half its weight, against newer ones or against the pool's mean."""


class LatencyEwma:
    """Ranks a sample of one set of nodes by P99 times requests."""

    __slots__ = ("_decay", "_load", "_loads", "_nodes", "_typical")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, options: LatencyEwmaOptions) -> None:
        self._nodes = nodes
        self._load = load
        self._loads = tuple(load.node_load(node.id) for node in nodes)
        self._typical = Typical(nodes, load)
        self._decay = log(2) / options.half_life_s

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:
        """Return the nodes with the shortest predicted wait, best first: at most `count`, all different."""
        nodes, loads = self._nodes, self._loads
        self._typical.update()
        ranks = []
        for place, index in enumerate(sample(len(nodes), SAMPLE_SIZE, request.chance)):
            load = loads[index]
            requests = load.requests_in_use
            ranks.append((load.is_full(nodes[index]), self._get_p99_ms(index, request.now) * (requests + 1), place, index))
        ranks.sort()
        return tuple([nodes[rank[3]] for rank in ranks[:count]])

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:
        """Return milliseconds times requests, with an explanation."""
        self._typical.update()
        p99_ms = self._get_p99_ms(self._nodes.index(node), request.now)
        requests = self._load.node_load(node.id).requests_in_use + 1
        return p99_ms * requests, f"P99 {p99_ms:.0f} ms, {requests} in line"

    def _get_p99_ms(self, index: int, now: float) -> float:
        load, usual = self._loads[index], self._typical.p99_ms
        if usual is None:
            return _DEFAULT_P99_MS
        if load.p99_ms is None:
            return usual
        return usual + (load.p99_ms - usual) * exp((load.p99_at - now) * self._decay)

"""Prefix affinity: prompts with a common prefix, or of one session, go to one node, whose cache holds that prefix, while it has headroom.

No prompts are stored. Consistent hashing maps a prefix to nodes, so all workers and gateways agree, and a membership change moves only the
prefixes of the nodes concerned.
"""

from bisect import bisect_right
from typing import Annotated
from zlib import crc32

from msgspec import Meta, Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.predicted_time import PredictedTime

_CANDIDATES = 3
"""The number of candidate nodes per prefix: the next one is used while the previous one lacks headroom."""
_RING_POINTS = 8192
"""Approximate number of points on the ring; each node has at fastest two."""
_MAX_NODE_POINTS = 64
_LEAST_BENEFIT = 0.25
"""The part of the headroom that a node without hits keeps, so that a cache that is cold is given prefixes to keep."""
_FULL_BENEFIT = 0.3
"""The share of hits from which a node has the whole headroom."""
_HASH_MULTIPLIER = 0x9E3779B1
"""Multiplier that spreads prefixes which differ in one bit: a prime near 2**32 over the golden ratio (Knuth)."""


class PrefixAffinityOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of prefix affinity."""

    headroom: Annotated[float, Meta(ge=1, le=100)] = 1.5
    """A prefix stays at its node while the request takes at most this many times the predicted time of the fastest sampled node.

    Where the node reports hits of its prefix cache, the time that they save is deducted and the headroom is weighed by their share.
    """


class PrefixAffinity:
    """Ranks one set of nodes: the prefix's candidates while they have headroom, then by predicted time."""

    __slots__ = ("_headroom", "_nodes", "_owners", "_points", "_predicted")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, options: PrefixAffinityOptions) -> None:
        self._nodes = nodes
        self._predicted = PredictedTime(nodes, load)
        self._headroom = options.headroom
        each = max(2, min(_MAX_NODE_POINTS, _RING_POINTS // len(nodes)))
        ring = sorted((crc32(b"%d %b" % (point, node.id.encode())), index) for index, node in enumerate(nodes) for point in range(each))
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:
        """Return the prefix's nodes, then the fastest ones: at most `count`, all different."""
        ranks = self._predicted.rank_sample(request)
        if not request.prefix:
            return tuple([self._nodes[rank[3]] for rank in ranks[:count]])
        full, fastest, _, _ = ranks[0]
        candidates = []
        for index in self._find_candidates(request.prefix):
            rank = self._predicted.rank_node(index, 0, request)
            if rank[0] <= full and self._has_headroom(index, rank[1], fastest, request):
                candidates.append(index)
        order = dict.fromkeys([*candidates, *[rank[3] for rank in ranks]])
        return tuple([self._nodes[index] for index in order][:count])

    def _has_headroom(self, index: int, seconds: float, fastest: float, request: PlacementRequest) -> bool:
        """Return whether the node may be slower than the fastest one by this much, given what its cache has brought lately."""
        saving = self._predicted.predict_saving(index, request)
        if saving is None:
            return seconds <= fastest * self._headroom
        share, saved = saving
        return seconds - saved <= fastest * (1.0 + (self._headroom - 1.0) * max(_LEAST_BENEFIT, min(1.0, share / _FULL_BENEFIT)))

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:
        """Return the predicted seconds, with an explanation that includes the prefix's candidates."""
        seconds, why = self._predicted.score(node, request)
        candidates = self._find_candidates(request.prefix) if request.prefix else []
        index = self._nodes.index(node)
        return seconds, f"{why}; choice {candidates.index(index) + 1} of the session or prefix" if index in candidates else why

    def _find_candidates(self, prefix: int) -> list[int]:
        """Return the different nodes that follow the prefix on the ring."""
        points, owners = self._points, self._owners
        start = bisect_right(points, (prefix * _HASH_MULTIPLIER) & 0xFFFFFFFF)
        candidates: list[int] = []
        for step in range(min(len(owners), 4 * _CANDIDATES)):
            owner = owners[(start + step) % len(owners)]
            if owner not in candidates:
                candidates.append(owner)
                if len(candidates) == _CANDIDATES:
                    break
        return candidates

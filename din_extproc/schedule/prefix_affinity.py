"""Prefix affinity: requests whose prompts begin alike go to one node, which has read that beginning before, while it has headroom.

Rule: no memory of prompts. The prefix's place on a ring of nodes says where it belongs, so every worker and every gateway says the same;
a node's coming or going moves only what was, or will be, its own.
"""

from bisect import bisect_right
from typing import Annotated
from zlib import crc32

from msgspec import Meta, Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.predicted_time import PredictedTime

_HOMES = 3
"""Nodes in line for one prefix: it moves on to the next while the first has no headroom."""
_POINTS = 8192
"""On the ring, about; each node has at least two."""
_MOST_POINTS = 64
_MIXED = 0x9E3779B1
"""Spreads prefixes that differ in a bit: a prime near 2**32 over the golden ratio (Knuth)."""


class PrefixAffinityOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """When a prefix leaves its node."""

    headroom: Annotated[float, Meta(ge=1, le=100)] = 1.5
    """It stays while its request would take at most so many times what it would take at the quickest node looked at."""


class PrefixAffinity:
    """Ranks one set of nodes: the prefix's own ones while they have headroom, then by predicted time."""

    __slots__ = ("_headroom", "_nodes", "_owners", "_points", "_predicted")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, options: PrefixAffinityOptions) -> None:
        self._nodes = nodes
        self._predicted = PredictedTime(nodes, load)
        self._headroom = options.headroom
        each = max(2, min(_MOST_POINTS, _POINTS // len(nodes)))
        ring = sorted((crc32(b"%d %b" % (point, node.id.encode())), index) for index, node in enumerate(nodes) for point in range(each))
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:
        """The prefix's node, then the next ones: at most `count`, all different."""
        ranks = self._predicted.ranked(ask)
        if not ask.prefix:
            return tuple([self._nodes[rank[3]] for rank in ranks[:count]])
        full, least, _, _ = ranks[0]
        limit = least * self._headroom
        homes = []
        for index in self._homes(ask.prefix):
            rank = self._predicted.rank(index, 0, ask)
            if rank[0] <= full and rank[1] <= limit:
                homes.append(index)
        order = dict.fromkeys([*homes, *[rank[3] for rank in ranks]])
        return tuple([self._nodes[index] for index in order][:count])

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:
        """Seconds, and whether the prefix belongs there."""
        seconds, why = self._predicted.score(node, ask)
        homes = self._homes(ask.prefix) if ask.prefix else []
        index = self._nodes.index(node)
        return seconds, f"{why}; choice {homes.index(index) + 1} of the prefix" if index in homes else why

    def _homes(self, prefix: int) -> list[int]:
        """The different nodes that follow the prefix on the ring."""
        points, owners = self._points, self._owners
        start = bisect_right(points, (prefix * _MIXED) & 0xFFFFFFFF)
        homes: list[int] = []
        for step in range(min(len(owners), 4 * _HOMES)):
            owner = owners[(start + step) % len(owners)]
            if owner not in homes:
                homes.append(owner)
                if len(homes) == _HOMES:
                    break
        return homes

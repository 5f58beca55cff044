"""Token margin: the node with the most room, `max_seq_len - tokens in use` (R20). For nodes of unequal strength.

Rule: never scan the nodes. A heap keeps them ranked; a node whose load rose is put back when it comes up,
a node whose load fell is pushed again because `LoadModel` noted it.
"""

from heapq import heapify, heappop, heappush, heapreplace

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

_Rank = tuple[bool, int, int, int]
"""(full, -margin, turn, index): those with a free slot first, of them most room, and among equals the one picked longest ago."""


class TokenAvailableOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The token margin has none."""


class TokenAvailable:
    """Ranks one set of nodes by the tokens they have left."""

    __slots__ = ("_heap", "_index", "_load", "_loads", "_nodes", "_read", "_turn")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: TokenAvailableOptions) -> None:
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._turn = len(nodes)
        self._heap: list[_Rank] = []
        self._read = 0
        self._rank_all()

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:  # noqa: ARG002 - room is room, whatever is asked
        """The node with the most room, then the next ones: at most `count`, all different."""
        self._follow_falls()
        chosen: list[_Rank] = []
        nodes: list[Node] = []
        seen: set[int] = set()
        while self._heap and len(nodes) < count:
            rank = self._settled_top()
            heappop(self._heap)
            if rank[3] in seen:  # an older, equal entry of the same node
                continue
            seen.add(rank[3])
            chosen.append(rank)
            nodes.append(self._nodes[rank[3]])
        for place, rank in enumerate(chosen):
            if place == 0:  # who is picked goes behind its equals
                self._turn += 1
                heappush(self._heap, (rank[0], rank[1], self._turn, rank[3]))
            else:
                heappush(self._heap, rank)
        return tuple(nodes)

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:  # noqa: ARG002 - room is room, whatever is asked
        """The margin, turned over."""
        margin = node.max_seq_len - self._load.of(node.id).tokens_in_use
        return -margin, f"{margin} tokens left"

    def _settled_top(self) -> _Rank:
        """Put back what promises more room than it has, until the first entry tells the truth."""
        while True:
            top = self._heap[0]
            full, margin = self._standing(top[3])
            if (top[0], top[1]) >= (full, margin):
                return top
            heapreplace(self._heap, (full, margin, top[2], top[3]))

    def _follow_falls(self) -> None:
        fallen = self._load.fallen
        if self._read == fallen.end:
            return
        ids = fallen.since(self._read)
        if ids is None or len(ids) > len(self._nodes) or len(self._heap) > 2 * len(self._nodes) + 64:
            self._rank_all()
            return
        for node_id in ids:
            index = self._index.get(node_id)
            if index is not None:
                self._turn += 1
                heappush(self._heap, (*self._standing(index), self._turn, index))
        self._read = fallen.end

    def _rank_all(self) -> None:
        self._heap = [(*self._standing(index), index, index) for index in range(len(self._nodes))]
        heapify(self._heap)
        self._read = self._load.fallen.end

    def _standing(self, index: int) -> tuple[bool, int]:
        node, load = self._nodes[index], self._loads[index]
        return load.is_full(node), load.tokens_in_use - node.max_seq_len

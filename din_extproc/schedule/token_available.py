"""Token margin: the node with the most room, `max_seq_len - tokens in use` (R20). For nodes of unequal strength.

Rule: never scan the nodes. A heap keeps them ranked; a node whose load rose is put back when it comes up,
a node whose load fell is pushed again because `Load` noted it.
"""

from heapq import heapify, heappop, heappush, heapreplace

from din_extproc.domain.node import Node
from din_extproc.schedule.load import Load

_Rank = tuple[int, int, int]
"""(-margin, turn, index): most room first, and among equals the one picked longest ago."""


class TokenAvailable:
    """Ranks one set of nodes by the tokens they have left."""

    __slots__ = ("_heap", "_index", "_load", "_nodes", "_read", "_turn")

    def __init__(self, nodes: tuple[Node, ...], load: Load) -> None:
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._turn = len(nodes)
        self._heap: list[_Rank] = []
        self._read = 0
        self._rank_all()

    def pick(self, count: int) -> tuple[Node, ...]:
        """The node with the most room, then the next ones: at most `count`, all different."""
        self._follow_falls()
        chosen: list[_Rank] = []
        nodes: list[Node] = []
        seen: set[int] = set()
        while self._heap and len(nodes) < count:
            rank = self._settled_top()
            heappop(self._heap)
            if rank[2] in seen:  # an older, equal entry of the same node
                continue
            seen.add(rank[2])
            chosen.append(rank)
            nodes.append(self._nodes[rank[2]])
        for place, rank in enumerate(chosen):
            if place == 0:  # who is picked goes behind its equals
                self._turn += 1
                heappush(self._heap, (rank[0], self._turn, rank[2]))
            else:
                heappush(self._heap, rank)
        return tuple(nodes)

    def _settled_top(self) -> _Rank:
        """Put back what promises more room than it has, until the first entry tells the truth."""
        while True:
            top = self._heap[0]
            margin = self._margin(top[2])
            if -top[0] <= margin:
                return top
            heapreplace(self._heap, (-margin, top[1], top[2]))

    def _follow_falls(self) -> None:
        fallen = self._load.fallen
        ids = fallen.since(self._read)
        if ids is None or len(self._heap) > 2 * len(self._nodes) + 64:
            self._rank_all()
            return
        for node_id in ids:
            index = self._index.get(node_id)
            if index is not None:
                self._turn += 1
                heappush(self._heap, (-self._margin(index), self._turn, index))
        self._read = fallen.end

    def _rank_all(self) -> None:
        self._heap = [(-self._margin(index), index, index) for index in range(len(self._nodes))]
        heapify(self._heap)
        self._read = self._load.fallen.end

    def _margin(self, index: int) -> int:
        node = self._nodes[index]
        return node.max_seq_len - self._load.tokens_in_use(node.id)

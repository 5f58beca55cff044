"""Token margin: the node with the most room, `max_seq_len - tokens in use`. For nodes of unequal capacity.

Nodes are never scanned. A heap ranks them; a node whose load rose is corrected when it reaches the top, a node whose load fell is pushed
again from `LoadModel`'s change log.
"""

from heapq import heapify, heappop, heappush, heapreplace

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

_Rank = tuple[bool, int, int, int]
"""(full, -margin, turn, index): nodes with a free slot first, then by room, then least recently picked."""


class TokenAvailableOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The token margin has no options."""


class TokenAvailable:
    """Ranks one set of nodes by free tokens."""

    __slots__ = ("_heap", "_index", "_load", "_loads", "_nodes", "_order", "_read")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: TokenAvailableOptions) -> None:
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._loads = tuple(load.node_load(node.id) for node in nodes)
        self._order = len(nodes)
        self._heap: list[_Rank] = []
        self._read = 0
        self._rank_all()

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:  # noqa: ARG002 - independent of the request
        """Return the nodes with the most room, best first: at most `count`, all different."""
        self._apply_load_drops()
        chosen: list[_Rank] = []
        nodes: list[Node] = []
        seen: set[int] = set()
        while self._heap and len(nodes) < count:
            rank = self._correct_top()
            heappop(self._heap)
            if rank[3] in seen:  # an older, equal entry of the same node
                continue
            seen.add(rank[3])
            chosen.append(rank)
            nodes.append(self._nodes[rank[3]])
        for place, rank in enumerate(chosen):
            if place == 0:  # # the picked node goes behind its equals
                self._order += 1
                heappush(self._heap, (rank[0], rank[1], self._order, rank[3]))
            else:
                heappush(self._heap, rank)
        return tuple(nodes)

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:  # noqa: ARG002 - independent of the request
        """Return the negative margin with an explanation."""
        margin = node.max_seq_len - self._load.node_load(node.id).tokens_in_use
        return -margin, f"{margin} tokens left"

    def _correct_top(self) -> _Rank:
        """Correct outdated entries at the top of the heap until the first one is accurate."""
        while True:
            top = self._heap[0]
            full, margin = self._rank_key(top[3])
            if (top[0], top[1]) >= (full, margin):
                return top
            heapreplace(self._heap, (full, margin, top[2], top[3]))

    def _apply_load_drops(self) -> None:
        drops = self._load.load_drops
        if self._read == drops.end:
            return
        ids = drops.read_from(self._read)
        if ids is None or len(ids) > len(self._nodes) or len(self._heap) > 2 * len(self._nodes) + 64:
            self._rank_all()
            return
        for node_id in ids:
            index = self._index.get(node_id)
            if index is not None:
                self._order += 1
                heappush(self._heap, (*self._rank_key(index), self._order, index))
        self._read = drops.end

    def _rank_all(self) -> None:
        self._heap = [(*self._rank_key(index), index, index) for index in range(len(self._nodes))]
        heapify(self._heap)
        self._read = self._load.load_drops.end

    def _rank_key(self, index: int) -> tuple[bool, int]:
        node, load = self._nodes[index], self._loads[index]
        return load.is_full(node), load.tokens_in_use - node.max_seq_len

"""Round robin: every node in turn. For nodes of equal capacity.

A node at its concurrency limit is skipped while one of the next few has room, but stays available.
"""

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

_MAX_EXAMINED = 16
"""The largest number of nodes that one pick examines."""


class RoundRobinOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Round robin has no options."""


class RoundRobin:
    """Selects the next node of the list each time."""

    __slots__ = ("_loads", "_next", "_nodes")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: RoundRobinOptions) -> None:
        self._nodes = nodes
        self._loads = tuple(load.node_load(node.id) for node in nodes)
        self._next = 0

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:  # noqa: ARG002 - independent of the request
        """Return the next node, then those after it: at most `count`, all different."""
        nodes, loads = self._nodes, self._loads
        total = len(nodes)
        start = self._next
        chosen: list[int] = []
        full: list[int] = []
        for step in range(min(total, max(count, _MAX_EXAMINED))):
            index = (start + step) % total
            (full if loads[index].is_full(nodes[index]) else chosen).append(index)
            if len(chosen) == count:
                break
        chosen += full
        self._next = (chosen[0] + 1) % total
        return tuple([nodes[index] for index in chosen[:count]])

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:  # noqa: ARG002 - independent of the request
        """Return the node's distance from the next turn."""
        turns = (self._nodes.index(node) - self._next) % len(self._nodes)
        return turns, f"{turns} turns away"

"""Round robin: every node in turn. For nodes of equal strength.

Rule: a node at its concurrency is passed over while one of the next few has room, never left out.
"""

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

_LOOKED_AT = 16
"""Nodes that one pick looks at, at most."""


class RoundRobinOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Round robin has none."""


class RoundRobin:
    """Takes the next node of the list each time."""

    __slots__ = ("_loads", "_next", "_nodes")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: RoundRobinOptions) -> None:
        self._nodes = nodes
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._next = 0

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:  # noqa: ARG002 - whatever is asked, it is the next one's turn
        """The next node, then those after it: at most `count`, all different."""
        nodes, loads = self._nodes, self._loads
        total = len(nodes)
        start = self._next
        chosen: list[int] = []
        full: list[int] = []
        for step in range(min(total, max(count, _LOOKED_AT))):
            index = (start + step) % total
            (full if loads[index].is_full(nodes[index]) else chosen).append(index)
            if len(chosen) == count:
                break
        chosen += full
        self._next = (chosen[0] + 1) % total
        return tuple([nodes[index] for index in chosen[:count]])

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:  # noqa: ARG002 - turns do not depend on it
        """How many turns away the node is."""
        turns = (self._nodes.index(node) - self._next) % len(self._nodes)
        return turns, f"{turns} turns away"

"""Round robin: every node in turn. For nodes of equal strength."""

from din_extproc.domain.node import Node
from din_extproc.schedule.load import Load


class RoundRobin:
    """Takes the next node of the list each time."""

    __slots__ = ("_next", "_nodes")

    def __init__(self, nodes: tuple[Node, ...], _load: Load) -> None:
        self._nodes = nodes
        self._next = 0

    def pick(self, count: int) -> tuple[Node, ...]:
        """The next node, then those after it: at most `count`, all different."""
        nodes = self._nodes
        start = self._next
        self._next = start + 1 if start + 1 < len(nodes) else 0
        chosen = nodes[start : start + count]
        missing = min(count, len(nodes)) - len(chosen)
        return chosen + nodes[:missing] if missing else chosen

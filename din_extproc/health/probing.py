"""When each node is asked for its one token (R25): every so often, not in step, and not at all while real answers say the same.

Rule: a node that just answered a real request costs no probe; one that is in doubt is asked soon.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from din_extproc.health.policy import place

_JITTER = 0.2
_SOON = 0.2
"""A node in doubt is asked after this share of the usual time."""
_SOONEST_S = 0.5


class ProbeSchedule:
    """The timetable of one replica.

    Args:
        every_s: Between two questions to one node, a fifth more or less.
    """

    __slots__ = ("_answered", "_due", "_heap", "_turns", "every_s", "saved")

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.saved = 0
        """Questions that a real answer made needless."""
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._answered: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def use(self, node_ids: Iterable[str], now: float) -> None:
        """Ask these from now on, and no others; a new one at its own moment within the usual time."""
        wanted = set(node_ids)
        for node_id in self._due.keys() - wanted:
            del self._due[node_id]
            self._answered.pop(node_id, None)
            self._turns.pop(node_id, None)
        for node_id in wanted - self._due.keys():
            self._plan(node_id, now + self.every_s * place(node_id))

    def answered(self, node_id: str, now: float) -> None:
        """The node answered a real request."""
        self._answered[node_id] = now

    def doubt(self, node_id: str, now: float) -> None:
        """The node failed at something: ask it soon, unless it will be asked before."""
        self._answered.pop(node_id, None)
        soon = now + max(_SOONEST_S, self.every_s * _SOON)
        if self._due.get(node_id, 0.0) > soon:
            self._plan(node_id, soon)

    def due(self, now: float) -> list[str]:
        """The nodes to ask now."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            at, node_id = heappop(self._heap)
            if self._due.get(node_id) != at:
                continue
            turn = self._turns[node_id] = self._turns.get(node_id, 0) + 1
            pause = self.every_s * (1.0 - _JITTER + 2 * _JITTER * place(f"{node_id} {turn}"))
            answered = self._answered.get(node_id)
            if answered is not None and now - answered < self.every_s:
                self.saved += 1
                self._plan(node_id, answered + max(pause, _SOONEST_S))
            else:
                found.append(node_id)
                self._plan(node_id, now + pause)
        return found

    def _plan(self, node_id: str, at: float) -> None:
        self._due[node_id] = at
        heappush(self._heap, (at, node_id))

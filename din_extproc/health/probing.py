"""Schedule of the one-token probes: one per node and interval, with jitter.

Invariant: a node that answered a real request within the interval is not probed; a node that failed is probed early.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from din_extproc.health.policy import hash_to_fraction

_JITTER = 0.2
_EXPEDITED_SHARE = 0.2
"""An expedited probe is due after this share of the interval."""
_MIN_DELAY_S = 0.5


class ProbeSchedule:
    """Probe schedule of one replica. Times in seconds.

    Args:
        interval_s: Time between two probes of one node, give or take a fifth.
    """

    __slots__ = ("_answered_at", "_due_at", "_heap", "_rounds", "interval_s", "skipped")

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.skipped = 0
        """Probes that were skipped because a real request had succeeded."""
        self._due_at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._answered_at: dict[str, float] = {}
        self._rounds: dict[str, int] = {}

    def set_nodes(self, node_ids: Iterable[str], now: float) -> None:
        """Replace the set of probed nodes. A new node is first probed at an offset within the interval."""
        wanted = set(node_ids)
        for node_id in self._due_at.keys() - wanted:
            del self._due_at[node_id]
            self._answered_at.pop(node_id, None)
            self._rounds.pop(node_id, None)
        for node_id in wanted - self._due_at.keys():
            self._schedule(node_id, now + self.interval_s * hash_to_fraction(node_id))

    def record_answer(self, node_id: str, now: float) -> None:
        """Record that the node answered a real request."""
        self._answered_at[node_id] = now

    def expedite(self, node_id: str, now: float) -> None:
        """Probe the node early because it failed."""
        self._answered_at.pop(node_id, None)
        soon = now + max(_MIN_DELAY_S, self.interval_s * _EXPEDITED_SHARE)
        if self._due_at.get(node_id, 0.0) > soon:
            self._schedule(node_id, soon)

    def take_due(self, now: float) -> list[str]:
        """Return the nodes to probe now and schedule their next probes."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            at, node_id = heappop(self._heap)
            if self._due_at.get(node_id) != at:
                continue
            number = self._rounds[node_id] = self._rounds.get(node_id, 0) + 1
            delay_s = self.interval_s * (1.0 - _JITTER + 2 * _JITTER * hash_to_fraction(f"{node_id} {number}"))
            answered_at = self._answered_at.get(node_id)
            if answered_at is not None and now - answered_at < self.interval_s:
                self.skipped += 1
                self._schedule(node_id, answered_at + max(delay_s, _MIN_DELAY_S))
            else:
                due.append(node_id)
                self._schedule(node_id, now + delay_s)
        return due

    def _schedule(self, node_id: str, at: float) -> None:
        self._due_at[node_id] = at
        heappush(self._heap, (at, node_id))

"""Learns the speed of nodes from finished exchanges.

Exchanges are gathered in windows that are averaged exponentially by age, so that one slow answer does not mark a node as slow.
"""

from collections import OrderedDict
from collections.abc import Mapping
from math import ceil

from din_extproc.domain.usage import ExchangeRecord, NodePace, Outcome

_WINDOW_S = 2.0
_WINDOW_EXCHANGES = 128
_QUANTILE = 0.99
HALF_LIFE_S = 10.0
_MIN_TOKENS = 8
"""Answers with fewer tokens are ignored for the output rate."""


_UNKNOWN = NodePace(node_id="", at=0.0, p99_ms=0.0, seconds=0.0)


class _Window:
    """The exchanges of one node since `began`, when the first of them ended."""

    __slots__ = ("began", "durations", "prefill_rate", "stream_seconds", "stream_tokens")

    def __init__(self, began: float) -> None:
        self.began = began
        self.durations: list[float] = []
        self.prefill_rate = 0.0
        """The highest rate, from the exchange that queued least before its prompt was processed."""
        self.stream_tokens = 0
        self.stream_seconds = 0.0

    def add(self, record: ExchangeRecord, duration_ms: float) -> None:
        self.durations.append(duration_ms)
        usage, first = record.usage, record.first_token_ms
        if first is None or usage.estimated:
            return
        if first > 0:
            self.prefill_rate = max(self.prefill_rate, (usage.prompt_tokens - usage.cached_tokens) * 1000 / first)
        if usage.completion_tokens >= _MIN_TOKENS and duration_ms > first:
            self.stream_tokens += usage.completion_tokens - 1
            self.stream_seconds += (duration_ms - first) / 1000

    def p99_ms(self) -> float:
        self.durations.sort()
        return self.durations[ceil(_QUANTILE * len(self.durations)) - 1]


class NodePaces:
    """Speed of every node that answered.

    Args:
        half_lives_s: By pool name, where it is not 10 s: the time in seconds after which older exchanges count half.
        limit: The largest number of nodes; the least recently updated one is evicted.
    """

    __slots__ = ("_changed", "_limit", "_paces", "_windows", "half_lives_s")

    def __init__(self, half_lives_s: Mapping[str, float], limit: int = 65536) -> None:
        self.half_lives_s = half_lives_s
        self._limit = limit
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._paces: dict[str, NodePace] = {}
        self._changed: set[str] = set()

    def learn(self, record: ExchangeRecord, now: float) -> None:
        """Add a finished exchange; only completed ones count. `now`: seconds of the machine's monotonic clock."""
        if record.outcome is not Outcome.COMPLETED or not record.node_id or record.duration_ms is None:
            return
        node_id = record.node_id
        window = self._windows.get(node_id)
        if window is None:
            window = self._windows[node_id] = _Window(now)
            if len(self._windows) > self._limit:
                gone, _ = self._windows.popitem(last=False)
                self._paces.pop(gone, None)
        if not window.durations:
            window.began = now
        window.add(record, record.duration_ms)
        first_ever = node_id not in self._paces
        if first_ever or now - window.began >= _WINDOW_S or len(window.durations) >= _WINDOW_EXCHANGES:
            self._paces[node_id] = self._close_window(node_id, window, now, self.half_lives_s.get(record.pool, HALF_LIFE_S))
            self._windows[node_id] = _Window(now)
            self._windows.move_to_end(node_id)
            self._changed.add(node_id)

    def take_changes(self) -> tuple[NodePace, ...]:
        """Return the nodes' speeds that changed since the previous call."""
        changed, self._changed = self._changed, set()
        return tuple(self._paces[node_id] for node_id in changed if node_id in self._paces)

    def _close_window(self, node_id: str, window: _Window, now: float, half_life_s: float) -> NodePace:
        before = self._paces.get(node_id, _UNKNOWN)
        weight = 1.0 if before is _UNKNOWN else 1.0 - 0.5 ** ((now - before.at) / half_life_s)
        prefill = window.prefill_rate or None
        stream = window.stream_tokens / window.stream_seconds if window.stream_seconds else None
        mean = sum(window.durations) / len(window.durations) / 1000
        return NodePace(
            node_id=node_id,
            at=now,
            p99_ms=before.p99_ms + (window.p99_ms() - before.p99_ms) * weight,
            seconds=before.seconds + (mean - before.seconds) * weight,
            prefill_rate=_interpolate(before.prefill_rate, prefill, weight),
            stream_rate=_interpolate(before.stream_rate, stream, weight),
        )


def _interpolate(old: float | None, new: float | None, weight: float) -> float | None:
    """Return the old value moved toward the new one by `weight`."""
    if old is None or new is None:
        return old if new is None else new
    return old + (new - old) * weight

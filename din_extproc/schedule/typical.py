"""What is usual among the nodes of one set: what nodes of which nothing is known are taken for.

Rule: never a scan per request. Sums follow what `LoadModel` notes.
"""

from din_extproc.domain.node import Node
from din_extproc.schedule.load import PREFILL_RATE, LoadModel, NodeLoad

_STREAM_RATE = 40.0
"""Output tokens per second of one request, while no node has told anything."""


class Typical:
    """Means over the nodes that are known. Call `follow` before reading."""

    __slots__ = ("_load", "_loads", "_read", "_sums", "_told", "p99_ms", "prefill_rate", "stream_rate")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel) -> None:
        self._load = load
        self._loads = {node.id: load.of(node.id) for node in nodes}
        self.p99_ms: float | None = None
        self.prefill_rate = PREFILL_RATE
        self.stream_rate = _STREAM_RATE
        self._read = -1
        self._told: dict[str, tuple[float | None, float | None, float | None]] = {}
        self._sums = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
        """Sum and number of each mean."""
        self.follow()

    def follow(self) -> None:
        """Know what was noted since the last time."""
        told = self._load.told
        if self._read == told.end:
            return
        ids = None if self._read < 0 else told.since(self._read)
        for node_id in self._loads if ids is None else ids:
            load = self._loads.get(node_id)
            if load is not None:
                self._count(load)
        self._read = told.end
        p99, prefill, stream = (total / number if number else None for total, number in self._sums)
        self.p99_ms = p99
        self.prefill_rate = prefill or PREFILL_RATE
        self.stream_rate = stream or _STREAM_RATE

    def _count(self, load: NodeLoad) -> None:
        new = (load.p99_ms, load.prefill_rate, load.stream_rate)
        old = self._told.get(load.id, (None, None, None))
        for sums, before, after in zip(self._sums, old, new, strict=True):
            if before is not None:
                sums[0] -= before
                sums[1] -= 1
            if after is not None:
                sums[0] += after
                sums[1] += 1
        self._told[load.id] = new

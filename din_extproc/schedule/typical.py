"""Mean speed of the nodes of one set: the assumption for nodes without measurements.

Sums are maintained from `LoadModel`'s change log, so no request scans the nodes.
"""

from din_extproc.domain.node import Node
from din_extproc.schedule.load import DEFAULT_PREFILL_RATE, LoadModel, NodeLoad

DEFAULT_STREAM_RATE = 40.0
"""Assumed output tokens per second of one request while no node has measurements."""


class Typical:
    """Means over the nodes with measurements. Call `update` before reading."""

    __slots__ = ("_known", "_load", "_loads", "_read", "_sums", "p99_ms", "prefill_rate", "stream_rate")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel) -> None:
        self._load = load
        self._loads = {node.id: load.node_load(node.id) for node in nodes}
        self.p99_ms: float | None = None
        self.prefill_rate = DEFAULT_PREFILL_RATE
        self.stream_rate = DEFAULT_STREAM_RATE
        self._read = -1
        self._known: dict[str, tuple[float | None, float | None, float | None]] = {}
        self._sums = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
        """Sum and count of each mean."""
        self.update()

    def update(self) -> None:
        """Apply the changes since the previous call."""
        changes = self._load.rate_changes
        if self._read == changes.end:
            return
        ids = None if self._read < 0 else changes.read_from(self._read)
        for node_id in self._loads if ids is None else ids:
            load = self._loads.get(node_id)
            if load is not None:
                self._count(load)
        self._read = changes.end
        p99, prefill, stream = (total / number if number else None for total, number in self._sums)
        self.p99_ms = p99
        self.prefill_rate = prefill or DEFAULT_PREFILL_RATE
        self.stream_rate = stream or DEFAULT_STREAM_RATE

    def _count(self, load: NodeLoad) -> None:
        new = (load.p99_ms, load.prefill_rate, load.stream_rate)
        old = self._known.get(load.id, (None, None, None))
        for sums, before, after in zip(self._sums, old, new, strict=True):
            if before is not None:
                sums[0] -= before
                sums[1] -= 1
            if after is not None:
                sums[0] += after
                sums[1] += 1
        self._known[load.id] = new

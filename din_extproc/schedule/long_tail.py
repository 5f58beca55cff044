"""The long tail: requests that would take far longer than the rest hold at most a share of each node's slots (R21).

Rule: what is long is told by what is usual in the pool, not by the node that happens to be busy; and where the share is used up
a long request is refused, never let in as a short one.
"""

from din_extproc.domain.node import LongTail, Node
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.predicted_time import PredictedTime
from din_extproc.schedule.typical import Typical

_RETRY_AFTER_MS = 1000
_RETRY_AFTER: Headers = (("retry-after", "1"), ("retry-after-ms", str(_RETRY_AFTER_MS)))


class TailGate:
    """Places the long requests of one set of nodes.

    Args:
        nodes: The set.
        load: What is known of them.
        tail: What the pool's settings say.
    """

    __slots__ = ("_loads", "_nodes", "_predicted", "_slots", "_tail", "_typical", "timeout_ms")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, tail: LongTail) -> None:
        self._nodes = nodes
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._slots = tuple(max(1, int(node.max_concurrency * tail.share)) for node in nodes)
        self._predicted = PredictedTime(nodes, load)
        self._typical = Typical(nodes, load)
        self._tail = tail
        self.timeout_ms = tail.timeout_ms

    def seconds(self, ask: PlacementRequest) -> float:
        """What the request takes at a usual node that is not busy."""
        self._typical.follow()
        return ask.prompt_tokens / self._typical.prefill_rate + ask.output_tokens / self._typical.stream_rate

    def is_long(self, ask: PlacementRequest) -> bool:
        """Whether it belongs to the long tail."""
        return self.seconds(ask) > self._tail.over_s

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """The quickest nodes that have a slot for a long request."""
        ranks = [rank for rank in self._predicted.ranked(ask) if self._loads[rank[3]].long < self._slots[rank[3]]]
        if not ranks:
            return Refusal(
                RefusalCode.INSUFFICIENT_GPU_CAPACITY,
                f"Requests that would take longer than {self._tail.over_s:g} s hold all the slots that they may hold.",
                retry_after_ms=_RETRY_AFTER_MS,
                headers=_RETRY_AFTER,
            )
        return tuple([self._nodes[rank[3]] for rank in ranks[:count]])

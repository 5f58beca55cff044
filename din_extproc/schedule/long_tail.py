"""Long-tail limit: requests that would take far longer than most hold at most a share of each node's slots.

The classification uses the pool's typical speed, not that of a busy node. The slots are a budget per node in the ledger, so that all
workers and replicas count together; what this worker knows only spares it attempts. When the share is exhausted a long request is refused.
"""

from din_extproc.domain.node import LongTail, Node
from din_extproc.domain.tenant import LONG_TAIL, Budget, RateLimits
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.predicted_time import PredictedTime
from din_extproc.schedule.typical import Typical

_RETRY_AFTER_MS = 1000
_RETRY_AFTER: Headers = (("retry-after", "1"), ("retry-after-ms", str(_RETRY_AFTER_MS)))


class TailGate:
    """Selects nodes for the long requests of one set of nodes.

    Args:
        pool: Name of their pool.
        nodes: The set.
        load: Load of the nodes.
        tail: The pool's settings.
    """

    __slots__ = ("_loads", "_nodes", "_pool", "_predicted", "_slots", "_tail", "_typical", "timeout_ms")

    def __init__(self, pool: str, nodes: tuple[Node, ...], load: LoadModel, tail: LongTail) -> None:
        self._pool = pool
        self._nodes = nodes
        self._loads = tuple(load.node_load(node.id) for node in nodes)
        self._slots = tuple(max(1, int(node.max_concurrency * tail.share)) for node in nodes)
        self._predicted = PredictedTime(nodes, load)
        self._typical = Typical(nodes, load)
        self._tail = tail
        self.timeout_ms = tail.timeout_ms

    def is_long(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether a request would take longer than `over_s` at an idle node of typical speed."""
        self._typical.update()
        return prompt_tokens / self._typical.prefill_rate + output_tokens / self._typical.stream_rate > self._tail.over_s

    def budget(self, node: Node) -> Budget:
        """Return the budget of a node's slots for long requests."""
        slots = max(1, int(node.max_concurrency * self._tail.share))
        return Budget(f"{LONG_TAIL}:{self._pool}:{node.id}", RateLimits(max_streams=slots), shared=True)

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """Return the fastest nodes that, as far as this worker knows, have a slot for a long request."""
        ranks = [
            rank
            for rank in self._predicted.rank_sample(request)
            if self._loads[rank[3]].long_requests < self._slots[rank[3]] and self._nodes[rank[3]].id not in request.full
        ]
        return tuple([self._nodes[rank[3]] for rank in ranks[:count]]) if ranks else self.refuse()

    def refuse(self) -> Refusal:
        """Return the refusal of a long request for which no node has a slot."""
        return Refusal(
            RefusalCode.INSUFFICIENT_GPU_CAPACITY,
            f"Requests that would take longer than {self._tail.over_s:g} s hold all the slots that they may hold.",
            retry_after_ms=_RETRY_AFTER_MS,
            headers=_RETRY_AFTER,
        )

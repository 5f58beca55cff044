"""Predicted-time strategy: the node that would finish the request first. For nodes and requests that differ in any way.

Rates come from finished exchanges, else from heartbeats, else from the pool's other nodes. Times in seconds.

A request also slows the requests in the same batch: its prompt delays their next token, and each of its tokens lengthens theirs. This delay
counts like its own time; otherwise all requests would go to the fastest node until it is no faster than the slowest.
"""

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel, NodeLoad
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SAMPLE_SIZE, sample
from din_extproc.schedule.typical import Typical

_BATCH_SLOWDOWN = 0.02
"""Relative increase of every request's time per token for each additional request in the batch: the cost of continuous batching."""


class PredictedTimeOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The predicted-time strategy has no options."""


class PredictedTime:
    """Ranks a sample of one set of nodes by predicted time."""

    __slots__ = ("_index", "_load", "_loads", "_nodes", "_typical")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: PredictedTimeOptions = PredictedTimeOptions()) -> None:  # noqa: B008 - frozen
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._loads = tuple(load.node_load(node.id) for node in nodes)
        self._typical = Typical(nodes, load)

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:
        """Return the fastest nodes, best first: at most `count`, all different."""
        return tuple([self._nodes[index] for _, _, _, index in self.rank_sample(request)[:count]])

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:
        """Return the predicted seconds with an explanation."""
        self._typical.update()
        queue, prompt, output, others = parts = self._predict(self._index[node.id], request)
        own = f"{queue:.2f} s in line, {prompt:.2f} prompt, {output:.2f} output"
        return sum(parts), f"{own}; {others:.2f} for others"

    def shortest(self, request: PlacementRequest) -> float:
        """Return the seconds until the end of the request at the fastest node of the sample."""
        self._typical.update()
        return min(sum(self._predict(index, request)[:3]) for index in sample(len(self._nodes), SAMPLE_SIZE, request.chance))

    def rank_sample(self, request: PlacementRequest) -> list[tuple[bool, float, int, int]]:
        """Return the sample in order: (full, seconds, place in the sample, index)."""
        self._typical.update()
        ranks = [self.rank_node(index, place, request) for place, index in enumerate(sample(len(self._nodes), SAMPLE_SIZE, request.chance))]
        ranks.sort()
        return ranks

    def rank_node(self, index: int, place: int, request: PlacementRequest) -> tuple[bool, float, int, int]:
        """Return one node's entry of `rank_sample`."""
        queue, prompt, output, others = self._predict(index, request)
        return self._loads[index].is_full(self._nodes[index]), queue + prompt + output + others, place, index

    def predict_saving(self, index: int, request: PlacementRequest) -> tuple[float, float] | None:
        """Return the share of recent prompt tokens in the node's cache, and the seconds that it would save of this prompt."""
        load = self._loads[index]
        if load.cached_share is None:
            return None
        return load.cached_share, load.cached_share * request.prompt_tokens / (load.prefill_rate or self._typical.prefill_rate)

    def _predict(self, index: int, request: PlacementRequest) -> tuple[float, float, float, float]:
        """Seconds in line (prompts before it; slots or memory that others have to leave first), for prompt and output, and of others."""
        load, typical, slots = self._loads[index], self._typical, self._nodes[index].max_concurrency
        prefill_rate = load.prefill_rate or typical.prefill_rate
        requests = load.requests + load.remote_requests
        beside = requests if requests < slots else slots - 1
        if load.stream_rate is None:
            alone = request.output_tokens / typical.stream_rate
        else:
            alone = request.output_tokens / (load.stream_rate * (1.0 + _BATCH_SLOWDOWN * (load.streams - 1.0)))
        prompt = request.prompt_tokens / prefill_rate
        more = alone * _BATCH_SLOWDOWN * beside
        queue = load.backlog(request.now, prefill_rate) / prefill_rate
        if requests >= slots or load.kv_tokens is not None:
            queue += _excess_demand(load, requests + 1, slots, request) * (load.mean_seconds or prompt + alone)
        return queue, prompt, alone + more, prompt * beside + more


def _excess_demand(load: NodeLoad, requests: int, slots: int, request: PlacementRequest) -> float:
    """Return by what fraction demand exceeds the node's slots or memory; 0: it does not."""
    over = requests / slots - 1.0
    if load.kv_tokens is not None:
        over = max(over, (load.tokens_in_use + request.prompt_tokens + request.output_tokens) / load.kv_tokens - 1.0)
    return max(0.0, over)

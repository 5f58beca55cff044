"""Predicted time: the node that would end this request first (R21). For nodes that differ in anything, and requests of every length.

Rule: what can be measured is: rates come from finished exchanges, from the nodes' heartbeats before there was one, and from the
pool's other nodes before either. Times in seconds.

A request also slows those that it joins: its prompt holds up their next token, and each of its tokens makes theirs later. What it costs
them counts as if it were its own time. Without that, everyone runs to the quickest node until that is no quicker than the slowest.
"""

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.load import LoadModel, NodeLoad
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SIZE, sample
from din_extproc.schedule.typical import Typical

_BATCH_SLOWDOWN = 0.02
"""By how much one more request lengthens every request's token, as a share of the time of one alone: what continuous batching costs."""


class PredictedTimeOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Predictions have none."""


class PredictedTime:
    """Ranks a sample of one set of nodes by the time that the request would take."""

    __slots__ = ("_index", "_load", "_loads", "_nodes", "_typical")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, _options: PredictedTimeOptions = PredictedTimeOptions()) -> None:  # noqa: B008 - frozen
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._typical = Typical(nodes, load)

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:
        """The quickest node, then the next ones: at most `count`, all different."""
        return tuple([self._nodes[index] for _, _, _, index in self.ranked(ask)[:count]])

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:
        """Seconds."""
        self._typical.follow()
        queue, prompt, output, others = parts = self._predict(self._index[node.id], ask)
        own = f"{queue:.2f} s in line, {prompt:.2f} prompt, {output:.2f} output"
        return sum(parts), f"{own}; {others:.2f} for others"

    def ranked(self, ask: PlacementRequest) -> list[tuple[bool, float, int, int]]:
        """The sample in order: (full, seconds, place in the sample, index)."""
        self._typical.follow()
        ranks = [self.rank(index, place, ask) for place, index in enumerate(sample(len(self._nodes), SIZE, ask.chance))]
        ranks.sort()
        return ranks

    def rank(self, index: int, place: int, ask: PlacementRequest) -> tuple[bool, float, int, int]:
        """One node's entry."""
        queue, prompt, output, others = self._predict(index, ask)
        return self._loads[index].is_full(self._nodes[index]), queue + prompt + output + others, place, index

    def _predict(self, index: int, ask: PlacementRequest) -> tuple[float, float, float, float]:
        """Seconds in line (prompts before it; slots or memory that others have to leave first), for prompt and output, and of others."""
        load, typical, slots = self._loads[index], self._typical, self._nodes[index].max_concurrency
        prefill_rate = load.prefill_rate or typical.prefill_rate
        requests = load.requests + load.elsewhere_requests
        beside = requests if requests < slots else slots - 1
        if load.stream_rate is None:
            alone = ask.output_tokens / typical.stream_rate
        else:
            alone = ask.output_tokens / (load.stream_rate * (1.0 + _BATCH_SLOWDOWN * (load.streams - 1.0)))
        prompt = ask.prompt_tokens / prefill_rate
        more = alone * _BATCH_SLOWDOWN * beside
        queue = load.backlog(ask.now, prefill_rate) / prefill_rate
        if requests >= slots or load.kv_tokens is not None:
            queue += _over(load, requests + 1, slots, ask) * (load.seconds or prompt + alone)
        return queue, prompt, alone + more, prompt * beside + more


def _over(load: NodeLoad, requests: int, slots: int, ask: PlacementRequest) -> float:
    """How much more is asked of the node than it has, as a share of it: of its slots or of its memory."""
    over = requests / slots - 1.0
    if load.kv_tokens is not None:
        over = max(over, (load.tokens_in_use + ask.prompt_tokens + ask.output_tokens) / load.kv_tokens - 1.0)
    return max(0.0, over)

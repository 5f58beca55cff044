"""Predicted time: the node that would end this request first (R21). For nodes that differ in anything, and requests of every length.

Rule: what can be measured is: rates come from the nodes' heartbeats, from finished exchanges where there is no agent, and from the
pool's other nodes before either. Times in seconds.
"""

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.schedule.ask import Ask
from din_extproc.schedule.load import Load
from din_extproc.schedule.sample import SIZE, sample
from din_extproc.schedule.typical import Typical

_BATCH_SLOWDOWN = 0.02
"""By how much one more request lengthens every request's token, as a share of the time of one alone: what continuous batching costs."""


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Predictions have none."""


class PredictedTime:
    """Ranks a sample of one set of nodes by the time that the request would take."""

    __slots__ = ("_index", "_load", "_loads", "_nodes", "_typical")

    def __init__(self, nodes: tuple[Node, ...], load: Load, _options: Options = Options()) -> None:  # noqa: B008 - frozen
        self._nodes = nodes
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._load = load
        self._loads = tuple(load.of(node.id) for node in nodes)
        self._typical = Typical(nodes, load)

    def pick(self, count: int, ask: Ask) -> tuple[Node, ...]:
        """The quickest node, then the next ones: at most `count`, all different."""
        return tuple([self._nodes[index] for _, _, _, index in self.ranked(ask)[:count]])

    def score(self, node: Node, ask: Ask) -> tuple[float, str]:
        """Seconds."""
        self._typical.follow()
        queue, prompt, output = parts = self._predict(self._index[node.id], ask)
        return sum(parts), f"{sum(parts):.2f} s: {queue:.2f} in line, {prompt:.2f} prompt, {output:.2f} output"

    def ranked(self, ask: Ask) -> list[tuple[bool, float, int, int]]:
        """The sample in order: (full, seconds, place in the sample, index)."""
        self._typical.follow()
        ranks = [self.rank(index, place, ask) for place, index in enumerate(sample(len(self._nodes), SIZE, ask.chance))]
        ranks.sort()
        return ranks

    def rank(self, index: int, place: int, ask: Ask) -> tuple[bool, float, int, int]:
        """One node's entry."""
        full = self._loads[index].is_full(self._nodes[index])
        return full, sum(self._predict(index, ask)), place, index

    def _predict(self, index: int, ask: Ask) -> tuple[float, float, float]:
        """Seconds in line (prompts before it, and slots or memory that others have to leave first), for the prompt, for the output."""
        load, typical, slots = self._loads[index], self._typical, self._nodes[index].max_concurrency
        prefill_rate = load.prefill_rate or typical.prefill_rate
        requests = load.requests_in_use
        beside = requests if requests < slots else slots - 1
        if load.stream_rate is None:
            stream_rate = typical.stream_rate / (1.0 + _BATCH_SLOWDOWN * beside)
        else:
            stream_rate = load.stream_rate * (1.0 + _BATCH_SLOWDOWN * (load.streams - 1.0)) / (1.0 + _BATCH_SLOWDOWN * beside)
        prompt = ask.prompt_tokens / prefill_rate
        output = ask.output_tokens / stream_rate
        queue = load.backlog(ask.now, prefill_rate) / prefill_rate
        over = (requests + 1 - slots) / slots
        if load.kv_tokens is not None:
            over = max(over, (load.tokens_in_use + ask.prompt_tokens + ask.output_tokens) / load.kv_tokens - 1.0)
        if over > 0.0:
            queue += over * (load.seconds or prompt + output)
        return queue, prompt, output

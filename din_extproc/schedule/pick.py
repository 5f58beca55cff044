"""Filter the pool's nodes, then let a strategy rank them.

Rule: filtering looks at shapes, not at nodes: ten thousand nodes of two kinds are two things to look at.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.schedule import latency_ewma, predicted_time, prefix_affinity, round_robin, token_available
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.long_tail import TailGate
from din_extproc.schedule.placement_request import PlacementRequest


class Strategy(Protocol):
    """Ranks one set of nodes, which is never empty. Made anew whenever the set changes."""

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...]:
        """The best node first; at most `count`, all different. A node at its concurrency comes after those that are not."""

    def score(self, node: Node, ask: PlacementRequest) -> tuple[float, str]:
        """What one node of the set is ranked by, least first, and the same in words. For people: it may look at all nodes."""


class Picker(Protocol):
    """A strategy, or what stands before one."""

    def pick(self, count: int, ask: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """The best node first; refused: none may have the request."""


class StrategySpec(Struct, frozen=True):
    """A strategy as settings name it."""

    make: Callable[[tuple[Node, ...], LoadModel, Any], Strategy]
    options: type[Struct]


STRATEGIES: dict[str, StrategySpec] = {
    "round_robin": StrategySpec(round_robin.RoundRobin, round_robin.RoundRobinOptions),
    "token_available": StrategySpec(token_available.TokenAvailable, token_available.TokenAvailableOptions),
    "latency_ewma": StrategySpec(latency_ewma.LatencyEwma, latency_ewma.LatencyEwmaOptions),
    "predicted_time": StrategySpec(predicted_time.PredictedTime, predicted_time.PredictedTimeOptions),
    "prefix_affinity": StrategySpec(prefix_affinity.PrefixAffinity, prefix_affinity.PrefixAffinityOptions),
}


class Ranking(Struct, frozen=True, gc=False):
    """How one set of a pool's nodes is chosen from."""

    strategy: Strategy
    tail: TailGate | None = None
    """None: the pool knows no long tail."""
    among: int = 0
    """How many nodes they are."""


def ranking(pool: Pool, nodes: tuple[Node, ...], load: LoadModel) -> Ranking:
    """Rank these nodes, at least one, as the pool's settings say."""
    kind = STRATEGIES[pool.scheduler]
    strategy = kind.make(nodes, load, msgspec.convert(pool.scheduler_options, kind.options))
    return Ranking(strategy, None if pool.long_tail is None else TailGate(nodes, load, pool.long_tail), len(nodes))


class NodeShape(Struct, frozen=True, gc=False, order=True):
    """What filtering looks at: nodes of one shape can take the same requests."""

    version: str
    max_seq_len: int


Fleet = dict[NodeShape, tuple[Node, ...]]
"""A pool's nodes by shape, in the pool's order."""


def fleet(nodes: Iterable[Node]) -> Fleet:
    """Sort nodes by their shape."""
    found: dict[NodeShape, list[Node]] = {}
    for node in nodes:
        found.setdefault(NodeShape(node.version, node.max_seq_len), []).append(node)
    return {shape: tuple(same) for shape, same in found.items()}


class Demand(Struct, frozen=True, gc=False):
    """What a node must bring."""

    tokens: int
    """Prompt plus requested output, as estimated."""
    at_least: int
    """The same, if the estimate is as much too high as estimates get."""
    version: str
    accepts: Callable[[str], bool]
    """Whether a model version meets the constraint that `version` spells."""


def fitting(shapes: Iterable[NodeShape], demand: Demand) -> tuple[NodeShape, ...] | Refusal:
    """The shapes that can take the request at all; a refusal that names the first thing that none of them has.

    Where only an estimate says that the request is too long, the longest ones get it: the engine counts.
    """
    offered = sorted(shapes)
    if not offered:
        return Refusal(RefusalCode.NO_HEALTHY_NODE, "No node of the model is in service.")
    versioned = tuple(shape for shape in offered if demand.accepts(shape.version))
    if not versioned:
        versions = ", ".join(dict.fromkeys(shape.version for shape in offered))
        return Refusal(
            RefusalCode.VERSION_MISMATCH,
            f"No node serves a version that meets {demand.version!r}; in service: {versions}.",
            param="x-din-model-version",
        )
    roomy = tuple(shape for shape in versioned if shape.max_seq_len >= demand.tokens)
    if roomy:
        return roomy
    longest = max(shape.max_seq_len for shape in versioned)
    if longest >= demand.at_least:
        return tuple(shape for shape in versioned if shape.max_seq_len == longest)
    return Refusal(
        RefusalCode.CONTEXT_LENGTH_EXCEEDED,
        f"The longest context in service is {longest} tokens; prompt and requested output need {demand.tokens}.",
        param="messages",
    )

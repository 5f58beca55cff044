"""Filters a pool's nodes and ranks the rest with the pool's strategy.

Filtering looks at node shapes instead of nodes: ten thousand nodes of two kinds are two shapes.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.schedule import latency_ewma, predicted_time, prefix_affinity, round_robin, token_available
from din_extproc.schedule.adapter_affinity import AdapterAffinity
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.long_tail import TailGate
from din_extproc.schedule.placement_request import PlacementRequest


class Strategy(Protocol):
    """Ranks one non-empty set of nodes. A new instance is made whenever the set changes."""

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...]:
        """Return the best nodes first: at most `count`, all different. Nodes at their concurrency limit come last."""

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:
        """Return a node's score, lower is better, with an explanation for people. May look at all nodes."""


class Picker(Protocol):
    """A strategy or a filter in front of one."""

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """Return the best nodes first, or a refusal if none may take the request."""


class StrategySpec(Struct, frozen=True):
    """A strategy's constructor and options."""

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
    """The strategy of one set of a pool's nodes."""

    strategy: Strategy
    tail: TailGate | None = None
    """None: the pool has no long-tail limit."""
    nodes: tuple[Node, ...] = ()
    """The set."""
    longest: int = 0
    """The longest context among them, in tokens."""
    mixed: bool = False
    """They are of several kinds, see `Node.kind`."""
    adapters: dict[str, AdapterAffinity] = {}
    """Of the adapters that were asked for, instead of the strategy."""

    def for_adapter(self, pool: Pool, load: LoadModel) -> AdapterAffinity:
        """Return what selects nodes for the adapter of this view of the pool."""
        found = self.adapters.get(pool.adapter)
        if found is None:
            adapters = pool.adapters
            found = self.adapters[pool.adapter] = AdapterAffinity(self.nodes, load, pool.adapter, adapters.slots, adapters.spread)
        return found


def build_ranking(pool: Pool, nodes: tuple[Node, ...], load: LoadModel) -> Ranking:
    """Build the pool's configured strategy for these nodes, at least one."""
    kind = STRATEGIES[pool.scheduler]
    strategy = kind.make(nodes, load, msgspec.convert(pool.scheduler_options, kind.options))
    tail = None if pool.long_tail is None else TailGate(pool.name, nodes, load, pool.long_tail)
    return Ranking(strategy, tail, nodes, max(node.max_seq_len for node in nodes), len({node.kind for node in nodes}) > 1)


class NodeShape(Struct, frozen=True, gc=False, order=True):
    """The properties that filtering looks at: nodes of one shape accept the same requests."""

    version: str
    max_seq_len: int


Fleet = dict[NodeShape, tuple[Node, ...]]
"""A pool's nodes by shape, in the pool's order."""


def group_by_shape(nodes: Iterable[Node]) -> Fleet:
    """Group nodes by shape."""
    found: dict[NodeShape, list[Node]] = {}
    for node in nodes:
        found.setdefault(NodeShape(node.version, node.max_seq_len), []).append(node)
    return {shape: tuple(same) for shape, same in found.items()}


class Demand(Struct, frozen=True, gc=False):
    """A request's requirements on nodes."""

    tokens: int
    """Estimated prompt plus requested output."""
    min_tokens: int
    """Lower bound of `tokens`, given the estimate's error."""
    max_tokens: int
    """Upper bound of `tokens`, likewise."""
    version: str
    accepts: Callable[[str], bool]
    """Returns whether a model version meets the constraint `version`."""


def filter_shapes(shapes: Iterable[NodeShape], demand: Demand) -> tuple[NodeShape, ...] | Refusal:
    """Return the shapes that can take the request, or a refusal that names the first requirement that no shape meets.

    Shapes that hold the request even if the estimate is too low come before those that hold it only by the estimate. If the request is
    too long only by the estimate, the shapes with the longest context are returned: the engine counts exactly.
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
    roomy = tuple(shape for shape in versioned if shape.max_seq_len >= demand.max_tokens)
    if roomy:
        return roomy
    longest = max(shape.max_seq_len for shape in versioned)
    if longest >= demand.min_tokens:
        return tuple(shape for shape in versioned if shape.max_seq_len == longest)
    return Refusal(
        RefusalCode.CONTEXT_LENGTH_EXCEEDED,
        f"The longest context in service is {longest} tokens; prompt and requested output need {demand.tokens}.",
        param="messages",
    )

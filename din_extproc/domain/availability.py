"""The available share of each model's capacity: by the state of its nodes and by the circuit breakers of nodes and pools."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from din_extproc.domain.health import BreakerSnapshot
from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Pool


class NodeShare(Struct, frozen=True):
    """The share of its usual traffic that one node takes now."""

    node_id: str
    model: str
    state: NodeState
    share: float
    """By its breaker, 0 to 1."""
    reason: str = ""

    @property
    def effective(self) -> float:
        """By its breaker and its state."""
        return self.share if self.state is NodeState.READY else 0.0


class UnavailableNode(Struct, frozen=True):
    """A node that takes no requests, or not all of its own."""

    node_id: str
    share: float
    reason: str


class ModelAvailability(Struct, frozen=True):
    """One physical model."""

    model: str
    state: str
    """`available`, `degraded`: only a part of its capacity takes requests, or `unavailable`."""
    nodes: int
    available: int
    """Nodes that take all of their requests."""
    share: float
    """Of all its nodes' capacity, 0 to 1."""
    pools: Mapping[str, str]
    """The state of each pool's own breaker."""
    unavailable: tuple[UnavailableNode, ...] = ()


def compute_availability(
    pools: Iterable[Pool], breakers: Mapping[str, BreakerSnapshot], nodes: Iterable[NodeShare], now: float
) -> tuple[ModelAvailability, ...]:
    """Return every model that a pool serves, in the order of the pools.

    Args:
        pools: Those of the configuration.
        breakers: Of pools that are not closed.
        nodes: Every node, once.
        now: Monotonic seconds.
    """
    by_model: dict[str, list[NodeShare]] = {}
    for node in nodes:
        by_model.setdefault(node.model, []).append(node)
    serving: dict[str, list[str]] = {}
    for pool in pools:
        serving.setdefault(pool.model, []).append(pool.name)
    return tuple(_compute_model_availability(model, names, breakers, by_model.get(model, []), now) for model, names in serving.items())


def _compute_model_availability(
    model: str, pools: list[str], breakers: Mapping[str, BreakerSnapshot], nodes: list[NodeShare], now: float
) -> ModelAvailability:
    passed = max(1.0 if pool not in breakers else breakers[pool].share(now) for pool in pools)
    limited = [node for node in nodes if node.effective < 1]
    share = passed * sum(node.effective for node in nodes) / max(1, len(nodes))
    return ModelAvailability(
        model=model,
        state="unavailable" if share <= 0 else "available" if share >= 1 else "degraded",
        nodes=len(nodes),
        available=len(nodes) - len(limited),
        share=round(share, 3),
        pools={pool: "closed" if pool not in breakers else breakers[pool].state.value for pool in pools},
        unavailable=tuple(UnavailableNode(node.node_id, node.effective, node.reason or node.state.value) for node in limited),
    )

"""What of a model's capacity takes requests, by nodes and breakers."""

import pytest

from din_extproc.domain.availability import NodeShare, compute_availability
from din_extproc.domain.health import BreakerSnapshot, BreakerState
from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Pool

POOL = Pool(name="p", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=())


def share(name: str, passes: float = 1.0, state: NodeState = NodeState.READY) -> NodeShare:
    return NodeShare(name, "m", state, passes, "why")


@pytest.mark.parametrize(
    ("nodes", "state", "available", "rest"),
    [
        ((share("a"), share("b")), "available", 2, 1.0),
        ((share("a"), share("b", 0.0)), "degraded", 1, 0.5),
        ((share("a", 0.1), share("b", state=NodeState.DRAINING)), "degraded", 0, 0.05),
        ((share("a", 0.0), share("b", state=NodeState.DEAD)), "unavailable", 0, 0.0),
        ((), "unavailable", 0, 0.0),
    ],
)
def test_a_model_is_as_available_as_its_nodes(nodes, state, available, rest):
    (model,) = compute_availability((POOL,), {}, nodes, 0.0)
    assert (model.state, model.available, model.share, model.pools) == (state, available, rest, {"p": "closed"})
    assert len(model.unavailable) == len(nodes) - available


def test_the_breaker_of_its_only_pool_counts_and_another_pool_makes_up_for_it():
    opened = {"p": BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0)}
    (model,) = compute_availability((POOL,), opened, (share("a"),), 0.0)
    assert (model.state, model.pools) == ("unavailable", {"p": "open"})
    other = Pool(name="q", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=())
    (model,) = compute_availability((POOL, other), opened, (share("a"),), 0.0)
    assert model.state == "available"

"""A node that is trusted less gets less before others are preferred."""

import pytest

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Endpoint, Node
from din_extproc.schedule.load import LoadModel, NodeLease
from din_extproc.schedule.pick import STRATEGIES
from din_extproc.schedule.placement_request import PlacementRequest


def node(name):
    return Node(
        id=name,
        endpoint=Endpoint("10.0.0.1", 8000 + ord(name)),
        model="m",
        version="1",
        dtype="bf16",
        compute_capability="",
        tp_world_size=1,
        max_seq_len=8192,
        max_concurrency=8,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_passes_over_a_distrusted_node_that_holds_its_share(name):
    load = LoadModel()
    for each, trust in (("a", 0.25), ("b", 1.0)):
        load.on_reading(each, HeartbeatReading(Heartbeat(state=NodeState.READY, sequence=1), 0.0, trust))
        for _ in range(2):
            load.add_lease(NodeLease(each, 100, 10), 0.0)
    kind = STRATEGIES[name]
    strategy = kind.make((node("a"), node("b")), load, kind.options())
    assert [strategy.pick(2, PlacementRequest(100, 10, 0.0, chance=number))[0].id for number in range(4)] == ["b"] * 4


def test_a_distrusted_node_still_gets_a_request_when_it_has_none():
    load = LoadModel()
    load.on_reading("a", HeartbeatReading(Heartbeat(state=NodeState.READY, sequence=1), 0.0, 0.0))
    assert not load.node_load("a").is_full(node("a"))
    load.add_lease(NodeLease("a", 100, 10), 0.0)
    assert load.node_load("a").is_full(node("a"))

"""A node's state, look by look."""

from din_extproc.domain.membership import NodeState
from din_extproc.flow.node_condition import NodeCondition

READY = NodeCondition().with_reading("", slow=False)


def test_a_node_starts_as_loading_and_is_ready_when_nothing_is_wrong():
    assert NodeCondition().state is NodeState.LOADING
    assert NodeCondition(NodeState.READY, "") == READY


def test_what_is_not_ready_is_loading_with_its_reason():
    assert READY.with_reading("the engine lists other, not m", slow=False) == NodeCondition(
        NodeState.LOADING, "the engine lists other, not m"
    )


def test_a_slow_engine_is_given_two_more_looks_and_forgiven_by_one_answer():
    twice = READY.with_reading("slow", slow=True).with_reading("slow", slow=True)
    assert twice.state is NodeState.READY
    assert twice.with_reading("slow", slow=True).state is NodeState.LOADING
    assert twice.with_reading("", slow=False).with_reading("slow", slow=True).state is NodeState.READY


def test_a_loading_engine_gets_no_benefit_of_the_doubt():
    assert NodeCondition().with_reading("slow", slow=True).state is NodeState.LOADING


def test_a_draining_node_drains_whatever_its_engine_does():
    draining = READY.with_drain("the node stops")
    assert draining.with_reading("", slow=False) is draining
    assert draining.with_reading("gone", slow=False) is draining


def test_a_node_that_is_called_back_must_be_seen_first():
    assert READY.with_drain("asked").with_undrain().state is NodeState.LOADING
    assert READY.with_undrain() is READY

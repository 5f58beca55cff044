"""A node's state, look by look."""

from din_extproc.domain.membership import NodeState
from din_extproc.flow.node_condition import NodeCondition

READY = NodeCondition().seen("", slow=False)


def test_a_node_starts_as_loading_and_is_ready_when_nothing_is_wrong():
    assert NodeCondition().state is NodeState.LOADING
    assert NodeCondition(NodeState.READY, "") == READY


def test_what_is_not_ready_is_loading_with_its_reason():
    assert READY.seen("the engine lists other, not m", slow=False) == NodeCondition(NodeState.LOADING, "the engine lists other, not m")


def test_a_slow_engine_is_given_two_more_looks_and_forgiven_by_one_answer():
    twice = READY.seen("slow", slow=True).seen("slow", slow=True)
    assert twice.state is NodeState.READY
    assert twice.seen("slow", slow=True).state is NodeState.LOADING
    assert twice.seen("", slow=False).seen("slow", slow=True).state is NodeState.READY


def test_a_loading_engine_gets_no_benefit_of_the_doubt():
    assert NodeCondition().seen("slow", slow=True).state is NodeState.LOADING


def test_a_draining_node_drains_whatever_its_engine_does():
    draining = READY.drained("the node stops")
    assert draining.seen("", slow=False) is draining
    assert draining.seen("gone", slow=False) is draining


def test_a_node_that_is_called_back_must_be_seen_first():
    assert READY.drained("asked").called_back().state is NodeState.LOADING
    assert READY.called_back() is READY

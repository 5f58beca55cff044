"""Orders of operators: the newest counts, whoever hears of it when."""

import itertools

from din_extproc.domain.health import BreakerState, HoldKind, NodeHold
from din_extproc.health.holds import NodeHolds


def order(kind: HoldKind, at: float, node_id: str = "a") -> NodeHold:
    return NodeHold(node_id=node_id, kind=kind, operator="ops", at=at, reason="why")


def test_replicas_agree_in_whatever_order_they_receive_updates():
    orders = (order(HoldKind.DRAIN, 1.0), order(HoldKind.NONE, 2.0), order(HoldKind.QUARANTINE, 3.0))
    for received in itertools.permutations(orders):
        holds = NodeHolds()
        for each in received:
            holds.merge((each,))
        assert holds.get("a") == orders[2]
        assert holds.merge(orders) == ()


def test_a_held_node_is_as_one_whose_breaker_is_open_for_good():
    holds = NodeHolds()
    holds.merge((order(HoldKind.DRAIN, 1.0), order(HoldKind.NONE, 1.0, "b")))
    (snapshot,) = holds.snapshots(5.0).values()
    assert (snapshot.state, snapshot.until, snapshot.reason, snapshot.excluded) == (BreakerState.OPEN, None, "drained by ops: why", True)
    assert holds.get("b") is None


def test_what_the_shared_table_lost_is_missing_and_what_was_taken_back_long_ago_is_forgotten():
    holds = NodeHolds()
    drain, back = order(HoldKind.DRAIN, 1.0), order(HoldKind.NONE, 1.0, "b")
    holds.merge((drain, back))
    assert holds.missing_from({"a": order(HoldKind.DRAIN, 2.0), "b": back}) == ()
    assert holds.missing_from({"a": order(HoldKind.NONE, 0.5)}) == (drain, back)
    assert holds.expire(100.0) == ()
    assert holds.expire(100_000.0) == ("b",)
    assert holds.get("a") == drain

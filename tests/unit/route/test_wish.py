"""Conditions turned round: what is wished for meets them, and contradictions are no wish."""

from din_extproc.domain.request import Operation, Priority
from din_extproc.route.rules import Condition, TokenRange
from din_extproc.route.wish import Wish, both, wishes


def test_every_field_of_a_condition_becomes_a_wish() -> None:
    condition = Condition(
        path=(Operation.EMBEDDINGS,),
        estimated_tokens=TokenRange(gt=100, lt=200),
        header={"x-task-tier": ("light", "tiny"), "x-any": True, "x-none": False},
        stream=True,
        priority=(Priority.BATCH, Priority.STANDARD),
    )
    assert list(wishes(condition)) == [
        Wish((Operation.EMBEDDINGS,), 101, 199, {"x-task-tier": "light", "x-any": "verify"}, stream=True, priority=Priority.BATCH)
    ]


def test_each_alternative_is_a_wish_of_its_own_and_all_of_all_are_in_one() -> None:
    either = Condition(any=(Condition(stream=True), Condition(estimated_tokens=TokenRange(le=50))))
    assert list(wishes(either)) == [Wish(stream=True), Wish(highest=50)]
    every = Condition(all=(Condition(stream=True), either, Condition(header={"a": ("1",)})))
    assert list(wishes(every)) == [Wish(stream=True, headers={"a": "1"}), Wish(stream=True, highest=50, headers={"a": "1"})]


def test_what_contradicts_itself_is_no_wish() -> None:
    assert both(Wish(stream=True), Wish(stream=False)) is None
    assert both(Wish(headers={"a": "1"}), Wish(headers={"a": "2"})) is None
    assert both(Wish(lowest=10), Wish(highest=9)) is None
    assert both(Wish(operations=(Operation.CHAT,)), Wish(operations=(Operation.RERANK,))) is None
    assert both(Wish(priority=Priority.BATCH), Wish(priority=Priority.CRITICAL)) is None
    assert list(wishes(Condition(all=(Condition(stream=True), Condition(stream=False))))) == []


def test_what_can_not_be_wished_for_is_left_out() -> None:
    condition = Condition(cel="hour > 3", negated=Condition(stream=True), tenant=("acme",), always=True)
    assert list(wishes(condition)) == [Wish()]

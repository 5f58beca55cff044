"""Inverted conditions: sample requests meet them, and contradictions give none."""

from din_extproc.domain.request import Operation, Priority
from din_extproc.route.rules import RuleCondition, TokenRange
from din_extproc.tools.verify.sample_request import SampleRequest, both, find_samples


def test_every_field_of_a_condition_becomes_a_sample_request() -> None:
    condition = RuleCondition(
        path=(Operation.EMBEDDINGS,),
        estimated_tokens=TokenRange(gt=100, lt=200),
        header={"x-task-tier": ("light", "tiny"), "x-any": True, "x-none": False},
        stream=True,
        priority=(Priority.BATCH, Priority.STANDARD),
    )
    assert list(find_samples(condition)) == [
        SampleRequest((Operation.EMBEDDINGS,), 101, 199, {"x-task-tier": "light", "x-any": "verify"}, stream=True, priority=Priority.BATCH)
    ]


def test_each_alternative_is_its_own_sample_request_and_all_of_all_are_in_one() -> None:
    either = RuleCondition(any=(RuleCondition(stream=True), RuleCondition(estimated_tokens=TokenRange(le=50))))
    assert list(find_samples(either)) == [SampleRequest(stream=True), SampleRequest(highest=50)]
    every = RuleCondition(all=(RuleCondition(stream=True), either, RuleCondition(header={"a": ("1",)})))
    assert list(find_samples(every)) == [
        SampleRequest(stream=True, headers={"a": "1"}),
        SampleRequest(stream=True, highest=50, headers={"a": "1"}),
    ]


def test_contradictory_conditions_give_no_sample_request() -> None:
    assert both(SampleRequest(stream=True), SampleRequest(stream=False)) is None
    assert both(SampleRequest(headers={"a": "1"}), SampleRequest(headers={"a": "2"})) is None
    assert both(SampleRequest(lowest=10), SampleRequest(highest=9)) is None
    assert both(SampleRequest(operations=(Operation.CHAT,)), SampleRequest(operations=(Operation.RERANK,))) is None
    assert both(SampleRequest(priority=Priority.BATCH), SampleRequest(priority=Priority.CRITICAL)) is None
    assert list(find_samples(RuleCondition(all=(RuleCondition(stream=True), RuleCondition(stream=False))))) == []


def test_what_can_not_be_wished_for_is_left_out() -> None:
    condition = RuleCondition(cel="hour > 3", negated=RuleCondition(stream=True), tenant=("acme",), always=True)
    assert list(find_samples(condition)) == [SampleRequest()]

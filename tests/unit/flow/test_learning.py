"""What finished exchanges teach."""

import pytest
from msgspec.structs import replace

from din_extproc.domain.usage import ExchangeRecord, Outcome, Tags, Usage
from din_extproc.flow.learning import ExchangeLearner
from tests.support.fakes import FakeLearner
from tests.unit.flow.test_settlement import RECORD, numbered


def taught(*records: ExchangeRecord) -> list[tuple[object, ...]]:
    pupil = FakeLearner()
    learner = ExchangeLearner(pupil, pupil)
    for record in records:
        learner.on_exchange(record)
    return pupil.learned


def test_reported_usage_teaches_prompt_and_answer() -> None:
    assert taught(RECORD) == [("m", (1.0, 2.0), 3, 40), ("finance", "m", 10)]


def test_answers_to_several_prompts_teach_how_long_one_is() -> None:
    assert taught(replace(RECORD, tags=Tags("m", answers=4)))[-1] == ("finance", "m", 3)


@pytest.mark.parametrize(
    ("record", "learned"),
    [
        (replace(RECORD, usage=Usage(44, 10, estimated=True)), []),
        (replace(RECORD, usage=Usage(0, 0), outcome=Outcome.UPSTREAM_ERROR), []),
        (replace(RECORD, features=()), [("finance", "m", 10)]),
        (replace(RECORD, outcome=Outcome.CLIENT_CANCELLED), [("m", (1.0, 2.0), 3, 40)]),
    ],
)
def test_nothing_is_learned_from_guesses_and_cut_answers(record: ExchangeRecord, learned: list[object]) -> None:
    assert taught(record) == learned


def test_a_busy_second_teaches_twenty_times_per_tenant_and_model() -> None:
    busy = [replace(numbered(number), started_at=7.0 + number / 200) for number in range(100)]
    learned = taught(*busy, replace(RECORD, tenant="other", started_at=7.9), replace(RECORD, started_at=8.1))
    outputs = [lesson for lesson in learned if len(lesson) == 3]
    assert outputs == [("finance", "m", 10)] * 20 + [("other", "m", 10), ("finance", "m", 10)]

"""Calibrators of prompts: by model, learned, sent to other processes, with the catalogue's tokens of media."""

from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.intent.estimate import TokenCalibrator, estimate_tokens
from din_extproc.intent.openai import Prompt

TEXT = estimate_tokens(Prompt(b'"' + b"word " * 400 + b'"', messages=1), TokenCalibrator())


def gauges() -> TokenCalibrators:
    return TokenCalibrators({"alias": "m", "m": "m"}.get)


def test_a_name_is_weighed_as_the_model_it_stands_for():
    known = gauges()
    known.learn("m", TEXT.features, TEXT.fixed, TEXT.tokens * 2)
    assert known.for_name("alias") is known.for_model("m")
    assert known.for_name("alias").calibration.samples == 1
    assert known.for_name("nobody").calibration.samples == 0


def test_what_was_learned_is_reported_once_and_adopted_elsewhere():
    teacher, pupil = gauges(), gauges()
    teacher.learn("m", TEXT.features, TEXT.fixed, TEXT.tokens * 2)
    changes = teacher.take_changes()
    assert teacher.take_changes() == {}
    pupil.apply(changes)
    assert pupil.for_model("m").calibration == teacher.for_model("m").calibration


def test_media_cost_what_the_catalogue_says_before_and_after_learning():
    known = gauges()
    known.set_media_tokens({"m": 300, "other": TokenCalibrator().media_tokens})
    assert known.for_model("m").media_tokens == 300
    known.learn("m", TEXT.features, TEXT.fixed, TEXT.tokens)
    assert known.for_model("m").media_tokens == 300
    known.set_media_tokens({"m": 500})
    assert (known.for_model("m").media_tokens, known.for_model("m").calibration.samples) == (500, 1)
    assert known.for_model("other").media_tokens == TokenCalibrator().media_tokens

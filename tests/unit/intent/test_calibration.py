import random

import pytest

from din_extproc.domain.request import Estimate
from din_extproc.intent.boundary import needs_exact
from din_extproc.intent.calibration import CLASSES, Calibration, update_calibration
from din_extproc.intent.estimate import TokenCalibrator, estimate_tokens
from din_extproc.intent.openai import Prompt
from tests.bench.estimate_error import _mean, _p95, calibrated, errors, samples
from tests.bench.vocabularies import tokenizer

LEARNED = (24, 24, 12, 3, 1)
MEASURED = (6, 6, 6, 3, 1)
"""Texts of each size: fewer than the benchmark takes."""
PROSE = Prompt(b'"%b"' % (b"The node answers within the time that the client allows. " * 30), messages=1)
CHINESE = Prompt(('"' + "分布式推理网络由许多节点组成。" * 60 + '"').encode(), messages=3)


def taught(teach, times, start=None):
    calibration = start or Calibration()
    for turn in range(times):
        for prompt in (PROSE, CHINESE):
            found = estimate_tokens(prompt, TokenCalibrator())
            calibration = update_calibration(calibration, found.features, found.fixed, teach(prompt, turn))
    return calibration


def truth(prompt, _turn=0):
    return {PROSE: 400, CHINESE: 560}[prompt]


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_the_error_after_calibration_is_within_its_bar(name, tmp_path_factory):
    exact = tokenizer(name, tmp_path_factory.mktemp("vocabularies"))
    calibration = calibrated(samples(exact, 0, LEARNED))
    found = errors(samples(exact, 1, MEASURED), calibration)
    assert _p95(found) <= 0.08
    assert _mean(found) <= 0.04
    assert 0.02 <= calibration.band <= 0.16


def test_a_model_is_learned_within_a_few_prompts():
    gauge = TokenCalibrator(taught(truth, 20))
    for prompt in (PROSE, CHINESE):
        assert abs(estimate_tokens(prompt, gauge).tokens / truth(prompt) - 1) < 0.03
    assert gauge.calibration.band < Calibration().band / 2


def test_what_was_learned_of_one_script_is_kept_while_another_is_used():
    calibration = taught(truth, 20)
    before = estimate_tokens(CHINESE, TokenCalibrator(calibration)).tokens
    for _ in range(2000):
        calibration = update_calibration(calibration, estimate_tokens(PROSE, TokenCalibrator()).features, 0, 400)
    assert abs(estimate_tokens(CHINESE, TokenCalibrator(calibration)).tokens / before - 1) < 0.1


@pytest.mark.parametrize("lie", [0, -5, 1, 10**9, 2**63])
def test_a_count_that_no_tokenizer_arrives_at_is_ignored(lie):
    honest = taught(truth, 20)
    assert taught(lambda _prompt, _turn: lie, 10, honest) == honest


def test_one_lie_in_ten_bends_little():
    chance = random.Random(3)
    gauge = TokenCalibrator(taught(lambda prompt, _turn: truth(prompt) * (4 if chance.random() < 0.1 else 1), 400))
    for prompt in (PROSE, CHINESE):
        assert abs(estimate_tokens(prompt, gauge).tokens / truth(prompt) - 1) < 0.15


def test_a_liar_never_leaves_the_bounds():
    chance = random.Random(4)
    gauge = TokenCalibrator(taught(lambda prompt, _turn: chance.randrange(len(prompt.strings) // 16, len(prompt.strings)), 1000))
    assert 1 <= estimate_tokens(PROSE, gauge).tokens <= len(PROSE.strings) + 320
    assert gauge.calibration.band <= 1


def test_prompts_with_media_or_token_ids_teach_nothing():
    features = estimate_tokens(PROSE, TokenCalibrator()).features
    assert update_calibration(Calibration(), features, 1024, 1400) == Calibration()
    assert update_calibration(Calibration(), (0,) * len(CLASSES), 0, 5) is not None
    assert update_calibration(Calibration(), (), 0, 400) == Calibration()
    assert update_calibration(Calibration(), (1.0, 2.0), 0, 400) == Calibration()


def test_a_long_text_is_sampled_and_still_scaled_to_its_length():
    whole = estimate_tokens(PROSE, TokenCalibrator()).tokens
    long = Prompt(b'"%b"' % (PROSE.strings[1:-1] * 200), messages=1)
    assert estimate_tokens(long, TokenCalibrator()).tokens == pytest.approx(200 * whole, rel=0.03)


def test_an_empty_prompt_costs_nothing_and_media_cost_their_constant():
    assert estimate_tokens(Prompt(b""), TokenCalibrator()).tokens == 0
    found = estimate_tokens(Prompt(b"", token_ids=7, media=2), TokenCalibrator(media_tokens=300))
    assert (found.tokens, found.fixed) == (607, 607)


@pytest.mark.parametrize(
    ("tokens", "fixed", "boundaries", "exact"),
    [
        (1000, 0, (), False),
        (1000, 0, (1050,), True),
        (1000, 0, (1200,), False),
        (1000, 0, (500, 950, 5000), True),
        (1000, 900, (1050,), False),
        (0, 0, (1,), True),
    ],
)
def test_only_an_estimate_near_a_boundary_is_counted_exactly(tokens, fixed, boundaries, exact):
    assert needs_exact(Estimate(tokens, fixed=fixed), 0.1, boundaries) is exact
    assert not needs_exact(Estimate(tokens, fixed=fixed, exact=True), 0.1, boundaries)
    longest = Estimate(tokens, fixed=fixed)
    assert needs_exact(Estimate(100_000, longest=longest), 0.1, boundaries) is exact, "the longest input has to fit as well"

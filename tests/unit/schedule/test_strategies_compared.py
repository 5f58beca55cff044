"""The paper's claim (R22) on modelled engines: what uneven nodes lose by turns."""

import pytest

from tests.bench.strategies import measure, run


@pytest.fixture(scope="module")
def measured():
    return measure(90.0)


def test_r22_on_uneven_nodes_token_available_brings_a_quarter_more_than_round_robin(measured):
    assert measured["token_available"].requests_per_s > 1.25 * measured["round_robin"].requests_per_s


def test_r22_prediction_and_affinity_bring_more_than_either_and_make_the_tail_shorter(measured):
    for name in ("predicted_time", "prefix_affinity"):
        assert measured[name].requests_per_s > 1.02 * measured["token_available"].requests_per_s
        assert measured[name].p99_s < measured["token_available"].p99_s
        assert measured[name].first_token_p99_s < 0.7 * measured["token_available"].first_token_p99_s


def test_r20_latency_lies_between_turns_and_prediction(measured):
    assert 1.25 * measured["round_robin"].requests_per_s < measured["latency_ewma"].requests_per_s
    assert measured["latency_ewma"].p99_s < measured["token_available"].p99_s


def test_r21_prediction_does_without_agents_what_it_does_with_them():
    without = run("predicted_time", seconds=40.0, agents=False)
    assert without.requests_per_s > 0.97 * run("predicted_time", seconds=40.0).requests_per_s


def test_the_same_seed_gives_the_same_figures():
    assert run("prefix_affinity", seconds=15.0) == run("prefix_affinity", seconds=15.0)

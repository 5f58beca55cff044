"""The paper's claim on modelled engines: what uneven nodes lose by turns."""

import pytest

from tests.bench.strategies import measure, run


@pytest.fixture(scope="module")
def measured():
    return measure(90.0)


def test_on_uneven_nodes_token_available_brings_a_quarter_more_than_round_robin(measured):
    assert measured["token_available"].requests_per_s > 1.25 * measured["round_robin"].requests_per_s


def test_prediction_and_affinity_bring_more_than_either_and_make_the_tail_shorter(measured):
    for name in ("predicted_time", "prefix_affinity"):
        assert measured[name].requests_per_s > 1.02 * measured["token_available"].requests_per_s
        assert measured[name].seconds.p99 < measured["token_available"].seconds.p99
        assert measured[name].first_token_s.p99 < 0.7 * measured["token_available"].first_token_s.p99


def test_latency_lies_between_turns_and_prediction(measured):
    assert 1.25 * measured["round_robin"].requests_per_s < measured["latency_ewma"].requests_per_s
    assert measured["latency_ewma"].requests_per_s < measured["predicted_time"].requests_per_s
    assert measured["latency_ewma"].first_token_s.p99 < 0.8 * measured["token_available"].first_token_s.p99


def test_prediction_does_without_agents_what_it_does_with_them():
    rates = [run(("predicted_time",), seconds=40.0, agents=agents)["predicted_time"].requests_per_s for agents in (False, True)]
    assert rates[0] > 0.97 * rates[1]

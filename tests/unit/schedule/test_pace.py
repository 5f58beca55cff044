"""What finished exchanges teach about the pace of nodes."""

import pytest

from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.schedule.pace import NodePaces


def record(node_id="n-1", *, duration_ms=1000.0, first_token_ms=200.0, outcome=Outcome.COMPLETED, prompt=400, output=81, cached=0):
    return ExchangeRecord(
        request_id="r",
        trace_id="t",
        tenant="x",
        key_id="k",
        model="m",
        alias="m",
        pool="p",
        rule="",
        node_id=node_id,
        status=200,
        outcome=outcome,
        stream=first_token_ms is not None,
        usage=Usage(prompt, output, cached),
        reserved_tokens=1,
        prompt_estimate=1,
        features=(),
        fixed=0,
        attempts=1,
        degraded=False,
        started_at=0.0,
        duration_ms=duration_ms,
        first_token_ms=first_token_ms,
    )


def test_one_exchange_tells_a_first_pace():
    paces = NodePaces({})
    paces.learn(record(prompt=500, cached=100), 5.0)
    (pace,) = paces.take_changes()
    assert (pace.node_id, pace.at, pace.p99_ms, pace.seconds) == ("n-1", 5.0, 1000.0, 1.0)
    assert pace.prefill_rate == pytest.approx(2000)
    assert pace.stream_rate == pytest.approx(100)
    assert paces.take_changes() == ()


def test_a_window_tells_its_99th_percentile_and_the_best_prefill_it_saw():
    paces = NodePaces({}, limit=8)
    paces.learn(record(), 0.0)
    for number in range(1, 101):
        paces.learn(record(duration_ms=1000.0 + number, first_token_ms=400.0 if number % 2 else 100.0), 1000.0)
    paces.learn(record(duration_ms=1.0, first_token_ms=None), 1002.5)
    (pace,) = paces.take_changes()
    assert pace.p99_ms == pytest.approx(1099, abs=1)  # of 101 exchanges, all but one are at most as long
    assert pace.prefill_rate == pytest.approx(4000, rel=0.01)


def test_newer_windows_count_by_half_after_a_half_life():
    paces = NodePaces({"p": 10.0})
    paces.learn(record(duration_ms=1000.0), 0.0)
    for now in (7.0, 10.0):
        paces.learn(record(duration_ms=2000.0), now)
    (pace,) = paces.take_changes()
    assert pace.p99_ms == pytest.approx(1500)
    paces.half_lives_s = {"p": 2.5}
    for now in (10.4, 12.5):
        paces.learn(record(duration_ms=2000.0), now)
    (pace,) = paces.take_changes()
    assert pace.p99_ms == pytest.approx(1750, rel=0.01)


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.COMPLETED])
def test_only_whole_answers_tell_a_pace(outcome):
    paces = NodePaces({})
    paces.learn(record(outcome=outcome), 0.0)
    paces.learn(record(node_id=""), 0.0)
    assert paces.take_changes() == ()


def test_a_short_or_unstreamed_answer_says_nothing_about_tokens_per_second():
    paces = NodePaces({})
    paces.learn(record("a", output=3), 0.0)
    paces.learn(record("b", first_token_ms=None), 0.0)
    assert [pace.stream_rate for pace in paces.take_changes()] == [None, None]


def test_memory_is_bounded():
    paces = NodePaces({}, limit=3)
    for number in range(9):
        paces.learn(record(f"n-{number}"), 0.0)
    assert {pace.node_id for pace in paces.take_changes()} == {"n-6", "n-7", "n-8"}

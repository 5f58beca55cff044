"""Events that open, cool, ramp and close a circuit breaker, with the default policy's numbers."""

import pytest

from din_extproc.domain.health import BreakerSnapshots, BreakerState
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.registry import BreakerRegistry, select_strictest

POLICY = BreakerPolicy()


def answer(breaker: CircuitBreaker, good: int, bad: int, now: float) -> None:
    """Feed `good` successes and `bad` failures, evenly mixed, 10 ms apart."""
    for turn in range(good + bad):
        failed = (turn + 1) * bad // (good + bad) > turn * bad // (good + bad)
        breaker.on_event(
            BreakerEvent(BreakerEventKind.FAILED if failed else BreakerEventKind.SUCCEEDED, now + turn * 0.01, now + turn * 0.01)
        )


def test_a_quarter_of_failures_in_a_minute_does_not_open_it_and_more_does():
    breaker = CircuitBreaker("n", BreakerPolicy(consecutive_failures=None), 0.0)
    answer(breaker, 75, 25, 0.0)
    assert breaker.snapshot.state is BreakerState.CLOSED
    answer(breaker, 1, 5, 2.0)
    assert breaker.snapshot.state is BreakerState.OPEN
    assert "answers failed within 60 s" in breaker.snapshot.reason


def test_after_thirty_seconds_it_is_half_open_with_a_twentieth():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 0.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 29.9))
    assert breaker.snapshot.state is BreakerState.OPEN
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 33.1))
    assert breaker.snapshot.state is BreakerState.HALF_OPEN
    assert breaker.snapshot.share(34.0) == 0.05


def test_a_busy_node_is_left_alone_for_as_long_as_it_asks_and_gets_everything_again_at_once():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    assert breaker.on_event(BreakerEvent(BreakerEventKind.BUSY, 1.0, reason="busy", cool_down_s=7.0))
    assert (breaker.snapshot.state, breaker.snapshot.excluded, breaker.consecutive_failures) == (BreakerState.COOLING, True, 0)
    assert not breaker.on_event(BreakerEvent(BreakerEventKind.BUSY, 2.0, cool_down_s=1.0)), "a shorter pause does not shorten the cool-down"
    breaker.on_event(BreakerEvent(BreakerEventKind.BUSY, 3.0, cool_down_s=7.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 9.9))
    assert breaker.snapshot.state is BreakerState.COOLING
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 10.0))
    assert (breaker.snapshot.state, breaker.trips) == (BreakerState.CLOSED, 0)


def test_a_node_that_is_busy_on_its_way_back_goes_on_with_its_ramp_afterwards():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.REJOINED, 0.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.BUSY, 10.0, cool_down_s=5.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 15.0))
    assert (breaker.snapshot.state, breaker.snapshot.share(15.0)) == (BreakerState.RAMPING, 0.1)


def test_failures_while_cooling_open_the_breaker():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.BUSY, 1.0, cool_down_s=60.0))
    for at in (2.0, 3.0, 4.0):
        breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, at, 0.5))
    assert breaker.snapshot.state is BreakerState.OPEN


def failed(now: float) -> BreakerEvent:
    return BreakerEvent(BreakerEventKind.FAILED, now)


def busy(now: float, pause_s: float) -> BreakerEvent:
    return BreakerEvent(BreakerEventKind.BUSY, now, cool_down_s=pause_s)


REMOTE = BreakerEvent(BreakerEventKind.REMOTE_OPEN, 1.0)


@pytest.mark.parametrize(
    "events",
    [
        (busy(0.0, 300.0), failed(1.0), failed(2.0), failed(3.0)),
        (busy(0.0, 300.0), REMOTE),
        (busy(0.0, 300.0), busy(1.0, 5.0)),
        (REMOTE, busy(2.0, 298.0)),
        (failed(0.0), failed(1.0), failed(2.0), busy(3.0, 297.0), busy(4.0, 5.0), REMOTE),
        (REMOTE, BreakerEvent(BreakerEventKind.TICK, 40.0), busy(41.0, 259.0)),
        (BreakerEvent(BreakerEventKind.REJOINED, 0.0), busy(1.0, 299.0), failed(2.0), failed(3.0), failed(4.0)),
    ],
)
def test_a_later_and_shorter_reason_never_shortens_the_time_that_a_node_is_left_out(events):
    breaker = CircuitBreaker("n", POLICY, 0.0)
    for event in events:
        breaker.on_event(event)
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 299.9))
    assert breaker.snapshot.excluded
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 300.1))
    assert not breaker.snapshot.excluded


def test_another_replica_s_update_prolongs_an_open_breaker_without_another_trip():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.on_event(REMOTE)
    first = breaker.snapshot.until
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 21.0))
    assert (breaker.snapshot.state, breaker.snapshot.since, breaker.trips) == (BreakerState.OPEN, 1.0, 1)
    assert breaker.snapshot.until == first + 20.0


def test_three_failed_probes_in_a_row_open_it_and_two_with_a_good_one_between_do_not():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    for event in (
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_SUCCEEDED,
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_FAILED,
    ):
        breaker.on_event(BreakerEvent(event, 1.0))
    assert breaker.snapshot.state is BreakerState.CLOSED
    breaker.on_event(BreakerEvent(BreakerEventKind.PROBE_FAILED, 2.0))
    assert breaker.snapshot.state is BreakerState.OPEN
    assert "3 consecutive failures" in breaker.snapshot.reason


def test_ten_streams_that_break_at_one_instant_count_as_one_consecutive_failure():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    answer(breaker, 50, 0, 0.0)
    for _ in range(10):
        breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 10.0, 9.0, "UC"))
    assert breaker.snapshot.state is BreakerState.CLOSED
    assert breaker.consecutive_failures == 1
    breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 10.2, 10.1, "UF"))
    breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 10.4, 10.3, "UF"))
    assert breaker.snapshot.state is BreakerState.OPEN


@pytest.mark.parametrize(("threshold", "refusals"), [(1, 1), (2, 2), (3, 2), (5, 2)])
def test_two_refusals_open_however_close_they_come_for_twice_the_open_time(threshold, refusals):
    breaker = CircuitBreaker("n", BreakerPolicy(jitter=0.0, consecutive_failures=threshold), 0.0)
    for number in range(refusals):
        assert breaker.snapshot.state is BreakerState.CLOSED
        breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 10.0 + number / 100, reason="404", refusal=True))
    assert breaker.snapshot.state is BreakerState.OPEN
    assert breaker.snapshot.until == breaker.snapshot.since + 60.0
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 100.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 101.0, 100.5, reason="404", refusal=True))
    assert breaker.snapshot.until == 101.0 + 120.0


def test_refusals_with_an_answer_in_between_open_nothing():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    for number in range(3):
        breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 10.0 + number, reason="404", refusal=True))
        breaker.on_event(BreakerEvent(BreakerEventKind.SUCCEEDED, 10.5 + number))
    assert breaker.snapshot.state is BreakerState.CLOSED


def test_a_failed_trial_doubles_the_open_time():
    breaker = CircuitBreaker("n", BreakerPolicy(jitter=0.0), 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 0.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 30.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.FAILED, 31.0, 30.5))
    assert breaker.snapshot.until == 31.0 + 60.0


def test_three_good_trials_begin_the_ramp_at_a_tenth():
    breaker = CircuitBreaker("n", BreakerPolicy(jitter=0.0), 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 0.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 30.0))
    for event in (BreakerEventKind.PROBE_SUCCEEDED, BreakerEventKind.SUCCEEDED, BreakerEventKind.SUCCEEDED):
        assert breaker.snapshot.state is BreakerState.HALF_OPEN
        breaker.on_event(BreakerEvent(event, 31.0, 30.5))
    assert breaker.snapshot.state is BreakerState.RAMPING
    assert breaker.snapshot.share(31.0) == 0.1


def test_a_closed_breaker_resets_its_backoff_after_a_whole_open_time():
    breaker = CircuitBreaker("n", BreakerPolicy(jitter=0.0, ramp_s=1.0, trials=1), 0.0)
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 0.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 30.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.PROBE_SUCCEEDED, 30.0))
    breaker.on_event(BreakerEvent(BreakerEventKind.TICK, 31.0))
    assert breaker.snapshot.state is BreakerState.CLOSED
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, 62.0))
    assert breaker.trips == 1
    assert breaker.snapshot.until == 92.0


def test_open_times_of_different_nodes_are_jittered():
    ends = {BreakerPolicy().compute_open_s(1, f"gpu-{number}") for number in range(50)}
    assert len(ends) > 40
    assert all(30.0 <= end <= 33.0 for end in ends)


def test_take_changes_returns_each_change_once_and_ignores_unknown_names():
    registry = BreakerRegistry()
    registry.nodes.reload({"a": BreakerPolicy(consecutive_failures=1)})
    registry.nodes.on_event("unknown", BreakerEvent(BreakerEventKind.FAILED, 1.0))
    assert not registry.take_changes()
    registry.nodes.on_event("a", BreakerEvent(BreakerEventKind.FAILED, 1.0))
    changed = registry.take_changes()
    assert changed.nodes["a"].state is BreakerState.OPEN
    assert registry.take_changes() == BreakerSnapshots()
    assert registry.snapshot_not_closed().nodes.keys() == {"a"}
    registry.on_tick(40.0)
    assert registry.take_changes().nodes["a"].state is BreakerState.HALF_OPEN
    registry.nodes.reload({})
    assert registry.snapshot_not_closed() == BreakerSnapshots()


def test_the_strictest_policy_is_the_one_with_the_lowest_failure_threshold():
    assert (
        select_strictest(
            [BreakerPolicy(consecutive_failures=5), BreakerPolicy(consecutive_failures=2), BreakerPolicy(consecutive_failures=None)]
        ).consecutive_failures
        == 2
    )

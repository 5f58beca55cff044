"""What opens a breaker, in the figures of the requirements, and what does not."""

from din_extproc.domain.health import BreakerSnapshots, BreakerState
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.registry import BreakerRegistry, strictest

POLICY = BreakerPolicy()


def answer(breaker: CircuitBreaker, good: int, bad: int, now: float) -> None:
    """So many answers, evenly mixed, each its own incident no longer than the policy's."""
    for turn in range(good + bad):
        failed = (turn + 1) * bad // (good + bad) > turn * bad // (good + bad)
        breaker.hear(BreakerEvent(BreakerEventKind.FAILED if failed else BreakerEventKind.ANSWERED, now + turn * 0.01, now + turn * 0.01))


def test_a_quarter_of_failures_in_a_minute_does_not_open_it_and_more_does():
    breaker = CircuitBreaker("n", BreakerPolicy(row=None), 0.0)
    answer(breaker, 75, 25, 0.0)
    assert breaker.standing.state is BreakerState.CLOSED
    answer(breaker, 1, 5, 2.0)
    assert breaker.standing.state is BreakerState.OPEN
    assert "answers failed within 60 s" in breaker.standing.reason


def test_after_thirty_seconds_it_is_half_open_with_a_twentieth():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, 0.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 29.9))
    assert breaker.standing.state is BreakerState.OPEN
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 33.1))
    assert breaker.standing.state is BreakerState.HALF_OPEN
    assert breaker.standing.share(34.0) == 0.05


def test_a_busy_node_is_left_alone_for_as_long_as_it_asks_and_gets_everything_again_at_once():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    assert breaker.hear(BreakerEvent(BreakerEventKind.BUSY, 1.0, reason="busy", rest_s=7.0))
    assert (breaker.standing.state, breaker.standing.excluded, breaker.row) == (BreakerState.COOLING, True, 0)
    assert not breaker.hear(BreakerEvent(BreakerEventKind.BUSY, 2.0, rest_s=1.0)), "one that asks for less shortens nothing"
    breaker.hear(BreakerEvent(BreakerEventKind.BUSY, 3.0, rest_s=7.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 9.9))
    assert breaker.standing.state is BreakerState.COOLING
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 10.0))
    assert (breaker.standing.state, breaker.trips) == (BreakerState.CLOSED, 0)


def test_a_node_that_is_busy_on_its_way_back_goes_on_with_its_ramp_afterwards():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.RETURNED, 0.0))
    breaker.hear(BreakerEvent(BreakerEventKind.BUSY, 10.0, rest_s=5.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 15.0))
    assert (breaker.standing.state, breaker.standing.share(15.0)) == (BreakerState.RAMPING, 0.1)


def test_a_node_that_fails_while_it_cools_is_opened_all_the_same():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.BUSY, 1.0, rest_s=60.0))
    for at in (2.0, 3.0, 4.0):
        breaker.hear(BreakerEvent(BreakerEventKind.FAILED, at, 0.5))
    assert breaker.standing.state is BreakerState.OPEN


def test_three_failed_probes_in_a_row_open_it_and_two_with_a_good_one_between_do_not():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    for event in (
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_ANSWERED,
        BreakerEventKind.PROBE_FAILED,
        BreakerEventKind.PROBE_FAILED,
    ):
        breaker.hear(BreakerEvent(event, 1.0))
    assert breaker.standing.state is BreakerState.CLOSED
    breaker.hear(BreakerEvent(BreakerEventKind.PROBE_FAILED, 2.0))
    assert breaker.standing.state is BreakerState.OPEN
    assert "3 failures in a row" in breaker.standing.reason


def test_ten_streams_that_break_at_one_instant_are_one_failure_in_the_row():
    breaker = CircuitBreaker("n", POLICY, 0.0)
    answer(breaker, 50, 0, 0.0)
    for _ in range(10):
        breaker.hear(BreakerEvent(BreakerEventKind.FAILED, 10.0, 9.0, "UC"))
    assert breaker.standing.state is BreakerState.CLOSED
    assert breaker.row == 1
    breaker.hear(BreakerEvent(BreakerEventKind.FAILED, 10.2, 10.1, "UF"))
    breaker.hear(BreakerEvent(BreakerEventKind.FAILED, 10.4, 10.3, "UF"))
    assert breaker.standing.state is BreakerState.OPEN


def test_one_failure_during_the_trial_opens_it_again_for_twice_as_long():
    breaker = CircuitBreaker("n", BreakerPolicy(spread=0.0), 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, 0.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 30.0))
    breaker.hear(BreakerEvent(BreakerEventKind.FAILED, 31.0, 30.5))
    assert breaker.standing.until == 31.0 + 60.0


def test_three_good_trials_begin_the_ramp_at_a_tenth():
    breaker = CircuitBreaker("n", BreakerPolicy(spread=0.0), 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, 0.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 30.0))
    for event in (BreakerEventKind.PROBE_ANSWERED, BreakerEventKind.ANSWERED, BreakerEventKind.ANSWERED):
        assert breaker.standing.state is BreakerState.HALF_OPEN
        breaker.hear(BreakerEvent(event, 31.0, 30.5))
    assert breaker.standing.state is BreakerState.RAMPING
    assert breaker.standing.share(31.0) == 0.1


def test_peace_for_a_whole_pause_makes_the_next_pause_the_first_again():
    breaker = CircuitBreaker("n", BreakerPolicy(spread=0.0, ramp_s=1.0, trials=1), 0.0)
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, 0.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 30.0))
    breaker.hear(BreakerEvent(BreakerEventKind.PROBE_ANSWERED, 30.0))
    breaker.hear(BreakerEvent(BreakerEventKind.TIME, 31.0))
    assert breaker.standing.state is BreakerState.CLOSED
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, 62.0))
    assert breaker.trips == 1
    assert breaker.standing.until == 92.0


def test_pauses_of_different_nodes_do_not_end_together():
    ends = {BreakerPolicy().pause_s(1, f"gpu-{number}") for number in range(50)}
    assert len(ends) > 40
    assert all(30.0 <= end <= 33.0 for end in ends)


def test_a_board_tells_what_changed_once_and_knows_no_strangers():
    board = BreakerRegistry()
    board.nodes.use({"a": BreakerPolicy(row=1)})
    board.nodes.hear("stranger", BreakerEvent(BreakerEventKind.FAILED, 1.0))
    assert not board.changed()
    board.nodes.hear("a", BreakerEvent(BreakerEventKind.FAILED, 1.0))
    changed = board.changed()
    assert changed.nodes["a"].state is BreakerState.OPEN
    assert board.changed() == BreakerSnapshots()
    assert board.all().nodes.keys() == {"a"}
    board.pass_time(40.0)
    assert board.changed().nodes["a"].state is BreakerState.HALF_OPEN
    board.nodes.use({})
    assert board.all() == BreakerSnapshots()


def test_a_node_of_several_pools_keeps_to_the_strictest():
    assert strictest([BreakerPolicy(row=5), BreakerPolicy(row=2), BreakerPolicy(row=None)]).row == 2

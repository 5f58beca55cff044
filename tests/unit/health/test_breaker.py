"""What opens a breaker, in the figures of the requirements, and what does not."""

from din_extproc.domain.health import BreakerState, Standings
from din_extproc.health.board import Board, strictest
from din_extproc.health.breaker import Breaker, Event, Heard
from din_extproc.health.policy import Policy

POLICY = Policy()


def answer(breaker: Breaker, good: int, bad: int, now: float) -> None:
    """So many answers, evenly mixed, each its own incident no longer than the policy's."""
    for turn in range(good + bad):
        failed = (turn + 1) * bad // (good + bad) > turn * bad // (good + bad)
        breaker.hear(Heard(Event.FAILED if failed else Event.ANSWERED, now + turn * 0.01, now + turn * 0.01))


def test_r26_a_quarter_of_failures_in_a_minute_does_not_open_it_and_more_does():
    breaker = Breaker("n", Policy(row=None), 0.0)
    answer(breaker, 75, 25, 0.0)
    assert breaker.standing.state is BreakerState.CLOSED
    answer(breaker, 1, 5, 2.0)
    assert breaker.standing.state is BreakerState.OPEN
    assert "answers failed within 60 s" in breaker.standing.reason


def test_r26_after_thirty_seconds_it_is_half_open_with_a_twentieth():
    breaker = Breaker("n", POLICY, 0.0)
    breaker.hear(Heard(Event.TOLD, 0.0))
    breaker.hear(Heard(Event.TIME, 29.9))
    assert breaker.standing.state is BreakerState.OPEN
    breaker.hear(Heard(Event.TIME, 33.1))
    assert breaker.standing.state is BreakerState.HALF_OPEN
    assert breaker.standing.share(34.0) == 0.05


def test_b86_a_busy_node_is_left_alone_for_as_long_as_it_asks_and_gets_everything_again_at_once():
    breaker = Breaker("n", POLICY, 0.0)
    assert breaker.hear(Heard(Event.BUSY, 1.0, reason="busy", rest_s=7.0))
    assert (breaker.standing.state, breaker.standing.left_out, breaker.row) == (BreakerState.COOLING, True, 0)
    assert not breaker.hear(Heard(Event.BUSY, 2.0, rest_s=1.0)), "one that asks for less shortens nothing"
    breaker.hear(Heard(Event.BUSY, 3.0, rest_s=7.0))
    breaker.hear(Heard(Event.TIME, 9.9))
    assert breaker.standing.state is BreakerState.COOLING
    breaker.hear(Heard(Event.TIME, 10.0))
    assert (breaker.standing.state, breaker.trips) == (BreakerState.CLOSED, 0)


def test_b86_a_node_that_is_busy_on_its_way_back_goes_on_with_its_ramp_afterwards():
    breaker = Breaker("n", POLICY, 0.0)
    breaker.hear(Heard(Event.RETURNED, 0.0))
    breaker.hear(Heard(Event.BUSY, 10.0, rest_s=5.0))
    breaker.hear(Heard(Event.TIME, 15.0))
    assert (breaker.standing.state, breaker.standing.share(15.0)) == (BreakerState.RAMPING, 0.1)


def test_a_node_that_fails_while_it_cools_is_opened_all_the_same():
    breaker = Breaker("n", POLICY, 0.0)
    breaker.hear(Heard(Event.BUSY, 1.0, rest_s=60.0))
    for at in (2.0, 3.0, 4.0):
        breaker.hear(Heard(Event.FAILED, at, 0.5))
    assert breaker.standing.state is BreakerState.OPEN


def test_r25_three_failed_probes_in_a_row_open_it_and_two_with_a_good_one_between_do_not():
    breaker = Breaker("n", POLICY, 0.0)
    for event in (Event.PROBE_FAILED, Event.PROBE_FAILED, Event.PROBE_ANSWERED, Event.PROBE_FAILED, Event.PROBE_FAILED):
        breaker.hear(Heard(event, 1.0))
    assert breaker.standing.state is BreakerState.CLOSED
    breaker.hear(Heard(Event.PROBE_FAILED, 2.0))
    assert breaker.standing.state is BreakerState.OPEN
    assert "3 failures in a row" in breaker.standing.reason


def test_ten_streams_that_break_at_one_instant_are_one_failure_in_the_row():
    breaker = Breaker("n", POLICY, 0.0)
    answer(breaker, 50, 0, 0.0)
    for _ in range(10):
        breaker.hear(Heard(Event.FAILED, 10.0, 9.0, "UC"))
    assert breaker.standing.state is BreakerState.CLOSED
    assert breaker.row == 1
    breaker.hear(Heard(Event.FAILED, 10.2, 10.1, "UF"))
    breaker.hear(Heard(Event.FAILED, 10.4, 10.3, "UF"))
    assert breaker.standing.state is BreakerState.OPEN


def test_one_failure_during_the_trial_opens_it_again_for_twice_as_long():
    breaker = Breaker("n", Policy(spread=0.0), 0.0)
    breaker.hear(Heard(Event.TOLD, 0.0))
    breaker.hear(Heard(Event.TIME, 30.0))
    breaker.hear(Heard(Event.FAILED, 31.0, 30.5))
    assert breaker.standing.until == 31.0 + 60.0


def test_r23_three_good_trials_begin_the_ramp_at_a_tenth():
    breaker = Breaker("n", Policy(spread=0.0), 0.0)
    breaker.hear(Heard(Event.TOLD, 0.0))
    breaker.hear(Heard(Event.TIME, 30.0))
    for event in (Event.PROBE_ANSWERED, Event.ANSWERED, Event.ANSWERED):
        assert breaker.standing.state is BreakerState.HALF_OPEN
        breaker.hear(Heard(event, 31.0, 30.5))
    assert breaker.standing.state is BreakerState.RAMPING
    assert breaker.standing.share(31.0) == 0.1


def test_peace_for_a_whole_pause_makes_the_next_pause_the_first_again():
    breaker = Breaker("n", Policy(spread=0.0, ramp_s=1.0, trials=1), 0.0)
    breaker.hear(Heard(Event.TOLD, 0.0))
    breaker.hear(Heard(Event.TIME, 30.0))
    breaker.hear(Heard(Event.PROBE_ANSWERED, 30.0))
    breaker.hear(Heard(Event.TIME, 31.0))
    assert breaker.standing.state is BreakerState.CLOSED
    breaker.hear(Heard(Event.TOLD, 62.0))
    assert breaker.trips == 1
    assert breaker.standing.until == 92.0


def test_pauses_of_different_nodes_do_not_end_together():
    ends = {Policy().pause_s(1, f"gpu-{number}") for number in range(50)}
    assert len(ends) > 40
    assert all(30.0 <= end <= 33.0 for end in ends)


def test_a_board_tells_what_changed_once_and_knows_no_strangers():
    board = Board()
    board.nodes.use({"a": Policy(row=1)})
    board.nodes.hear("stranger", Heard(Event.FAILED, 1.0))
    assert not board.changed()
    board.nodes.hear("a", Heard(Event.FAILED, 1.0))
    changed = board.changed()
    assert changed.nodes["a"].state is BreakerState.OPEN
    assert board.changed() == Standings()
    assert board.all().nodes.keys() == {"a"}
    board.pass_time(40.0)
    assert board.changed().nodes["a"].state is BreakerState.HALF_OPEN
    board.nodes.use({})
    assert board.all() == Standings()


def test_a_node_of_several_pools_keeps_to_the_strictest():
    assert strictest([Policy(row=5), Policy(row=2), Policy(row=None)]).row == 2

"""The breaker under any history: what holds in every state, after every event, at any time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.health import BreakerSnapshot, BreakerState
from din_extproc.health.breaker import TABLE, BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.window import OutcomeWindow

CLOSED, OPEN, HALF_OPEN, RAMPING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING
COOLING = BreakerState.COOLING
MAY = {
    CLOSED: {OPEN, RAMPING, COOLING},
    OPEN: {HALF_OPEN, RAMPING},
    HALF_OPEN: {OPEN, RAMPING},
    RAMPING: {OPEN, CLOSED, COOLING},
    COOLING: {OPEN, CLOSED, RAMPING, COOLING},
}
"""The only changes there are."""

policies = st.builds(
    BreakerPolicy,
    row=st.one_of(st.none(), st.integers(1, 6)),
    share=st.floats(0.05, 1.0),
    least=st.integers(1, 20),
    window_s=st.floats(1.0, 120.0),
    open_s=st.floats(0.5, 60.0),
    backoff_factor=st.floats(1.0, 4.0),
    longest_open_s=st.floats(60.0, 600.0),
    trial_share=st.floats(0.01, 0.5),
    trials=st.integers(1, 5),
    ramp_from=st.floats(0.05, 1.0),
    ramp_s=st.floats(1.0, 120.0),
)
steps = st.lists(
    st.tuples(st.sampled_from(BreakerEventKind), st.floats(0.0, 90.0), st.one_of(st.none(), st.floats(0.0, 200.0))), min_size=1, max_size=60
)


def history(policy: BreakerPolicy, events, name: str = "gpu-1"):
    """Every (heard, standing before, breaker, standing after) of a run."""
    breaker, now = CircuitBreaker(name, policy, 0.0), 0.0
    for event, later, age in events:
        now += later
        heard = BreakerEvent(event, now, None if age is None else now - age, rest_s=age or 7.0)
        before = breaker.standing
        changed = breaker.hear(heard)
        assert changed is (breaker.standing is not before)
        yield heard, before, breaker, breaker.standing


def test_every_event_has_its_place_in_every_state():
    assert set(TABLE) == {(state, event) for state in BreakerState for event in BreakerEventKind}


@given(policies, steps)
def test_only_the_changes_of_the_picture_happen(policy, events):
    for heard, before, _, after in history(policy, events):
        if after is not before:
            assert after.state in MAY[before.state], (before, heard, after)
            assert after.since == heard.now


@given(policies, steps)
def test_an_open_one_is_left_alone_for_its_whole_pause_and_then_tried(policy, events):
    for heard, before, _, after in history(policy, events):
        if before.state is OPEN and after.state is HALF_OPEN:
            assert heard.event is BreakerEventKind.TIME
            assert heard.now >= before.until
        if after.state is OPEN:
            assert after.share(heard.now) == 0.0
            assert policy.open_s <= after.until - after.since <= policy.pause_s(100, "gpu-1") * (1 + policy.spread) + 1e-6


@given(policies)
def test_pauses_grow_by_the_factor_up_to_the_longest_while_there_is_no_peace(policy):
    breaker, now, pauses = CircuitBreaker("gpu-1", policy, 0.0), 0.0, []
    breaker.hear(BreakerEvent(BreakerEventKind.TOLD, now))
    for _ in range(6):
        pauses.append(breaker.standing.until - breaker.standing.since)
        now = breaker.standing.until
        breaker.hear(BreakerEvent(BreakerEventKind.TIME, now))
        breaker.hear(BreakerEvent(BreakerEventKind.PROBE_FAILED, now))
        assert breaker.standing.state is OPEN
    for number, (one, next_one) in enumerate(pairwise(pauses), 1):
        bare = min(policy.open_s * policy.backoff_factor**number, policy.longest_open_s)
        assert bare <= next_one <= bare * (1 + policy.spread) + 1e-6
        assert one <= policy.longest_open_s * (1 + policy.spread) + 1e-6


@given(policies, steps)
def test_it_comes_back_by_the_ramp_only_and_the_ramp_never_falls(policy, events):
    ramping = False
    for _, before, _, after in history(policy, events):
        if after.state is CLOSED and before is not after:
            assert before.state in {RAMPING, COOLING}
            assert after.since >= before.until
            assert before.state is RAMPING or not ramping, "what was ramping goes on with its ramp"
        ramping = after.state is RAMPING or (ramping and after.state is COOLING)
        if after.state is RAMPING:
            shares = [after.share(after.since + policy.ramp_s * part / 10) for part in range(11)]
            assert shares[0] == pytest.approx(policy.ramp_from)
            assert shares == sorted(shares)
            assert shares[-1] == pytest.approx(1.0)
        if after.state is HALF_OPEN:
            assert after.share(after.since + 5) == policy.trial_share


@given(policies, steps)
def test_a_busy_one_is_left_alone_for_as_long_as_it_asks_and_is_no_failure(policy, events):
    for heard, before, breaker, after in history(policy, events):
        if heard.event is BreakerEventKind.BUSY and before.state in {CLOSED, RAMPING, COOLING}:
            assert after.state is COOLING
            assert after.until >= heard.now + heard.rest_s
            assert after.share(heard.now) == 0.0
            assert breaker.row == 0 or before.state is not CLOSED or breaker.row < (policy.row or 1 << 30)
        if before.state is COOLING and after.state in {CLOSED, RAMPING}:
            assert heard.event is BreakerEventKind.RETURNED or heard.now >= before.until


@given(policies, steps)
def test_no_answer_from_before_a_pause_ends_or_prolongs_it(policy, events):
    for heard, before, _, after in history(policy, events):
        old = heard.began is not None and heard.began < before.since and before.state not in {CLOSED, COOLING}
        if old and heard.event in {BreakerEventKind.ANSWERED, BreakerEventKind.FAILED} and before.state in {OPEN, HALF_OPEN}:
            assert after is before


@given(policies, steps)
def test_successes_alone_never_open_it(policy, events):
    for heard, before, _, after in history(policy, events):
        if after.state is OPEN and before.state is not OPEN:
            assert heard.event in {BreakerEventKind.FAILED, BreakerEventKind.PROBE_FAILED, BreakerEventKind.TOLD}
            assert after.reason or heard.event is not BreakerEventKind.FAILED or before.state is HALF_OPEN


@given(policies, steps)
def test_whatever_happened_a_node_that_is_well_again_gets_everything_again(policy, events):
    heard, _, breaker, _ = list(history(policy, events))[-1]
    now = heard.now
    for _ in range(8):
        now += 1000.0
        breaker.hear(BreakerEvent(BreakerEventKind.TIME, now))
        for _ in range(policy.trials):
            breaker.hear(BreakerEvent(BreakerEventKind.ANSWERED, now, now))
    assert breaker.standing.state is CLOSED


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 10.0)), max_size=80), st.floats(1.0, 60.0))
def test_a_window_counts_what_is_young_enough_give_or_take_a_twelfth(answers, seconds):
    window, now, seen = OutcomeWindow(seconds), 0.0, []
    for good, later in answers:
        now += later
        (window.good if good else window.bad)(now)
        seen.append((now, good))
        young = [kind for at, kind in seen if now - at < seconds * 11 / 12]
        able = [kind for at, kind in seen if now - at <= seconds]
        good_count, bad_count = window.counts(now)
        assert sum(young) <= good_count <= sum(able)
        assert len(young) - sum(young) <= bad_count <= len(able) - sum(able)


def test_a_standing_says_its_share_at_any_time():
    ramp = BreakerSnapshot(RAMPING, 100.0, 160.0, 0.1)
    assert [round(ramp.share(now), 2) for now in (90.0, 100.0, 130.0, 160.0, 1000.0)] == [0.1, 0.1, 0.55, 1.0, 1.0]

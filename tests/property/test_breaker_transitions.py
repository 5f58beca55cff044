"""Invariants of the circuit breaker under arbitrary event histories."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.health import BreakerSnapshot, BreakerState
from din_extproc.health.breaker import TRANSITIONS, BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.window import OutcomeWindow

CLOSED, OPEN, HALF_OPEN, RAMPING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING
COOLING = BreakerState.COOLING
MAY = {
    CLOSED: {OPEN, RAMPING, COOLING},
    OPEN: {OPEN, HALF_OPEN, RAMPING},
    HALF_OPEN: {OPEN, RAMPING},
    RAMPING: {OPEN, CLOSED, COOLING},
    COOLING: {OPEN, CLOSED, RAMPING, COOLING},
}
"""The permitted transitions."""

policies = st.builds(
    BreakerPolicy,
    consecutive_failures=st.one_of(st.none(), st.integers(1, 6)),
    failure_share=st.floats(0.05, 1.0),
    min_outcomes=st.integers(1, 20),
    window_s=st.floats(1.0, 120.0),
    open_s=st.floats(0.5, 60.0),
    backoff_factor=st.floats(1.0, 4.0),
    max_open_s=st.floats(60.0, 600.0),
    trial_share=st.floats(0.01, 0.5),
    trials=st.integers(1, 5),
    ramp_from=st.floats(0.05, 1.0),
    ramp_s=st.floats(1.0, 120.0),
)
steps = st.lists(
    st.tuples(st.sampled_from(BreakerEventKind), st.floats(0.0, 90.0), st.one_of(st.none(), st.floats(0.0, 200.0))), min_size=1, max_size=60
)


def history(policy: BreakerPolicy, events, name: str = "gpu-1"):
    """Yield (event, snapshot before, breaker, snapshot after) for every event."""
    breaker, now = CircuitBreaker(name, policy, 0.0), 0.0
    for kind, delay, age in events:
        now += delay
        event = BreakerEvent(kind, now, None if age is None else now - age, cool_down_s=age or 7.0)
        before = breaker.snapshot
        changed = breaker.on_event(event)
        assert changed is (breaker.snapshot is not before)
        yield event, before, breaker, breaker.snapshot


def test_the_table_has_a_transition_for_every_state_and_event():
    assert set(TRANSITIONS) == {(state, event) for state in BreakerState for event in BreakerEventKind}


@given(policies, steps)
def test_only_permitted_transitions_happen(policy, events):
    for event, before, _, after in history(policy, events):
        if after is not before:
            assert after.state in MAY[before.state], (before, event, after)
            assert after.since == event.now or before.state is after.state is OPEN


@given(policies, steps)
def test_an_open_breaker_becomes_half_open_only_after_its_open_time(policy, events):
    for event, before, _, after in history(policy, events):
        if before.state is OPEN and after.state is HALF_OPEN:
            assert event.kind is BreakerEventKind.TICK
            assert event.now >= before.until
        if after.state is OPEN:
            assert after.share(event.now) == 0.0
        if after.state is OPEN and before.state is not OPEN and event.kind not in {BreakerEventKind.BUSY, BreakerEventKind.EXHAUSTED}:
            assert policy.open_s <= after.until - after.since
            longest_s = policy.compute_open_s(100, "gpu-1") * (1 + policy.jitter) + 1e-6
            assert after.until <= max(after.since + longest_s, (before.until or 0.0) if before.state is COOLING else 0.0)


@given(policies, steps)
def test_the_time_until_which_a_node_is_left_out_only_grows(policy, events):
    for event, before, _, after in history(policy, events):
        if before.excluded and event.now < before.until and event.kind is not BreakerEventKind.REJOINED:
            assert after.excluded
            assert after.until >= before.until
        if event.kind is BreakerEventKind.EXHAUSTED or (event.kind is BreakerEventKind.BUSY and before.state is not CLOSED):
            assert after.excluded
            assert after.until >= event.now + event.cool_down_s


@given(policies)
def test_open_times_grow_by_the_backoff_factor_up_to_the_maximum(policy):
    breaker, now, pauses = CircuitBreaker("gpu-1", policy, 0.0), 0.0, []
    breaker.on_event(BreakerEvent(BreakerEventKind.REMOTE_OPEN, now))
    for _ in range(6):
        pauses.append(breaker.snapshot.until - breaker.snapshot.since)
        now = breaker.snapshot.until
        breaker.on_event(BreakerEvent(BreakerEventKind.TICK, now))
        breaker.on_event(BreakerEvent(BreakerEventKind.PROBE_FAILED, now))
        assert breaker.snapshot.state is OPEN
    for number, (one, next_one) in enumerate(pairwise(pauses), 1):
        bare = min(policy.open_s * policy.backoff_factor**number, policy.max_open_s)
        assert bare <= next_one <= bare * (1 + policy.jitter) + 1e-6
        assert one <= policy.max_open_s * (1 + policy.jitter) + 1e-6


@given(policies, steps)
def test_a_breaker_closes_only_through_a_monotonic_ramp(policy, events):
    ramping = False
    for _, before, _, after in history(policy, events):
        if after.state is CLOSED and before is not after:
            assert before.state in {RAMPING, COOLING}
            assert after.since >= before.until
            assert before.state is RAMPING or not ramping, "a ramp interrupted by cooling continues"
        ramping = after.state is RAMPING or (ramping and after.state is COOLING)
        if after.state is RAMPING:
            shares = [after.share(after.since + policy.ramp_s * part / 10) for part in range(11)]
            assert shares[0] == pytest.approx(policy.ramp_from)
            assert shares == sorted(shares)
            assert shares[-1] == pytest.approx(1.0)
        if after.state is HALF_OPEN:
            assert after.share(after.since + 5) == policy.trial_share


@given(policies, steps)
def test_a_busy_node_cools_down_for_the_requested_time_without_a_failure(policy, events):
    for event, before, breaker, after in history(policy, events):
        if event.kind is BreakerEventKind.BUSY and before.state in {CLOSED, RAMPING, COOLING}:
            assert after.state is COOLING
            assert after.until >= event.now + event.cool_down_s
            assert after.share(event.now) == 0.0
            assert (
                breaker.consecutive_failures == 0
                or before.state is not CLOSED
                or breaker.consecutive_failures < (policy.consecutive_failures or 1 << 30)
            )
        if before.state is COOLING and after.state in {CLOSED, RAMPING}:
            assert event.kind is BreakerEventKind.REJOINED or event.now >= before.until


@given(policies, steps)
def test_results_from_before_the_current_state_change_nothing(policy, events):
    for event, before, _, after in history(policy, events):
        old = event.started_at is not None and event.started_at < before.since and before.state not in {CLOSED, COOLING}
        if old and event.kind in {BreakerEventKind.SUCCEEDED, BreakerEventKind.FAILED} and before.state in {OPEN, HALF_OPEN}:
            assert after is before


@given(policies, steps)
def test_successes_alone_never_open_it(policy, events):
    for event, before, _, after in history(policy, events):
        if after.state is OPEN and before.state is not OPEN:
            opening = set(BreakerEventKind) - {BreakerEventKind.SUCCEEDED, BreakerEventKind.PROBE_SUCCEEDED, BreakerEventKind.BUSY}
            assert event.kind in opening or (event.kind is BreakerEventKind.BUSY and before.state is HALF_OPEN)
            assert after.reason or event.kind is not BreakerEventKind.FAILED or before.state is HALF_OPEN


@given(policies, steps)
def test_a_recovered_node_always_returns_to_full_traffic(policy, events):
    event, _, breaker, _ = list(history(policy, events))[-1]
    now = event.now
    for _ in range(8):
        now += 1000.0
        breaker.on_event(BreakerEvent(BreakerEventKind.TICK, now))
        for _ in range(policy.trials):
            breaker.on_event(BreakerEvent(BreakerEventKind.SUCCEEDED, now, now))
    assert breaker.snapshot.state is CLOSED


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 10.0)), max_size=80), st.floats(1.0, 60.0))
def test_a_window_counts_recent_outcomes_to_the_precision_of_one_slice(answers, seconds):
    window, now, seen = OutcomeWindow(seconds), 0.0, []
    for good, later in answers:
        now += later
        window.record_success(now) if good else window.record_failure(now, "")
        seen.append((now, good))
        young = [kind for at, kind in seen if now - at < seconds * 11 / 12]
        able = [kind for at, kind in seen if now - at <= seconds]
        counts = window.count(now)
        assert sum(young) <= counts.successes <= sum(able)
        assert len(young) - sum(young) <= counts.failures <= len(able) - sum(able)


def test_the_share_of_a_ramp_grows_linearly():
    ramp = BreakerSnapshot(RAMPING, 100.0, 160.0, 0.1)
    assert [round(ramp.share(now), 2) for now in (90.0, 100.0, 130.0, 160.0, 1000.0)] == [0.1, 0.1, 0.55, 1.0, 1.0]

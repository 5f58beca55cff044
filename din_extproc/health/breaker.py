"""State machine of one circuit breaker. It reads no clock and knows no node: events carry the time.

Invariant: `TRANSITIONS` has an entry for every pair of state and event, and only its functions change the state. As long as a node is left
out, the time until which it is only grows: a shorter deadline never replaces a longer one, in whatever state it comes. A request counts
once among consecutive failures, and requests of one tenant alone do not open a breaker that is `scarce`.

    closed ──consecutive failures, or failure share──▶ open ──open time is over──▶ half open ──trials succeeded──▶ ramping ──▶ closed
                                                         ▲                            │ one failure                  │ as in closed
                                                         └────────────────────────────┴──────────────────────────────┘
    closed or ramping ──busy──▶ cooling ──cool-down is over──▶ previous state; failures count as in closed
    half open ──busy──▶ open for as long as the node asks
    any state ──exhausted──▶ open for as long as the event says
"""

from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from din_extproc.domain.health import BreakerSnapshot, BreakerState, tenant_of
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.window import OutcomeWindow

_CLOSED, _OPEN, _HALF_OPEN, _RAMPING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING
_COOLING = BreakerState.COOLING
_REFUSALS = 2
"""Refusals in a row that open it, unless its threshold is lower: unlike other failures, they are no matter of chance."""
_KNOWN_ORIGINS = 64
"""Failed requests in a row that are distinguished; no threshold is longer by far."""


class BreakerEventKind(Enum):
    """Kinds of breaker events."""

    SUCCEEDED = "succeeded"
    """A request completed."""
    FAILED = "failed"
    """A request failed and the node is at fault."""
    BUSY = "busy"
    """The node is healthy but overloaded and asked for a pause (429)."""
    EXHAUSTED = "exhausted"
    """The account of a remote API has no credit."""
    PROBE_SUCCEEDED = "probe succeeded"
    PROBE_FAILED = "probe failed"
    TICK = "tick"
    """Time has passed: open times, cool-downs and ramps may end."""
    REMOTE_OPEN = "remote open"
    """Another replica's breaker opened."""
    REJOINED = "rejoined"
    """The node is a member again after it had left."""


_TIMED = frozenset({BreakerEventKind.BUSY, BreakerEventKind.EXHAUSTED})


class BreakerEvent(Struct, frozen=True, gc=False):
    """One event of one breaker. Times in seconds of the monotonic clock."""

    kind: BreakerEventKind
    now: float
    started_at: float | None = None
    """Start of the request that ended; results of requests that started before the current state are ignored. None: `now`."""
    reason: str = ""
    cool_down_s: float = 0.0
    """The pause that a busy node asked for, or that an exhausted account gets."""
    origin: str = ""
    """The request that failed, or the tenant whose requests alone opened another replica's breaker. "": no request caused it."""
    refusal: bool = False
    """The node refused the gateway's credentials or model: no incident that others share, and not over soon. It counts by itself, two in a
    row open the breaker, and the first open time is that of a second trip."""


class CircuitBreaker:
    """Circuit breaker of one node or pool.

    Args:
        name: Name of the node or pool; seeds the jitter.
        policy: Its parameters; replaceable at any time.
        now: Seconds, the monotonic clock.
    """

    __slots__ = (
        "_consecutive_failures",
        "_failed_at",
        "_failing",
        "_name",
        "_scarce",
        "_trials",
        "_trips",
        "_was_ramping",
        "_window",
        "cause",
        "opened_for",
        "policy",
        "snapshot",
    )

    def __init__(self, name: str, policy: BreakerPolicy, now: float) -> None:
        self.policy = policy
        self.snapshot = BreakerSnapshot(_CLOSED, now)
        self.cause: BreakerEventKind | None = None
        """The event that last took it out of the closed state. None: it was always closed."""
        self.opened_for = ""
        """The tenant whose requests alone last opened it; "": others failed too, or no request did it."""
        self._name = name
        self._scarce = False
        self._failing: set[str] = set()
        """Origins of the failures since the last success."""
        self._window = OutcomeWindow(policy.window_s)
        self._consecutive_failures = 0
        self._failed_at: float | None = None
        self._trials = 0
        self._trips = 0
        self._was_ramping = False
        """The state before cooling was ramping."""

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last success, without those of the same incident."""
        return self._consecutive_failures

    @property
    def trips(self) -> int:
        """Return how many times it opened without being closed for a whole open time in between."""
        return self._trips

    def on_event(self, event: BreakerEvent, *, scarce: bool = False) -> bool:
        """Apply an event. Return whether the snapshot changed. `scarce`: opening takes too much away for one tenant's failures to do it."""
        previous, self._scarce = self.snapshot, scarce
        TRANSITIONS[previous.state, event.kind](self, event)
        return self.snapshot is not previous

    # -- transitions --------------------------------------------------------------------------------------------------------------------

    def _ignore(self, event: BreakerEvent) -> None:
        """Ignore the event in this state."""

    def _record_success(self, event: BreakerEvent) -> None:
        self._window.record_success(event.now)
        self._end_run()

    def _end_run(self) -> None:
        self._consecutive_failures = 0
        if self._failing:
            self._failing = set()

    def _record_failure(self, event: BreakerEvent) -> None:
        """Count a failed request; failures within `incident_s` of the last counted one are one consecutive failure."""
        if self._is_outdated(event):
            return
        origin, failing = event.origin, self._failing
        self._window.record_failure(event.now, origin)
        repeated = bool(origin) and origin in failing
        if len(failing) < _KNOWN_ORIGINS:
            failing.add(origin)
        recent = not event.refusal and self._failed_at is not None and event.now - self._failed_at < self.policy.incident_s
        if not repeated and not (recent and self._consecutive_failures):
            self._failed_at = event.now
            self._consecutive_failures += 1
        self._open_if_over_threshold(event)

    def _record_probe_success(self, _event: BreakerEvent) -> None:
        self._end_run()

    def _record_probe_failure(self, event: BreakerEvent) -> None:
        self._consecutive_failures += 1
        self._failing.add("")
        self._open_if_over_threshold(event)

    def _enter_half_open_if_due(self, event: BreakerEvent) -> None:
        """Enter half-open when the open time is over."""
        until = self.snapshot.until
        if until is not None and event.now >= until:
            self._trials = 0
            self.snapshot = BreakerSnapshot(_HALF_OPEN, event.now, None, self.policy.trial_share, self.snapshot.reason)

    def _record_trial_success(self, event: BreakerEvent) -> None:
        if self._is_outdated(event):
            return
        self._trials += 1
        if self._trials >= self.policy.trials:
            self._start_ramp(event)

    def _record_trial_failure(self, event: BreakerEvent) -> None:
        if not self._is_outdated(event):
            self._open(event)

    def _start_ramp(self, event: BreakerEvent) -> None:
        self._forget_outcomes()
        reason = self.snapshot.reason
        if event.kind is BreakerEventKind.REJOINED:
            self.cause, reason = event.kind, event.reason
        self.snapshot = BreakerSnapshot(_RAMPING, event.now, event.now + self.policy.ramp_s, self.policy.ramp_from, reason)

    def _cool_down(self, event: BreakerEvent) -> None:
        """Enter or extend cooling; a shorter request never shortens it."""
        until = event.now + event.cool_down_s
        if until <= self._get_excluded_until():
            return
        if self.snapshot.state is not _COOLING:
            self._was_ramping = self.snapshot.state is _RAMPING
        self.cause = event.kind
        self.snapshot = BreakerSnapshot(_COOLING, event.now, until, 0.0, event.reason)

    def _end_cool_down_if_due(self, event: BreakerEvent) -> None:
        """Return to the previous state when the cool-down is over."""
        until = self.snapshot.until
        if until is None or event.now < until:
            return
        if self._was_ramping:
            self._start_ramp(event)
        else:
            self.snapshot = BreakerSnapshot(_CLOSED, event.now)

    def _close_if_ramped_up(self, event: BreakerEvent) -> None:
        """Enter closed when the ramp is over."""
        until = self.snapshot.until
        if until is not None and event.now >= until:
            self.snapshot = BreakerSnapshot(_CLOSED, event.now)

    def _open(self, event: BreakerEvent) -> None:
        policy, previous = self.policy, self.snapshot
        closed_s = event.now - previous.since if previous.state is _CLOSED else 0.0
        if self._trips and closed_s >= policy.compute_open_s(self._trips, self._name):
            self._trips = 0
        self._trips += 1 + (event.refusal and not self._trips)
        self.cause, self.opened_for = event.kind, tenant_of(event.origin)
        self._forget_outcomes()
        until = max(self._get_excluded_until(), event.now + policy.compute_open_s(self._trips, self._name))
        self.snapshot = BreakerSnapshot(_OPEN, event.now, until, 0.0, event.reason)

    def _open_remotely(self, event: BreakerEvent) -> None:
        """Open as another replica did, but not on one tenant's account when the pool has no node to spare here."""
        if not (self._scarce and event.origin):
            self._open(event)

    def _forget_outcomes(self) -> None:
        self._end_run()
        self._failed_at = None
        self._window.clear()

    def _extend_open(self, event: BreakerEvent) -> None:
        """Stay open, or open, until a busy or exhausted node's or another replica's deadline if that is later."""
        pause_s = event.cool_down_s if event.kind in _TIMED else self.policy.compute_open_s(max(1, self._trips), self._name)
        if event.kind is BreakerEventKind.EXHAUSTED:
            self.cause = event.kind
        if event.now + pause_s > self._get_excluded_until():
            since = self.snapshot.since if self.snapshot.state is _OPEN else event.now
            self.snapshot = BreakerSnapshot(_OPEN, since, event.now + pause_s, 0.0, event.reason or self.snapshot.reason)

    def _get_excluded_until(self) -> float:
        """Return the time until which it gets no requests; 0 when it gets some."""
        snapshot = self.snapshot
        return snapshot.until or 0.0 if snapshot.state in {_OPEN, _COOLING} else 0.0

    def _open_if_over_threshold(self, event: BreakerEvent) -> None:
        policy, threshold = self.policy, self.policy.consecutive_failures
        if threshold is not None and self._consecutive_failures >= (min(threshold, _REFUSALS) if event.refusal else threshold):
            reason = f"{self._consecutive_failures} consecutive failures" if self._consecutive_failures > 1 else "a failure"
            tenants = {tenant_of(origin) for origin in self._failing}
            alone = len(tenants) == 1 and "" not in tenants
        else:
            counts = self._window.count(event.now)
            answers, others = counts.successes + counts.failures, counts.failures - counts.failures_of_one
            if not self._is_too_large(counts.failures, answers):
                return
            reason = f"{counts.failures} of {answers} answers failed within {policy.window_s:g} s"
            alone = not self._is_too_large(others, counts.successes + others)
        if alone and self._scarce:
            return
        reason = f"{reason}{f', the last: {event.reason}' if event.reason else ''}"
        self._open(BreakerEvent(event.kind, event.now, reason=reason, origin=event.origin if alone else "", refusal=event.refusal))

    def _is_too_large(self, failures: int, answers: int) -> bool:
        """Return whether so many failures among so many answers open it."""
        return answers >= self.policy.min_outcomes and failures > self.policy.failure_share * answers

    def _is_outdated(self, event: BreakerEvent) -> bool:
        """Return whether the request started before the current state; then its result is ignored."""
        return event.started_at is not None and event.started_at < self.snapshot.since and self.snapshot.state not in {_CLOSED, _COOLING}


Transition = Callable[[CircuitBreaker, BreakerEvent], None]
TRANSITIONS: dict[tuple[BreakerState, BreakerEventKind], Transition] = {
    (_CLOSED, BreakerEventKind.SUCCEEDED): CircuitBreaker._record_success,  # noqa: SLF001 - the table is the class's own
    (_CLOSED, BreakerEventKind.FAILED): CircuitBreaker._record_failure,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.BUSY): CircuitBreaker._cool_down,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.PROBE_SUCCEEDED): CircuitBreaker._record_probe_success,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.PROBE_FAILED): CircuitBreaker._record_probe_failure,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.TICK): CircuitBreaker._ignore,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.REMOTE_OPEN): CircuitBreaker._open_remotely,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.REJOINED): CircuitBreaker._start_ramp,  # noqa: SLF001
    (_OPEN, BreakerEventKind.SUCCEEDED): CircuitBreaker._ignore,  # noqa: SLF001
    (_OPEN, BreakerEventKind.FAILED): CircuitBreaker._ignore,  # noqa: SLF001
    (_OPEN, BreakerEventKind.BUSY): CircuitBreaker._extend_open,  # noqa: SLF001
    (_OPEN, BreakerEventKind.PROBE_SUCCEEDED): CircuitBreaker._ignore,  # noqa: SLF001
    (_OPEN, BreakerEventKind.PROBE_FAILED): CircuitBreaker._ignore,  # noqa: SLF001
    (_OPEN, BreakerEventKind.TICK): CircuitBreaker._enter_half_open_if_due,  # noqa: SLF001
    (_OPEN, BreakerEventKind.REMOTE_OPEN): CircuitBreaker._extend_open,  # noqa: SLF001
    (_OPEN, BreakerEventKind.REJOINED): CircuitBreaker._start_ramp,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.SUCCEEDED): CircuitBreaker._record_trial_success,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.FAILED): CircuitBreaker._record_trial_failure,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.BUSY): CircuitBreaker._extend_open,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.PROBE_SUCCEEDED): CircuitBreaker._record_trial_success,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.PROBE_FAILED): CircuitBreaker._record_trial_failure,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.TICK): CircuitBreaker._ignore,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.REMOTE_OPEN): CircuitBreaker._open,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.REJOINED): CircuitBreaker._start_ramp,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.SUCCEEDED): CircuitBreaker._record_success,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.FAILED): CircuitBreaker._record_failure,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.BUSY): CircuitBreaker._cool_down,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.PROBE_SUCCEEDED): CircuitBreaker._record_probe_success,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.PROBE_FAILED): CircuitBreaker._record_probe_failure,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.TICK): CircuitBreaker._close_if_ramped_up,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.REMOTE_OPEN): CircuitBreaker._open_remotely,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.REJOINED): CircuitBreaker._ignore,  # noqa: SLF001
    (_COOLING, BreakerEventKind.SUCCEEDED): CircuitBreaker._record_success,  # noqa: SLF001
    (_COOLING, BreakerEventKind.FAILED): CircuitBreaker._record_failure,  # noqa: SLF001
    (_COOLING, BreakerEventKind.BUSY): CircuitBreaker._cool_down,  # noqa: SLF001
    (_COOLING, BreakerEventKind.PROBE_SUCCEEDED): CircuitBreaker._record_probe_success,  # noqa: SLF001
    (_COOLING, BreakerEventKind.PROBE_FAILED): CircuitBreaker._record_probe_failure,  # noqa: SLF001
    (_COOLING, BreakerEventKind.TICK): CircuitBreaker._end_cool_down_if_due,  # noqa: SLF001
    (_COOLING, BreakerEventKind.REMOTE_OPEN): CircuitBreaker._open_remotely,  # noqa: SLF001
    (_COOLING, BreakerEventKind.REJOINED): CircuitBreaker._start_ramp,  # noqa: SLF001
    **{(state, BreakerEventKind.EXHAUSTED): CircuitBreaker._extend_open for state in BreakerState},  # noqa: SLF001
}
"""The transition of every state and event."""

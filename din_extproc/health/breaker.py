"""One circuit breaker: what each event means in each state. No clock, no names of nodes: only the table and the step (R23, R26).

Rule: every pair of state and event stands in the table, and only the table changes a state.

    closed ──failures in a row, or too large a share──▶ open ──its pause is over──▶ half open ──trials went well──▶ ramping ──▶ closed
                                                         ▲                            │ one failure                  │ as if closed
                                                         └────────────────────────────┴──────────────────────────────┘
    closed or ramping ──busy, and asks for time──▶ cooling ──it is over──▶ as it was; failures meanwhile count as if closed
"""

from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from din_extproc.domain.health import BreakerSnapshot, BreakerState
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.window import OutcomeWindow

_CLOSED, _OPEN, _HALF_OPEN, _RAMPING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.RAMPING
_COOLING = BreakerState.COOLING


class BreakerEventKind(Enum):
    """What a breaker hears."""

    ANSWERED = "answered"
    """A request ran to its end."""
    FAILED = "failed"
    """A request failed through the fault of the node."""
    BUSY = "busy"
    """The node has too much to do and asks to be left alone for a while: it is well."""
    PROBE_ANSWERED = "probe answered"
    PROBE_FAILED = "probe failed"
    TIME = "time"
    """Nothing happened but that time went by."""
    TOLD = "told"
    """Another replica's breaker has opened."""
    RETURNED = "returned"
    """The node is a member again after it was none."""


class BreakerEvent(Struct, frozen=True, gc=False):
    """One event."""

    event: BreakerEventKind
    now: float
    began: float | None = None
    """When the request began that ended; what began before the state did says nothing of the state. None: now."""
    reason: str = ""
    rest_s: float = 0.0
    """For how long a busy one asks to be left alone."""


class CircuitBreaker:
    """A breaker of one node or pool.

    Args:
        name: Whose it is.
        policy: Its parameters; they may be replaced at any time.
        now: Seconds, the monotonic clock.
    """

    __slots__ = ("_failed_at", "_name", "_ramps", "_row", "_trials", "_trips", "_window", "cause", "policy", "standing")

    def __init__(self, name: str, policy: BreakerPolicy, now: float) -> None:
        self.policy = policy
        self.standing = BreakerSnapshot(_CLOSED, now)
        self.cause: BreakerEventKind | None = None
        """What took it out of the closed state the last time. None: nothing ever did."""
        self._name = name
        self._window = OutcomeWindow(policy.window_s)
        self._row = 0
        self._failed_at: float | None = None
        self._trials = 0
        self._trips = 0
        self._ramps = False
        """While cooling: it was ramping before."""

    @property
    def row(self) -> int:
        """Failures since the last success."""
        return self._row

    @property
    def trips(self) -> int:
        """How often it opened, without a whole pause of peace between."""
        return self._trips

    def counts(self, now: float) -> tuple[int, int]:
        """Answers in the window that went well, and those that did not."""
        return self._window.counts(now)

    def hear(self, heard: BreakerEvent) -> bool:
        """Take an event. True: the standing is another one now."""
        before = self.standing
        TABLE[before.state, heard.event](self, heard)
        return self.standing is not before

    # -- what the table does ---------------------------------------------------------------------------------------------------------

    def _stay(self, heard: BreakerEvent) -> None:
        """It says nothing here."""

    def _good(self, heard: BreakerEvent) -> None:
        self._window.good(heard.now)
        self._row = 0

    def _bad(self, heard: BreakerEvent) -> None:
        """A failed request: one more in the window, and in the row unless it belongs to the last incident."""
        if self._is_echo(heard):
            return
        self._window.bad(heard.now)
        if self._failed_at is None or heard.now - self._failed_at >= self.policy.incident_s or not self._row:
            self._failed_at = heard.now
            self._row += 1
        self._judge(heard)

    def _probe_good(self, _heard: BreakerEvent) -> None:
        self._row = 0

    def _probe_bad(self, heard: BreakerEvent) -> None:
        self._row += 1
        self._judge(heard)

    def _try(self, heard: BreakerEvent) -> None:
        """The pause may be over."""
        until = self.standing.until
        if until is not None and heard.now >= until:
            self._trials = 0
            self.standing = BreakerSnapshot(_HALF_OPEN, heard.now, None, self.policy.trial_share, self.standing.reason)

    def _trial_good(self, heard: BreakerEvent) -> None:
        if self._is_echo(heard):
            return
        self._trials += 1
        if self._trials >= self.policy.trials:
            self._ramp(heard)

    def _trial_bad(self, heard: BreakerEvent) -> None:
        if not self._is_echo(heard):
            self._open(heard)

    def _ramp(self, heard: BreakerEvent) -> None:
        self._row, self._failed_at = 0, None
        self._window.clear()
        reason = self.standing.reason
        if heard.event is BreakerEventKind.RETURNED:
            self.cause, reason = heard.event, heard.reason
        self.standing = BreakerSnapshot(_RAMPING, heard.now, heard.now + self.policy.ramp_s, self.policy.ramp_from, reason)

    def _cool(self, heard: BreakerEvent) -> None:
        """It is left alone for as long as it asks, never for less than it asked before."""
        until = heard.now + heard.rest_s
        if self.standing.state is _COOLING and until <= (self.standing.until or 0.0):
            return
        if self.standing.state is not _COOLING:
            self._ramps = self.standing.state is _RAMPING
        self.cause = heard.event
        self.standing = BreakerSnapshot(_COOLING, heard.now, until, 0.0, heard.reason)

    def _warm(self, heard: BreakerEvent) -> None:
        """The time that it asked for may be over."""
        until = self.standing.until
        if until is None or heard.now < until:
            return
        if self._ramps:
            self._ramp(heard)
        else:
            self.standing = BreakerSnapshot(_CLOSED, heard.now)

    def _arrive(self, heard: BreakerEvent) -> None:
        """The ramp may be at its end."""
        until = self.standing.until
        if until is not None and heard.now >= until:
            self.standing = BreakerSnapshot(_CLOSED, heard.now)

    def _open(self, heard: BreakerEvent) -> None:
        policy, before = self.policy, self.standing
        peace_s = heard.now - before.since if before.state is _CLOSED else 0.0
        if self._trips and peace_s >= policy.pause_s(self._trips, self._name):
            self._trips = 0
        self._trips += 1
        self.cause = heard.event
        self._row, self._failed_at = 0, None
        self._window.clear()
        until = heard.now + policy.pause_s(self._trips, self._name)
        self.standing = BreakerSnapshot(_OPEN, heard.now, until, 0.0, heard.reason)

    def _judge(self, heard: BreakerEvent) -> None:
        policy = self.policy
        if policy.row is not None and self._row >= policy.row:
            said = f"{self._row} failures in a row" if self._row > 1 else "a failure"
        else:
            good, bad = self._window.counts(heard.now)
            if good + bad < policy.least or bad <= policy.share * (good + bad):
                return
            said = f"{bad} of {good + bad} answers failed within {policy.window_s:g} s"
        self._open(BreakerEvent(heard.event, heard.now, None, f"{said}{f', the last: {heard.reason}' if heard.reason else ''}"))

    def _is_echo(self, heard: BreakerEvent) -> bool:
        """Whether the request began before the state did, which is then not spoken of."""
        return heard.began is not None and heard.began < self.standing.since and self.standing.state not in {_CLOSED, _COOLING}


Step = Callable[[CircuitBreaker, BreakerEvent], None]
TABLE: dict[tuple[BreakerState, BreakerEventKind], Step] = {
    (_CLOSED, BreakerEventKind.ANSWERED): CircuitBreaker._good,  # noqa: SLF001 - the table is the class's own
    (_CLOSED, BreakerEventKind.FAILED): CircuitBreaker._bad,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.BUSY): CircuitBreaker._cool,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.PROBE_ANSWERED): CircuitBreaker._probe_good,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.PROBE_FAILED): CircuitBreaker._probe_bad,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.TIME): CircuitBreaker._stay,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.TOLD): CircuitBreaker._open,  # noqa: SLF001
    (_CLOSED, BreakerEventKind.RETURNED): CircuitBreaker._ramp,  # noqa: SLF001
    (_OPEN, BreakerEventKind.ANSWERED): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.FAILED): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.BUSY): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.PROBE_ANSWERED): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.PROBE_FAILED): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.TIME): CircuitBreaker._try,  # noqa: SLF001
    (_OPEN, BreakerEventKind.TOLD): CircuitBreaker._stay,  # noqa: SLF001
    (_OPEN, BreakerEventKind.RETURNED): CircuitBreaker._ramp,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.ANSWERED): CircuitBreaker._trial_good,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.FAILED): CircuitBreaker._trial_bad,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.BUSY): CircuitBreaker._stay,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.PROBE_ANSWERED): CircuitBreaker._trial_good,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.PROBE_FAILED): CircuitBreaker._trial_bad,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.TIME): CircuitBreaker._stay,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.TOLD): CircuitBreaker._open,  # noqa: SLF001
    (_HALF_OPEN, BreakerEventKind.RETURNED): CircuitBreaker._ramp,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.ANSWERED): CircuitBreaker._good,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.FAILED): CircuitBreaker._bad,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.BUSY): CircuitBreaker._cool,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.PROBE_ANSWERED): CircuitBreaker._probe_good,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.PROBE_FAILED): CircuitBreaker._probe_bad,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.TIME): CircuitBreaker._arrive,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.TOLD): CircuitBreaker._open,  # noqa: SLF001
    (_RAMPING, BreakerEventKind.RETURNED): CircuitBreaker._stay,  # noqa: SLF001
    (_COOLING, BreakerEventKind.ANSWERED): CircuitBreaker._good,  # noqa: SLF001
    (_COOLING, BreakerEventKind.FAILED): CircuitBreaker._bad,  # noqa: SLF001
    (_COOLING, BreakerEventKind.BUSY): CircuitBreaker._cool,  # noqa: SLF001
    (_COOLING, BreakerEventKind.PROBE_ANSWERED): CircuitBreaker._probe_good,  # noqa: SLF001
    (_COOLING, BreakerEventKind.PROBE_FAILED): CircuitBreaker._probe_bad,  # noqa: SLF001
    (_COOLING, BreakerEventKind.TIME): CircuitBreaker._warm,  # noqa: SLF001
    (_COOLING, BreakerEventKind.TOLD): CircuitBreaker._open,  # noqa: SLF001
    (_COOLING, BreakerEventKind.RETURNED): CircuitBreaker._ramp,  # noqa: SLF001
}
"""What each event does in each state."""

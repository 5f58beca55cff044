"""From finished exchanges and failed attempts to breaker events: the one place that says what counts against a node or pool.

Rule: what a client causes (its timeout, its errors, its leaving) counts for nothing.

| outcome                                        | node                                | pool       | pool that it moved from |
|------------------------------------------------|-------------------------------------|------------|-------------------------|
| completed                                      | succeeded                           | succeeded  | failed                  |
| upstream busy (429), 529 of an attempt         | busy, for as long as the node asks  | -          | failed                  |
| 402 of an attempt: the account has no credit   | exhausted, for the longest pause    | -          | -                       |
| upstream error, timeout of an attempt, cut off | failed, unless Envoy has reported   | failed     | failed                  |
|                                                | the failed attempt by itself        |            |                         |
| not dispatched: no host was left (`UH`)        | -                                   | failed     | failed                  |
| timeout of the whole request, an answer larger | -                                   | -          | failed                  |
| than the gateway holds, anything else          |                                     |            |                         |
"""

from msgspec import Struct

from din_extproc.domain.access_log import ATTEMPT_FLAGS
from din_extproc.domain.health import NO_CREDIT_REASON
from din_extproc.domain.usage import ANSWER_TOO_LARGE, UPSTREAM_FAULTS, ExchangeRecord, FailedAttempt, Outcome
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind

REQUEST_CAUSES = frozenset({BreakerEventKind.FAILED, BreakerEventKind.BUSY, BreakerEventKind.EXHAUSTED, BreakerEventKind.REMOTE_OPEN})
"""Events that follow from requests, here or at another replica."""
PROBE_CAUSES = frozenset({BreakerEventKind.PROBE_FAILED})
BUSY_REASON = "it is busy and asks for time"
_NO_CREDIT, _OVERLOADED = "402", "529"
_SERVER_ERROR = 500
_COOL_DOWN_S = 1.0
"""For a node that answers 429 without `retry-after`."""
_NO_HOST = "UH"


class ExchangeEvents(Struct, frozen=True, gc=False):
    """What one finished exchange means to the breakers that it concerns. None: nothing."""

    node: BreakerEvent | None = None
    pool: BreakerEvent | None = None
    moved_from: BreakerEvent | None = None


def classify_exchange(record: ExchangeRecord, now: float, *, attempts_reported: bool, longest_open_s: float) -> ExchangeEvents:
    """Return the breaker events of a finished exchange.

    Args:
        record: The exchange.
        now: Its end, in seconds of the monotonic clock.
        attempts_reported: Whether Envoy reports failed attempts one by one; else the last one counts here.
        longest_open_s: The longest pause that a busy node is given.
    """
    began = now - (record.duration_ms or 0.0) / 1000
    moved = BreakerEvent(BreakerEventKind.FAILED, now, began, "moved in flight") if record.moved_from else None
    outcome = record.outcome
    if outcome is Outcome.COMPLETED:
        succeeded = BreakerEvent(BreakerEventKind.SUCCEEDED, now, began) if record.node_id else None
        return ExchangeEvents(succeeded, succeeded, moved)
    if outcome is Outcome.UPSTREAM_BUSY and record.node_id:
        cool_down_s = min(longest_open_s, record.retry_after_s or _COOL_DOWN_S)
        return ExchangeEvents(BreakerEvent(BreakerEventKind.BUSY, now, began, BUSY_REASON, cool_down_s), None, moved)
    unreached = outcome is Outcome.NOT_DISPATCHED and _NO_HOST in record.response_flags
    if not (outcome in UPSTREAM_FAULTS or unreached) or record.deadline_exceeded or record.error == ANSWER_TOO_LARGE:
        return ExchangeEvents(None, None, moved)
    failed = BreakerEvent(BreakerEventKind.FAILED, now, began, record.error or outcome.value)
    reported = record.status >= _SERVER_ERROR or any(flag in ATTEMPT_FLAGS for flag in record.response_flags)
    return ExchangeEvents(None if unreached or (reported and attempts_reported) else failed, failed, moved)


def classify_attempt(attempt: FailedAttempt, now: float, *, longest_open_s: float) -> BreakerEvent:
    """Return the breaker event of a failed attempt at its node.

    Args:
        attempt: The attempt.
        now: Its end, in seconds of the monotonic clock.
        longest_open_s: The longest pause that a node is given.
    """
    if attempt.reason == _NO_CREDIT:
        return BreakerEvent(BreakerEventKind.EXHAUSTED, now, None, NO_CREDIT_REASON, longest_open_s)
    if attempt.reason == _OVERLOADED:
        cool_down_s = min(longest_open_s, attempt.retry_after_s or _COOL_DOWN_S)
        return BreakerEvent(BreakerEventKind.BUSY, now, None, BUSY_REASON, cool_down_s)
    return BreakerEvent(BreakerEventKind.FAILED, now, now - attempt.duration_ms / 1000, attempt.reason)

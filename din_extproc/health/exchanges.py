"""From finished exchanges and failed attempts to breaker events: the one place that says what counts against a node or pool.

Rule: what a client causes (its timeout, its errors, its leaving) counts for nothing. A failure has the request for its origin, but for a
connection that could not be opened, and for credentials of the gateway that were refused: no request causes that.

| outcome                                        | node                                | pool       | pool that it moved from |
|------------------------------------------------|-------------------------------------|------------|-------------------------|
| completed                                      | succeeded                           | succeeded  | failed                  |
| upstream busy (429), 529 of an attempt         | busy, for as long as the node asks  | -          | failed                  |
| 402 of an attempt: the account has no credit   | exhausted, for the longest pause    | -          | -                       |
| upstream error, timeout of an attempt, cut off | failed; once with its last attempt, | failed     | failed                  |
|                                                | by its origin                       |            |                         |
| not dispatched: no host was left (`UH`)        | -                                   | failed     | failed                  |
| timeout of the whole request, a whole answer   | -                                   | -          | failed                  |
| that was silent for as long as clients wait,   |                                     |            |                         |
| one larger than the gateway holds, all else    |                                     |            |                         |
"""

from collections.abc import Container

from msgspec import Struct

from din_extproc.domain.access_log import ATTEMPT_FLAGS
from din_extproc.domain.health import NO_CREDIT_REASON, tenant_of
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
_UNCONNECTED = "UF"
_SILENCE = "SI"
_GATEWAY_REFUSED = frozenset({"401", "402", "403"})
_NOT_FOUND = "404"
"""The gateway chose the model's name, so that every one counts; but of one tenant's alone, because a path can be missing, too."""


class ExchangeEvents(Struct, frozen=True, gc=False):
    """Return the event of one finished exchange for the breakers that it concerns. None: no event."""

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
    moved = BreakerEvent(BreakerEventKind.FAILED, now, began, "moved in flight", origin=record.origin) if record.moved_from else None
    outcome = record.outcome
    if outcome is Outcome.COMPLETED:
        succeeded = BreakerEvent(BreakerEventKind.SUCCEEDED, now, began) if record.node_id else None
        return ExchangeEvents(succeeded, succeeded, moved)
    if outcome is Outcome.UPSTREAM_BUSY and record.node_id:
        cool_down_s = min(longest_open_s, record.retry_after_s or _COOL_DOWN_S)
        return ExchangeEvents(BreakerEvent(BreakerEventKind.BUSY, now, began, BUSY_REASON, cool_down_s), None, moved)
    unreached = outcome is Outcome.NOT_DISPATCHED and _NO_HOST in record.response_flags
    slow = record.deadline_exceeded or (_SILENCE in record.response_flags and not record.stream)
    if not (outcome in UPSTREAM_FAULTS or unreached) or slow or record.error == ANSWER_TOO_LARGE:
        return ExchangeEvents(None, None, moved)
    origin = "" if unreached or _UNCONNECTED in record.response_flags else record.origin
    failed = BreakerEvent(BreakerEventKind.FAILED, now, began, record.error or outcome.value, origin=origin)
    reported = record.status >= _SERVER_ERROR or any(flag in ATTEMPT_FLAGS for flag in record.response_flags)
    return ExchangeEvents(None if unreached or (reported and attempts_reported and not origin) else failed, failed, moved)


def classify_attempt(attempt: FailedAttempt, now: float, retried: Container[int], *, longest_open_s: float) -> BreakerEvent | None:
    """Return the breaker event of a failed attempt at its node. None: its exchange is judged instead, because no other attempt followed.

    Only the exchange's answer has been read: an engine's 500 can say that the request is too long.

    Args:
        attempt: The attempt.
        now: Its end, in seconds of the monotonic clock.
        retried: Statuses at which Envoy asks another node.
        longest_open_s: The longest pause that a node is given.

    A node without the adapter of a request has not failed: it is asked for that adapter no more.
    """
    reason = attempt.reason
    if attempt.lacks_adapter:
        return None
    if reason == _NO_CREDIT:
        return BreakerEvent(BreakerEventKind.EXHAUSTED, now, None, NO_CREDIT_REASON, longest_open_s)
    if reason == _OVERLOADED:
        cool_down_s = min(longest_open_s, attempt.retry_after_s or _COOL_DOWN_S)
        return BreakerEvent(BreakerEventKind.BUSY, now, None, BUSY_REASON, cool_down_s)
    if attempt.origin and reason.isdigit() and int(reason) >= _SERVER_ERROR and int(reason) not in retried:
        return None
    origin = attempt.origin
    if _UNCONNECTED in reason or reason in _GATEWAY_REFUSED:
        origin = ""
    elif origin and reason == _NOT_FOUND:
        origin = f"{tenant_of(origin)}{attempt.started_at}"
    refusal = reason in _GATEWAY_REFUSED or reason == _NOT_FOUND
    return BreakerEvent(BreakerEventKind.FAILED, now, now - attempt.duration_ms / 1000, reason, origin=origin, refusal=refusal)

"""What a finished exchange means to the breakers of its node and pools."""

from typing import Any

import pytest

from din_extproc.domain.health import NO_CREDIT_REASON, BreakerState
from din_extproc.domain.usage import ANSWER_TOO_LARGE, ExchangeRecord, FailedAttempt, Outcome, Usage
from din_extproc.health.breaker import BreakerEventKind, CircuitBreaker
from din_extproc.health.exchanges import ExchangeEvents, classify_attempt, classify_exchange
from din_extproc.health.policy import BreakerPolicy

NOW = 100.0
RETRIED = (503,)
FAILED, SUCCEEDED, BUSY = BreakerEventKind.FAILED, BreakerEventKind.SUCCEEDED, BreakerEventKind.BUSY


def classify(outcome: Outcome, *, attempts_reported: bool = True, **fields: Any) -> ExchangeEvents:
    known = {
        "request_id": "r", "trace_id": "t", "tenant": "acme", "key_id": "k", "model": "m", "alias": "m", "pool": "chat", "rule": "",
        "node_id": "a", "status": 200, "outcome": outcome, "stream": True, "usage": Usage(1, 1), "reserved_tokens": 2,
        "prompt_estimate": 1, "features": (), "fixed": 0, "attempts": 1, "degraded": False, "started_at": 0.0, "duration_ms": 500.0,
    }  # fmt: skip
    return classify_exchange(ExchangeRecord(**known | fields), NOW, attempts_reported=attempts_reported, longest_open_s=60.0)


def kinds(events: ExchangeEvents) -> tuple[BreakerEventKind | None, ...]:
    return tuple(None if event is None else event.kind for event in (events.node, events.pool, events.moved_from))


@pytest.mark.parametrize(
    ("outcome", "fields", "expected"),
    [
        (Outcome.COMPLETED, {}, (SUCCEEDED, SUCCEEDED, None)),
        (Outcome.COMPLETED, {"node_id": ""}, (None, None, None)),
        (Outcome.COMPLETED, {"moved_from": "first"}, (SUCCEEDED, SUCCEEDED, FAILED)),
        (Outcome.UPSTREAM_BUSY, {"status": 429}, (BUSY, None, None)),
        (Outcome.UPSTREAM_ERROR, {"status": 503}, (None, FAILED, None)),
        (Outcome.UPSTREAM_ERROR, {"status": 200, "error": "server_error"}, (FAILED, FAILED, None)),
        (Outcome.UPSTREAM_TRUNCATED, {"response_flags": ("UC",)}, (None, FAILED, None)),
        (Outcome.UPSTREAM_TRUNCATED, {}, (FAILED, FAILED, None)),
        (Outcome.UPSTREAM_TIMEOUT, {"status": 504, "response_flags": ("UT",)}, (None, FAILED, None)),
        (Outcome.UPSTREAM_TIMEOUT, {"status": 504, "deadline_exceeded": True}, (None, None, None)),
        (Outcome.UPSTREAM_TIMEOUT, {"status": 504, "response_flags": ("SI",), "stream": False}, (None, None, None)),
        (Outcome.UPSTREAM_ERROR, {"status": 502, "error": ANSWER_TOO_LARGE}, (None, None, None)),
        (Outcome.NOT_DISPATCHED, {"status": 503, "response_flags": ("UH",), "node_id": ""}, (None, FAILED, None)),
        (Outcome.NOT_DISPATCHED, {"status": 503, "node_id": ""}, (None, None, None)),
        (Outcome.CLIENT_CANCELLED, {}, (None, None, None)),
        (Outcome.CLIENT_ERROR, {"status": 400}, (None, None, None)),
        (Outcome.REFUSED, {"status": 429, "node_id": ""}, (None, None, None)),
    ],
)
def test_each_outcome_counts_for_the_node_and_the_pools_that_it_concerns(outcome, fields, expected):
    assert kinds(classify(outcome, **fields)) == expected


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_TRUNCATED])
def test_the_last_attempt_counts_for_the_node_when_envoy_reports_no_attempts(outcome):
    assert kinds(classify(outcome, status=503, attempts_reported=False)) == (FAILED, FAILED, None)


@pytest.mark.parametrize(("asked", "given"), [(None, 1.0), (7, 7.0), (3600, 60.0)])
def test_a_busy_node_gets_the_pause_that_it_asks_for_up_to_the_longest(asked, given):
    events = classify(Outcome.UPSTREAM_BUSY, status=429, retry_after_s=asked)
    assert events.node is not None
    assert events.node.cool_down_s == given


@pytest.mark.parametrize(
    ("reason", "counts_for"),
    [
        ("503", "aaaaaaaa01020304"),
        ("UC", "aaaaaaaa01020304"),
        ("UT", "aaaaaaaa01020304"),
        ("UF", ""),
        ("401", ""),
        ("404", "aaaaaaaa7.5"),
    ],
)
def test_a_failed_attempt_counts_for_its_request_unless_no_request_can_cause_it(reason, counts_for):
    attempt = classify_attempt(FailedAttempt("a", reason, 250.0, 7.5, origin="aaaaaaaa01020304"), NOW, RETRIED, longest_open_s=60.0)
    assert attempt is not None
    assert attempt.origin == counts_for


def test_an_attempt_that_no_other_followed_counts_by_its_exchange():
    assert classify_attempt(FailedAttempt("a", "500", 250.0, origin="aaaaaaaa01020304"), NOW, RETRIED, longest_open_s=60.0) is None
    events = classify(Outcome.UPSTREAM_ERROR, status=502, origin="aaaaaaaa01020304")
    assert events.node is not None
    assert events.node.origin == "aaaaaaaa01020304"


def test_events_begin_when_the_exchange_or_the_attempt_began():
    events = classify(Outcome.COMPLETED)
    assert events.node is not None
    assert (events.node.now, events.node.started_at) == (NOW, NOW - 0.5)
    attempt = classify_attempt(FailedAttempt("a", "UF", 250.0), NOW, RETRIED, longest_open_s=60.0)
    assert attempt is not None
    assert (attempt.kind, attempt.reason, attempt.started_at) == (FAILED, "UF", NOW - 0.25)


@pytest.mark.parametrize(("asked", "given"), [(None, 1.0), (7, 7.0), (90, 60.0)])
def test_an_overloaded_provider_is_left_out_for_as_long_as_it_asks(asked, given):
    event = classify_attempt(FailedAttempt("a", "529", 250.0, retry_after_s=asked), NOW, RETRIED, longest_open_s=60.0)
    assert event is not None
    assert (event.kind, event.cool_down_s) == (BreakerEventKind.BUSY, given)


def test_an_account_without_credit_opens_its_breaker_at_once_and_for_the_longest_pause():
    event = classify_attempt(FailedAttempt("a", "402", 250.0), NOW, RETRIED, longest_open_s=600.0)
    breaker = CircuitBreaker("a", BreakerPolicy(), NOW - 1)
    assert event is not None
    assert breaker.on_event(event)
    assert (breaker.snapshot.state, breaker.snapshot.until, breaker.snapshot.reason) == (BreakerState.OPEN, NOW + 600.0, NO_CREDIT_REASON)


def test_a_node_without_the_adapter_of_a_request_has_not_failed():
    lacks = FailedAttempt("a", "404", origin="acme:1", adapter="sql")
    assert lacks.lacks_adapter
    assert classify_attempt(lacks, NOW, RETRIED, longest_open_s=60.0) is None
    broken = FailedAttempt("a", "500", adapter="sql")
    assert classify_attempt(broken, NOW, RETRIED, longest_open_s=60.0).kind is FAILED

"""Standing and refusal as a client sees them."""

import pytest

from din_extproc.admit.headers import (
    anthropic_rate_limit_headers,
    format_duration,
    rate_limit_headers,
    refuse_denied,
    refuse_limits_unavailable,
    retry_headers,
)
from din_extproc.admit.ledger import Claim, Denied, RateLimitStatus
from din_extproc.domain.verdict import RefusalCode

FULL = RateLimitStatus(
    limit_requests=600, remaining_requests=599, reset_requests_ms=61_000, limit_tokens=8000, remaining_tokens=0, reset_tokens_ms=12
)
CLAIM = Claim("r", "finance", (), 9000, 1000)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (12, "12ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1001, "1.001s"),
        (8640, "8.64s"),
        (60_000, "1m0s"),
        (90_500, "1m30.5s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (86_399_999, "23h59m59.999s"),
    ],
)
def test_durations_are_written_as_go_and_openai_write_them(ms, text):
    assert format_duration(ms) == text


def test_the_status_has_openais_names():
    assert dict(rate_limit_headers(FULL)) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "8000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "12ms",
    }


def test_a_dimension_without_a_limit_has_no_header():
    assert rate_limit_headers(RateLimitStatus()) == ()
    requests = RateLimitStatus(limit_requests=1, remaining_requests=1, reset_requests_ms=0)
    assert [name for name, _ in rate_limit_headers(requests)] == [
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
    ]
    tokens = RateLimitStatus(limit_tokens=1, remaining_tokens=1, reset_tokens_ms=0)
    assert [name for name, _ in rate_limit_headers(tokens)] == [
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    ]


@pytest.mark.parametrize(("ms", "seconds", "exact"), [(0, "1", "1"), (1, "1", "1"), (1000, "1", "1000"), (1001, "2", "1001")])
def test_retry_after_is_whole_seconds_rounded_up_and_never_zero(ms, seconds, exact):
    assert retry_headers(ms) == (("retry-after", seconds), ("retry-after-ms", exact))


@pytest.mark.parametrize(
    ("dimension", "code"),
    [
        ("rpm", RefusalCode.RATE_LIMIT_EXCEEDED),
        ("tpm", RefusalCode.RATE_LIMIT_EXCEEDED),
        ("max_streams", RefusalCode.CONCURRENCY_LIMIT_EXCEEDED),
    ],
)
def test_a_reached_limit_is_a_429_that_says_when_to_come_back(dimension, code):
    refused = refuse_denied(Denied("model:m", dimension, 8000, 950, FULL), CLAIM)
    assert refused.code is code
    assert refused.retry_after_ms == 950
    assert refused.headers == (*rate_limit_headers(FULL), ("retry-after", "1"), ("retry-after-ms", "950"))
    assert "model m" in refused.message
    assert "8000" in refused.message
    assert "950ms" in refused.message


def test_a_token_refusal_names_limit_and_requested():
    assert "requested 9000" in refuse_denied(Denied("tenant", "tpm", 10_000, 1, FULL), CLAIM).message


@pytest.mark.parametrize(("lease_left_ms", "expected_ms"), [(30_000, 1000), (400, 400)])
def test_a_slot_is_worth_another_try_before_the_oldest_lease_runs_out(lease_left_ms, expected_ms):
    refused = refuse_denied(Denied("tenant", "max_streams", 2, lease_left_ms, FULL), CLAIM)
    assert refused.code is RefusalCode.CONCURRENCY_LIMIT_EXCEEDED
    assert refused.retry_after_ms == expected_ms


def test_oversize_is_a_400_without_a_time_to_retry():
    refused = refuse_denied(Denied("tenant", "oversize", 8000, 0, FULL), CLAIM)
    assert refused.code is RefusalCode.REQUEST_EXCEEDS_LIMIT
    assert refused.retry_after_ms is None
    names = [name for name, _ in refused.headers]
    assert not any(name.startswith("retry-after") for name in names)
    assert "8000" in refused.message
    assert "9000" in refused.message


def test_unavailable_limits_are_a_503_with_retry_after():
    refused = refuse_limits_unavailable()
    assert refused.code is RefusalCode.LIMITS_UNAVAILABLE
    assert ("retry-after", "1") in refused.headers


def test_no_wait_for_a_limit_of_a_minute_is_longer_than_a_minute() -> None:
    denied = Denied("tenant", "rpm", 5, 60_001, RateLimitStatus())
    refused = refuse_denied(denied, Claim("r", "t", (), 1, 1000))
    headers = dict(refused.headers)
    assert (headers["retry-after"], headers["retry-after-ms"], refused.retry_after_ms) == ("60", "60000", 60_000)
    assert "61" not in refused.message


def test_anthropic_s_limits_are_openai_s_with_moments_for_durations() -> None:
    headers = (*rate_limit_headers(FULL), ("retry-after", "3"))
    assert dict(anthropic_rate_limit_headers(headers, 1_000_000.5)) == {
        "anthropic-ratelimit-requests-limit": "600",
        "anthropic-ratelimit-requests-remaining": "599",
        "anthropic-ratelimit-requests-reset": "1970-01-12T13:47:42Z",
        "anthropic-ratelimit-tokens-limit": "8000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "1970-01-12T13:46:41Z",
    }

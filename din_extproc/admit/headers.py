"""The `x-ratelimit-*` headers of every answer, and the refusals for reached limits.

Names and durations follow OpenAI. No value is negative, and `retry-after` is never 0, which makes clients spin.
"""

import math
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from din_extproc.admit.ledger import Claim, Denied, RateLimitStatus
from din_extproc.domain.price import format_money
from din_extproc.domain.spending import SCOPE
from din_extproc.domain.tenant import LONG_TAIL
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode

_RATE_LIMIT: Final = "x-ratelimit-"
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_parts = re.compile(r"([\d.]+)(ms|[hms])").findall
_HOUR_MS, _MINUTE_MS, _SECOND_MS = 3_600_000, 60_000, 1000
SPENT: Final = frozenset({"token_budget", "cost_budget"})
"""Dimensions of budgets of a period."""
_UNAVAILABLE_RETRY_MS: Final = 1000
_SLOT_RETRY_MS: Final = 1000
"""A slot is free as soon as any request ends; the ledger only knows when the oldest lease would expire."""


@lru_cache(maxsize=16_384)
def format_duration(ms: int) -> str:
    """Format a duration as Go and OpenAI do: `0s`, `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m0.5s`."""
    if 0 < ms < _SECOND_MS:
        return f"{ms}ms"
    hours, rest = divmod(ms, _HOUR_MS)
    minutes, rest = divmod(rest, _MINUTE_MS)
    seconds = f"{rest // _SECOND_MS}" if rest % _SECOND_MS == 0 else f"{rest / _SECOND_MS:.3f}".rstrip("0")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def rate_limit_headers(status: RateLimitStatus) -> Headers:
    """Return the headers of one verdict; none for a dimension without a limit."""
    if status.exceeded:
        return (*rate_limit_headers(replace(status, exceeded="")), ("x-din-budget-exceeded", status.exceeded.removeprefix(SCOPE)))
    requests = status.limit_requests is not None
    tokens = status.limit_tokens is not None
    if requests and tokens:
        return (*_make_request_headers(status), *_make_token_headers(status))
    if tokens:
        return _make_token_headers(status)
    return _make_request_headers(status) if requests else ()


def _make_request_headers(status: RateLimitStatus) -> Headers:
    return (
        ("x-ratelimit-limit-requests", str(status.limit_requests)),
        ("x-ratelimit-remaining-requests", str(status.remaining_requests)),
        ("x-ratelimit-reset-requests", format_duration(status.reset_requests_ms or 0)),
    )


def _make_token_headers(status: RateLimitStatus) -> Headers:
    return (
        ("x-ratelimit-limit-tokens", str(status.limit_tokens)),
        ("x-ratelimit-remaining-tokens", str(status.remaining_tokens)),
        ("x-ratelimit-reset-tokens", format_duration(status.reset_tokens_ms or 0)),
    )


def anthropic_rate_limit_headers(headers: Headers, wall: float) -> Headers:
    """Return the rate-limit headers among these as Anthropic writes them, with moments instead of durations. `wall`: now, Unix seconds."""
    found = []
    for name, value in headers:
        if name.startswith(_RATE_LIMIT):
            what, _, kind = name.removeprefix(_RATE_LIMIT).partition("-")
            found.append((f"anthropic-ratelimit-{kind}-{what}", _format_moment(value, wall) if what == "reset" else value))
    return tuple(found)


def _format_moment(duration: str, wall: float) -> str:
    """Return the time after this duration by RFC 3339, in whole seconds, rounded up."""
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _parts(duration))
    return _rfc3339(wall + seconds)


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(math.ceil(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def retry_headers(ms: int) -> Headers:
    """Return `retry-after` in whole seconds, rounded up, and `retry-after-ms`; at least 1 and at most a minute, the window.

    SDKs ignore a `retry-after` above 60.
    """
    ms = min(max(1, ms), _MINUTE_MS)
    return ("retry-after", str(-(-ms // _SECOND_MS))), ("retry-after-ms", str(ms))


def refuse_denied(denied: Denied, claim: Claim) -> Refusal:
    """Translate the ledger's denial into a refusal with rate-limit headers and, unless the request is oversized, a retry time."""
    status = rate_limit_headers(denied.status)
    if denied.dimension == "oversize":
        message = (
            f"The request needs {claim.tokens} tokens, but {_describe_scope(denied.scope)} allows no more than {denied.limit} tokens per "
            "minute: it can never pass. Shorten the prompt."
        )
        return Refusal(RefusalCode.REQUEST_EXCEEDS_LIMIT, message, headers=status)
    wait_ms = min(max(1, denied.retry_after_ms), _MINUTE_MS)
    if denied.dimension == "max_streams":
        wait_ms = min(wait_ms, _SLOT_RETRY_MS)
    if denied.scope.startswith(LONG_TAIL):
        message = f"Requests that take this long hold all the slots that they may hold. Try again in {format_duration(wait_ms)}."
        refused = RefusalCode.INSUFFICIENT_GPU_CAPACITY
        return Refusal(refused, message, retry_after_ms=wait_ms, headers=(*status, *retry_headers(wait_ms)))
    code = RefusalCode.CONCURRENCY_LIMIT_EXCEEDED if denied.dimension == "max_streams" else RefusalCode.RATE_LIMIT_EXCEEDED
    name, limit = _describe_scope(denied.scope), denied.limit
    sentence = {
        "rpm": f"{name} allows {limit} requests per minute, and all of them are used",
        "tpm": f"{name} allows {limit} tokens per minute, and too few of them are left: requested {claim.tokens}",
        "max_streams": f"{name} allows {limit} requests at once, and all of them are in flight",
    }[denied.dimension]
    message = f"{sentence[0].upper()}{sentence[1:]}. Try again in {format_duration(wait_ms)}."
    return Refusal(code, message, retry_after_ms=wait_ms, headers=(*status, *retry_headers(wait_ms)))


def refuse_spent(denied: Denied, currency: str, wall: float) -> Refusal:
    """Return the refusal for a spent budget. It names the moment at which the next period begins; until then retrying does not help.

    Args:
        denied: The ledger's denial.
        currency: The currency of its limit.
        wall: Now, in seconds since the epoch.
    """
    reset = _rfc3339(wall + denied.retry_after_ms / 1000)
    name = denied.scope.removeprefix(SCOPE)
    limit = f"{denied.limit} tokens" if denied.dimension == "token_budget" else f"{format_money(denied.limit)} {currency}".rstrip()
    message = f"The budget {name} of {limit} has too little left for this request. The next period begins at {reset}."
    return Refusal(RefusalCode.BUDGET_EXCEEDED, message, headers=(*rate_limit_headers(denied.status), ("x-din-budget-reset", reset)))


def refuse_queue_full(vacancy_ms: int) -> Refusal:
    """Return the refusal for a full admission queue."""
    message = f"The queue of requests that wait for tokens or slots is full. Try again in {format_duration(vacancy_ms)}."
    return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_ms=vacancy_ms, headers=retry_headers(vacancy_ms))


def refuse_limits_unavailable() -> Refusal:
    """Return the refusal for unreachable counters with `on_error: closed`."""
    message = "The limits can't be checked at the moment. Try again in 1s."
    return Refusal(
        RefusalCode.LIMITS_UNAVAILABLE, message, retry_after_ms=_UNAVAILABLE_RETRY_MS, headers=retry_headers(_UNAVAILABLE_RETRY_MS)
    )


def _describe_scope(scope: str) -> str:
    """Return a scope in words: `tenant`, `model:<name>`, `key:<id>`, `priority:<class>`, `network` or `network:...`."""
    kind, _, name = scope.partition(":")
    if kind == "network" and name:
        return f"the network's limit for {name.replace(':', ' ').replace('_', ' ')}"
    return f"the {kind}'s limit" if not name else f"the limit of {kind} {name}"

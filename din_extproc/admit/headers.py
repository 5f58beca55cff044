"""What a client learns of its limits: the `x-ratelimit-*` headers of every answer, and the refusal when one is reached.

Rule: names and durations as OpenAI writes them; nothing negative, and never a `retry-after` of 0, which makes clients spin.
"""

from functools import lru_cache
from typing import Final

from din_extproc.admit.ledger import Claim, Denied, RateLimitStatus
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode

_HOUR_MS, _MINUTE_MS, _SECOND_MS = 3_600_000, 60_000, 1000
_UNAVAILABLE_RETRY_MS: Final = 1000
_SLOT_RETRY_MS: Final = 1000
"""A slot is free as soon as any request ends. What the ledger knows is only when the oldest lease would run out, were its owner dead."""


@lru_cache(maxsize=16_384)
def duration(ms: int) -> str:
    """A duration as Go and OpenAI write it: `0s`, `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m0.5s`."""
    if 0 < ms < _SECOND_MS:
        return f"{ms}ms"
    hours, rest = divmod(ms, _HOUR_MS)
    minutes, rest = divmod(rest, _MINUTE_MS)
    seconds = f"{rest // _SECOND_MS}" if rest % _SECOND_MS == 0 else f"{rest / _SECOND_MS:.3f}".rstrip("0")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def standing_headers(standing: RateLimitStatus) -> Headers:
    """The headers of one verdict; none for a dimension without a limit."""
    requests = standing.limit_requests is not None
    tokens = standing.limit_tokens is not None
    if requests and tokens:
        return (*_requests(standing), *_tokens(standing))
    if tokens:
        return _tokens(standing)
    return _requests(standing) if requests else ()


def _requests(standing: RateLimitStatus) -> Headers:
    return (
        ("x-ratelimit-limit-requests", str(standing.limit_requests)),
        ("x-ratelimit-remaining-requests", str(standing.remaining_requests)),
        ("x-ratelimit-reset-requests", duration(standing.reset_requests_ms or 0)),
    )


def _tokens(standing: RateLimitStatus) -> Headers:
    return (
        ("x-ratelimit-limit-tokens", str(standing.limit_tokens)),
        ("x-ratelimit-remaining-tokens", str(standing.remaining_tokens)),
        ("x-ratelimit-reset-tokens", duration(standing.reset_tokens_ms or 0)),
    )


def retry_headers(ms: int) -> Headers:
    """`retry-after` in whole seconds, rounded up, and `retry-after-ms`; both at least 1."""
    ms = max(1, ms)
    return ("retry-after", str(-(-ms // _SECOND_MS))), ("retry-after-ms", str(ms))


def refusal(denied: Denied, claim: Claim) -> Refusal:
    """The ledger's no, for the client, with the standing and, where it is of use, when to retry."""
    standing = standing_headers(denied.standing)
    if denied.dimension == "oversize":
        message = (
            f"The request needs {claim.tokens} tokens, but {_name(denied.scope)} allows no more than {denied.limit} tokens per minute: "
            "it can never pass. Shorten the prompt."
        )
        return Refusal(RefusalCode.REQUEST_EXCEEDS_LIMIT, message, headers=standing)
    wait_ms = max(1, denied.retry_after_ms)
    if denied.dimension == "max_streams":
        wait_ms = min(wait_ms, _SLOT_RETRY_MS)
    code = RefusalCode.CONCURRENCY_LIMIT_EXCEEDED if denied.dimension == "max_streams" else RefusalCode.RATE_LIMIT_EXCEEDED
    name, limit = _name(denied.scope), denied.limit
    sentence = {
        "rpm": f"{name} allows {limit} requests per minute, and all of them are used",
        "tpm": f"{name} allows {limit} tokens per minute, and too few of them are left: requested {claim.tokens}",
        "max_streams": f"{name} allows {limit} requests at once, and all of them are in flight",
    }[denied.dimension]
    message = f"{sentence[0].upper()}{sentence[1:]}. Try again in {duration(wait_ms)}."
    return Refusal(code, message, retry_after_ms=wait_ms, headers=(*standing, *retry_headers(wait_ms)))


def queue_full(place_in_ms: int) -> Refusal:
    """As many requests as may wait do so already."""
    message = f"Tokens or slots are short, and as many requests as may wait for them do so already. Try again in {duration(place_in_ms)}."
    return Refusal(RefusalCode.QUEUE_FULL, message, retry_after_ms=place_in_ms, headers=retry_headers(place_in_ms))


def limits_unavailable() -> Refusal:
    """The counters can't be reached, and the policy is to let nothing pass uncounted."""
    message = "The limits can't be checked at the moment. Try again in 1s."
    return Refusal(
        RefusalCode.LIMITS_UNAVAILABLE, message, retry_after_ms=_UNAVAILABLE_RETRY_MS, headers=retry_headers(_UNAVAILABLE_RETRY_MS)
    )


def _name(scope: str) -> str:
    """A scope in words: `tenant`, `model:<name>`, `key:<id>`, `priority:<class>`; `network` and what is under it."""
    kind, _, name = scope.partition(":")
    if kind == "network" and name:
        return f"the network's limit for {name.replace(':', ' ').replace('_', ' ')}"
    return f"the {kind}'s limit" if not name else f"the limit of {kind} {name}"

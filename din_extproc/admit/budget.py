"""The arithmetic of one budget: a sliding window of requests and a bucket of tokens that drains evenly.

All numbers are integers and time is an argument in milliseconds. Limits are not stored: a changed limit applies at once to what was
already counted. `edge/redis/lua/admit.lua` holds the same arithmetic, exact for limits up to 10**10 tokens (Lua counts in doubles).
"""

from msgspec import Struct

from din_extproc.admit.ledger import RateLimitStatus

WINDOW_SECONDS = 61
"""Seconds that count: the current one and sixty whole ones. Never admits more than `rpm` in any 60 s; capacity returns at most 1 s late."""
UNITS_PER_TOKEN = 60_000
"""Tokens are counted in 1/60000 token, so that `tpm` units drain per millisecond."""
RETENTION_MS = 120_000
"""How long counters and records are kept: two windows, after which every bucket has drained."""
SETTLED_RETENTION_MS = 10_000
"""How long a settled and released request is remembered, to ignore late repetitions."""


class BudgetCounters(Struct, frozen=True, gc=False):
    """The counters of one budget."""

    used: int = 0
    """Used tokens in 1/60000 token, at `at_ms`."""
    at_ms: int = 0
    requests: tuple[tuple[int, int], ...] = ()
    """(second, number of requests) pairs, oldest first, without zeros."""

    @property
    def total(self) -> int:
        """Requests in the window."""
        return sum(count for _, count in self.requests)

    def slide_window(self, now_ms: int) -> "BudgetCounters":
        """Return the counters with the window moved to `now_ms`.

        A window that lies entirely in the future was counted before the clock was set back; it is dropped, or it would count for hours.
        """
        second = now_ms // 1000
        if self.requests and self.requests[-1][0] - second >= WINDOW_SECONDS:
            return BudgetCounters(self.used, self.at_ms)
        oldest = second - WINDOW_SECONDS
        if not self.requests or self.requests[0][0] > oldest:
            return self
        return BudgetCounters(self.used, self.at_ms, tuple(pair for pair in self.requests if pair[0] > oldest))

    def drain(self, tpm: int, now_ms: int) -> "BudgetCounters":
        """Return the counters with the bucket drained to `now_ms`. More than two windows' worth of use never counts."""
        used = max(0, min(self.used, 2 * tpm * UNITS_PER_TOKEN) - max(0, now_ms - self.at_ms) * tpm)
        return BudgetCounters(used, now_ms, self.requests)

    def count_request(self, now_ms: int) -> "BudgetCounters":
        """Return the counters with one more request."""
        second = now_ms // 1000
        if not self.requests or self.requests[-1][0] < second:
            return BudgetCounters(self.used, self.at_ms, (*self.requests, (second, 1)))
        newest, count = self.requests[-1]
        return BudgetCounters(self.used, self.at_ms, (*self.requests[:-1], (newest, count + 1)))

    def return_request(self, admitted_ms: int) -> "BudgetCounters":
        """Return the counters without one request that was admitted at `admitted_ms`, if it still counts."""
        second = admitted_ms // 1000
        counts = ((at, count - (at == second)) for at, count in self.requests)
        return BudgetCounters(self.used, self.at_ms, tuple(pair for pair in counts if pair[1]))

    def charge(self, tokens: int, tpm: int) -> "BudgetCounters":
        """Return the counters with tokens added or, if negative, refunded. Use stays between 0 and twice the bucket."""
        return BudgetCounters(max(0, min(self.used + tokens * UNITS_PER_TOKEN, 2 * tpm * UNITS_PER_TOKEN)), self.at_ms, self.requests)

    def request_wait_ms(self, rpm: int, now_ms: int) -> int:
        """Return the time until one more request fits; 0: it fits now."""
        excess = self.total + 1 - rpm
        for second, count in self.requests:
            if excess <= 0:
                break
            excess -= count
            if excess <= 0:
                return (second + WINDOW_SECONDS) * 1000 - now_ms
        return 0

    def token_wait_ms(self, tokens: int, tpm: int) -> int:
        """Return the time until the tokens fit; 0: they fit now. `tokens` must not exceed `tpm`."""
        return max(0, -((tpm * UNITS_PER_TOKEN - self.used - tokens * UNITS_PER_TOKEN) // tpm))

    def request_status(self, rpm: int, now_ms: int) -> tuple[int, int, int]:
        """Return the limit, the remaining requests, and the milliseconds until all of them are available."""
        reset = (self.requests[-1][0] + WINDOW_SECONDS) * 1000 - now_ms if self.requests else 0
        return rpm, max(0, rpm - self.total), reset

    def token_status(self, tpm: int) -> tuple[int, int, int]:
        """Return the limit, the remaining tokens, and the milliseconds until all of them are available."""
        return tpm, max(0, (tpm * UNITS_PER_TOKEN - self.used) // UNITS_PER_TOKEN), -(-self.used // tpm)


def tightest_status(requests: list[tuple[int, int, int]], tokens: list[tuple[int, int, int]]) -> RateLimitStatus:
    """Return the status of the tightest budget of each dimension: the one with the fewest remaining, the first of equals."""
    limit_requests, remaining_requests, reset_requests = min(requests, key=_compute_remaining, default=(None, None, None))
    limit_tokens, remaining_tokens, reset_tokens = min(tokens, key=_compute_remaining, default=(None, None, None))
    return RateLimitStatus(
        limit_requests=limit_requests,
        remaining_requests=remaining_requests,
        reset_requests_ms=reset_requests,
        limit_tokens=limit_tokens,
        remaining_tokens=remaining_tokens,
        reset_tokens_ms=reset_tokens,
    )


def _compute_remaining(triple: tuple[int, int, int]) -> int:
    return triple[1]

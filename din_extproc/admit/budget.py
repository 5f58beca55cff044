"""The arithmetic of one budget: a sliding window of requests and a bucket of tokens that drains evenly.

Rule: whole numbers only, time is an argument (ms), and no limit is ever stored: a changed limit applies to what was counted at once.
The same arithmetic in Lua: `edge/redis/lua/admit.lua`; exact for limits up to 10**10 tokens (Lua counts in doubles).
"""

from msgspec import Struct

from din_extproc.admit.ledger import RateLimitStatus

SLOTS = 61
"""Seconds that count: the running one and sixty whole ones. Never admits more than `rpm` in any 60 s; a place returns at most 1 s late."""
UNIT = 60_000
"""Tokens are counted in 1/60000: one millisecond then drains exactly `tpm` units."""
KEEP_MS = 120_000
"""Two windows: an untouched budget is forgotten, and by then all of it has drained."""
CLOSED_MS = 10_000
"""How long a settled and released request is remembered, for repetitions that arrive late."""


class BudgetCounters(Struct, frozen=True, gc=False):
    """What one budget has counted."""

    used: int = 0
    """In 1/60000 token, at `at_ms`."""
    at_ms: int = 0
    requests: tuple[tuple[int, int], ...] = ()
    """(second, how many), oldest first, none of them zero."""

    @property
    def total(self) -> int:
        """Requests in the window."""
        return sum(count for _, count in self.requests)

    def turned(self, now_ms: int) -> "BudgetCounters":
        """The window at `now_ms`: what fell out of it is gone.

        Requests from a whole window ahead were counted before the clock was set back: they no longer count, or they would for hours.
        """
        second = now_ms // 1000
        if self.requests and self.requests[-1][0] - second >= SLOTS:
            return BudgetCounters(self.used, self.at_ms)
        oldest = second - SLOTS
        if not self.requests or self.requests[0][0] > oldest:
            return self
        return BudgetCounters(self.used, self.at_ms, tuple(pair for pair in self.requests if pair[0] > oldest))

    def drained(self, tpm: int, now_ms: int) -> "BudgetCounters":
        """The bucket at `now_ms`. More than two windows' worth never counts."""
        used = max(0, min(self.used, 2 * tpm * UNIT) - max(0, now_ms - self.at_ms) * tpm)
        return BudgetCounters(used, now_ms, self.requests)

    def counted(self, now_ms: int) -> "BudgetCounters":
        """One request more."""
        second = now_ms // 1000
        if not self.requests or self.requests[-1][0] < second:
            return BudgetCounters(self.used, self.at_ms, (*self.requests, (second, 1)))
        newest, count = self.requests[-1]
        return BudgetCounters(self.used, self.at_ms, (*self.requests[:-1], (newest, count + 1)))

    def charged(self, tokens: int, tpm: int) -> "BudgetCounters":
        """Tokens more, or fewer: between an empty bucket's brim and one whole bucket below its ground."""
        return BudgetCounters(max(0, min(self.used + tokens * UNIT, 2 * tpm * UNIT)), self.at_ms, self.requests)

    def request_wait_ms(self, rpm: int, now_ms: int) -> int:
        """How long until one request more fits; 0: it fits now."""
        excess = self.total + 1 - rpm
        for second, count in self.requests:
            if excess <= 0:
                break
            excess -= count
            if excess <= 0:
                return (second + SLOTS) * 1000 - now_ms
        return 0

    def token_wait_ms(self, tokens: int, tpm: int) -> int:
        """How long until the tokens fit; 0: they fit now. `tokens` is not more than `tpm`."""
        return max(0, -((tpm * UNIT - self.used - tokens * UNIT) // tpm))

    def request_standing(self, rpm: int, now_ms: int) -> tuple[int, int, int]:
        """Limit, remaining requests, ms until all of them are there again."""
        reset = (self.requests[-1][0] + SLOTS) * 1000 - now_ms if self.requests else 0
        return rpm, max(0, rpm - self.total), reset

    def token_standing(self, tpm: int) -> tuple[int, int, int]:
        """Limit, remaining tokens, ms until all of them are there again."""
        return tpm, max(0, (tpm * UNIT - self.used) // UNIT), -(-self.used // tpm)


def standing(requests: list[tuple[int, int, int]], tokens: list[tuple[int, int, int]]) -> RateLimitStatus:
    """The tightest budget of each dimension: the one with the fewest left, the first of equals."""
    limit_requests, remaining_requests, reset_requests = min(requests, key=_left, default=(None, None, None))
    limit_tokens, remaining_tokens, reset_tokens = min(tokens, key=_left, default=(None, None, None))
    return RateLimitStatus(
        limit_requests=limit_requests,
        remaining_requests=remaining_requests,
        reset_requests_ms=reset_requests,
        limit_tokens=limit_tokens,
        remaining_tokens=remaining_tokens,
        reset_tokens_ms=reset_tokens,
    )


def _left(triple: tuple[int, int, int]) -> int:
    return triple[1]

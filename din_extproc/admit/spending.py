"""The arithmetic of one budget's counter: what is spent and what is reserved in the current period, and what was spent in the one before.

All numbers are integers and time is an argument in milliseconds. `edge/redis/lua/admit.lua` and `settle.lua` hold the same arithmetic.
"""

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.spending import SpendingWindow

SLOT_MS = 3_600_000
"""A reservation counts until it is settled, or until the end of the hour after the one in which it was made."""
RESERVED_MS = 21_600_000
"""How long a request that is charged to a budget is remembered for its settlement."""


class SpendingCounters(Struct, frozen=True, gc=False):
    """The fields of one counter, in their order in Redis. Pairs are tokens, then cost."""

    start: int = 0
    """When the current period began."""
    before_start: int = 0
    """When the period before began; 0: there was none."""
    before_tokens: int = 0
    """Spent in that period."""
    before_cost: int = 0
    extra_tokens: int = 0
    """Additions by operators to the limit of this period."""
    extra_cost: int = 0
    refused: int = 0
    """1: a request was refused in this period, or would have been."""
    slot: int = 0
    """The hour of the newest reservation."""
    tokens: int = 0
    """Spent: settled in this period or later, reserved in this period."""
    cost: int = 0
    held_tokens: int = 0
    """Reserved in that hour and not settled."""
    held_cost: int = 0
    older_tokens: int = 0
    """Reserved in the hour before and not settled."""
    older_cost: int = 0

    def advance(self, window: SpendingWindow, now_ms: int) -> "SpendingCounters":
        """Return the counters in the period and the hour of `now_ms`."""
        found, (start, _), slot = self, window.period_at(now_ms), now_ms // SLOT_MS
        if found.start < start:
            found = SpendingCounters(start=start, before_start=self.start, before_tokens=self.tokens, before_cost=self.cost, slot=slot)
        if slot > found.slot:
            older = (found.held_tokens, found.held_cost) if slot == found.slot + 1 else (0, 0)
            found = replace(found, slot=slot, held_tokens=0, held_cost=0, older_tokens=older[0], older_cost=older[1])
        return found

    def hold(self, tokens: int, cost: int) -> "SpendingCounters":
        """Return the counters with a reservation of this hour."""
        return replace(self, held_tokens=self.held_tokens + tokens, held_cost=self.held_cost + cost)

    def settle(self, reserved: tuple[int, int], actual: tuple[int, int], admitted_ms: int) -> "SpendingCounters":
        """Return the counters with what a request used in place of what it had reserved, in the period in which it was admitted."""
        if admitted_ms < self.start:
            if admitted_ms < self.before_start or not self.before_start:
                return self
            return replace(self, before_tokens=self.before_tokens + actual[0], before_cost=self.before_cost + actual[1])
        found, slot = replace(self, tokens=self.tokens + actual[0], cost=self.cost + actual[1]), admitted_ms // SLOT_MS
        if slot == found.slot:
            return replace(found, held_tokens=found.held_tokens - reserved[0], held_cost=found.held_cost - reserved[1])
        if slot == found.slot - 1:
            return replace(found, older_tokens=found.older_tokens - reserved[0], older_cost=found.older_cost - reserved[1])
        return found

    @property
    def used_tokens(self) -> int:
        """Spent and reserved."""
        return self.tokens + self.held_tokens + self.older_tokens

    @property
    def used_cost(self) -> int:
        """Spent and reserved."""
        return self.cost + self.held_cost + self.older_cost

    def token_limit(self, window: SpendingWindow) -> int:
        """The limit with what was added to it; 0: none."""
        return window.tokens and window.tokens + self.extra_tokens

    def cost_limit(self, window: SpendingWindow) -> int:
        """The limit with what was added to it; 0: none."""
        return window.cost and window.cost + self.extra_cost

"""The route cache (R03): decisions kept for a short while, by pool, version constraint and length segment, never by model alone.

Rule: time is an argument, and a change of topology empties it at once (R04): no entry outlives the nodes it names.
"""

from typing import Generic, TypeVar

Value = TypeVar("Value")
Key = tuple[str, str, int]
"""(pool, version constraint, length segment)."""

SEGMENT_TOKENS = 512


class RouteCache(Generic[Value]):
    """Bounded, with one time to live for all entries.

    Args:
        ttl_s: How long an entry is good, in seconds.
        limit: How many entries are kept; at the limit all of them go (they live two seconds anyway).
    """

    __slots__ = ("_entries", "_limit", "_ttl_s", "hits", "misses")

    def __init__(self, ttl_s: float = 2.0, limit: int = 4096) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._entries: dict[Key, tuple[float, Value]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, key: Key, now: float) -> Value | None:
        """The kept decision, None when there is none or it is too old. `now` in seconds, any monotonic clock."""
        entry = self._entries.get(key)
        if entry is None or entry[0] <= now:
            self.misses += 1
            return None
        self.hits += 1
        return entry[1]

    def keep(self, key: Key, value: Value, now: float) -> Value:
        """Keep a decision and return it."""
        if len(self._entries) >= self._limit:
            self._entries.clear()
        self._entries[key] = (now + self._ttl_s, value)
        return value

    def clear(self) -> None:
        """Forget everything: nodes came, went or changed."""
        self._entries.clear()

"""The route cache: recent decisions by pool, version constraint and length segment, never by model alone.

Time is an argument. A change of topology empties the cache, so no entry outlives the nodes it names.
"""

from typing import Generic, TypeVar

Value = TypeVar("Value")
Key = tuple[str, str, int]
"""(pool, version constraint, length segment)."""

SEGMENT_TOKENS = 512


class RouteCache(Generic[Value]):
    """A bounded cache with one time to live for all entries.

    Args:
        ttl_s: Time to live in seconds.
        limit: The largest number of entries; when it is reached, all entries are dropped (they live two seconds anyway).
    """

    __slots__ = ("_entries", "_limit", "_ttl_s", "hits", "misses")

    def __init__(self, ttl_s: float = 2.0, limit: int = 4096) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._entries: dict[Key, tuple[float, Value]] = {}
        self.hits = 0
        self.misses = 0

    def find(self, key: Key, now: float) -> Value | None:
        """Return the cached value, or None when it is missing or expired. `now`: seconds of any monotonic clock."""
        entry = self._entries.get(key)
        if entry is None or entry[0] <= now:
            self.misses += 1
            return None
        self.hits += 1
        return entry[1]

    def store(self, key: Key, value: Value, now: float) -> Value:
        """Store a value and return it."""
        if len(self._entries) >= self._limit:
            self._entries.clear()
        self._entries[key] = (now + self._ttl_s, value)
        return value

    def clear(self) -> None:
        """Drop all entries after a change of nodes."""
        self._entries.clear()

"""Requests that break the nodes that get them: a short memory that stops their next tries.

Invariant: a request is stopped after two breaks of which the second attempt began after the first break, so that one node's death, which
breaks many attempts at once, stops none of them. An answer clears it.
"""

from collections.abc import Iterable

from msgspec import Struct

_REMEMBERED = 1000
"""Requests that are remembered at most; the oldest are forgotten first."""
_REMEMBERED_S = 600.0
_BREAKS = 2


class _Breaks(Struct):
    """How often a request has broken a node."""

    count: int
    ended_at: float
    """End of the last break that counted, by the clock of the attempts."""
    until: float
    """When it is forgotten, by the monotonic clock."""


class StoppedRequests:
    """Origins of requests that broke a node's connection before it answered."""

    __slots__ = ("_known", "stopped")

    def __init__(self) -> None:
        self._known: dict[str, _Breaks] = {}
        self.stopped: frozenset[str] = frozenset()
        """Origins of the requests that are not sent to a node."""

    def record_break(self, origin: str, started_at: float, ended_at: float, now: float) -> bool:
        """Record an attempt that broke. Return whether the request is stopped from now on, and was not before."""
        known = self._known.pop(origin, None)
        if known is None:
            known = _Breaks(1, ended_at, now + _REMEMBERED_S)
        elif started_at >= known.ended_at:
            known = _Breaks(known.count + 1, ended_at, now + _REMEMBERED_S)
        self._known[origin] = known
        return known.count >= _BREAKS and self.stop((origin,), now)

    def stop(self, origins: Iterable[str], now: float) -> bool:
        """Stop these requests, also because another replica does. Return whether that is new."""
        new = [origin for origin in origins if origin not in self.stopped]
        for origin in new:
            self._known.setdefault(origin, _Breaks(_BREAKS, 0.0, now + _REMEMBERED_S)).count = _BREAKS
        return bool(new) and self._update(now)

    def record_answer(self, origin: str) -> None:
        """Forget a request that a node has answered."""
        if self._known and origin not in self.stopped:
            self._known.pop(origin, None)

    def expire(self, now: float) -> bool:
        """Forget what is old. Return whether a request is stopped no more."""
        return bool(self._known) and self._update(now)

    def _update(self, now: float) -> bool:
        before = self.stopped
        for origin in [each for each, breaks in self._known.items() if breaks.until <= now]:
            del self._known[origin]
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        self.stopped = frozenset(origin for origin, breaks in self._known.items() if breaks.count >= _BREAKS)
        return self.stopped != before

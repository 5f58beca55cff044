"""Requests that break the nodes that get them: a short memory that stops their next tries.

Invariant: a request is stopped when it has broken two attempts and an exchange has ended by that. A node's death, which breaks many
attempts at once, stops none of those that another node answers: an answer clears what was known.
"""

from collections.abc import Iterable

from msgspec import Struct

_REMEMBERED = 1000
"""Requests that are remembered at most; the oldest are forgotten first."""
_REMEMBERED_S = 600.0
_BREAKS = 2


class _Breaks(Struct):
    """The record of a request that has broken a node."""

    until: float
    """When it is forgotten."""
    attempts: int = 0
    failed: bool = False
    """An exchange ended by it."""

    @property
    def stops(self) -> bool:
        return self.failed and self.attempts >= _BREAKS


class StoppedRequests:
    """Origins of requests that broke a node's connection before it answered. Times in seconds of the monotonic clock."""

    __slots__ = ("_known", "stopped")

    def __init__(self) -> None:
        self._known: dict[str, _Breaks] = {}
        self.stopped: frozenset[str] = frozenset()
        """Origins of the requests that are not sent to a node."""

    def record_attempt(self, origin: str, now: float) -> bool:
        """Record an attempt that broke. Return whether the request is stopped from now on, and was not before."""
        known = self._renew(origin, now)
        known.attempts += 1
        return known.stops and self._update(now)

    def record_failure(self, origin: str, now: float) -> bool:
        """Record an exchange that ended by a break. Return as `record_attempt` does."""
        known = self._renew(origin, now)
        known.failed = True
        return known.stops and self._update(now)

    def stop(self, origins: Iterable[str], now: float) -> bool:
        """Stop these requests, also because another replica does. Return whether that is new."""
        new = [origin for origin in origins if origin not in self.stopped]
        for origin in new:
            known = self._renew(origin, now)
            known.attempts, known.failed = _BREAKS, True
        return bool(new) and self._update(now)

    def record_answer(self, origin: str) -> None:
        """Forget a request that a node has answered."""
        if self._known and origin not in self.stopped:
            self._known.pop(origin, None)

    def expire(self, now: float) -> bool:
        """Forget what is old. Return whether a request is stopped no more."""
        return bool(self._known) and self._update(now)

    def _renew(self, origin: str, now: float) -> _Breaks:
        """Return what is known of the request, which is the newest from now on."""
        known = self._known.pop(origin, None) or _Breaks(0.0)
        known.until = now + _REMEMBERED_S
        self._known[origin] = known
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return known

    def _update(self, now: float) -> bool:
        before = self.stopped
        for origin in [each for each, breaks in self._known.items() if breaks.until <= now]:
            del self._known[origin]
        self.stopped = frozenset(origin for origin, breaks in self._known.items() if breaks.stops)
        return self.stopped != before

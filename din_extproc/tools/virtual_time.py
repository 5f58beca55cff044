"""Virtual time for tools that make decisions without waiting: a clock that is set, the counters at that time, coroutines that pause.

Rule: nothing here reads a clock or waits; the same calls give the same results.
"""

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted

T = TypeVar("T")

_ROUNDING_MS = 1e-3
"""Whole milliseconds that are held in seconds come back whole."""
LEASE_MS = 1 << 40
"""Leases are not renewed in virtual time."""


class VirtualClock:
    """A `Clock` that shows what it is set to.

    Args:
        start_s: Its beginning, in seconds since the epoch.
    """

    __slots__ = ("now", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.now = 0.0
        """Seconds since the beginning."""

    def wall(self) -> float:
        """Return the time in seconds since the epoch."""
        return self.start_s + self.now

    def monotonic(self) -> float:
        """Return the time in seconds since the beginning."""
        return self.now

    @property
    def ms(self) -> int:
        """The time in milliseconds since the epoch."""
        return int(self.start_s * 1000) + int(self.now * 1000 + _ROUNDING_MS)


class VirtualLedger:
    """The ledger port of decisions over counters in memory, at the time that a clock shows."""

    __slots__ = ("_clock", "_counters")

    def __init__(self, counters: InMemoryLedger, clock: VirtualClock) -> None:
        self._counters = counters
        self._clock = clock

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""
        return self._counters.reserve(claim, self._clock.ms)

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens by the actual ones and give back slots still held."""
        return self._counters.settle(tenant, request_id, tokens, self._clock.ms, cost)


class Pause:
    """Awaited by a decision where a serving process would wait for I/O. `resume` returns it, and goes on with its result.

    Args:
        what: Tells the tool what is waited for.
    """

    __slots__ = ("what",)

    def __init__(self, what: object) -> None:
        self.what = what

    def __await__(self) -> Generator["Pause", Any, Any]:
        return (yield self)


def resume(decision: Coroutine[Any, Any, T], result: object = None) -> T | Pause:
    """Run a decision to its end, whose value is returned, or to its next pause. `result`: of the pause that it is in; None at the start."""
    try:
        paused = decision.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    if not isinstance(paused, Pause):
        raise TypeError(f"a decision in virtual time can wait for a Pause only, not for {type(paused).__name__}")
    return paused


def run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that does not wait."""
    resume(coroutine)

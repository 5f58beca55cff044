"""When a breaker opens, how long it stays open, and how it comes back (R23, R26).

Rule: numbers only; what they mean is written in `breaker.py`.
"""

from zlib import crc32

from msgspec import Struct

_MIXED = 0x9E3779B1
"""Spreads texts that differ in a bit: a prime near 2**32 over the golden ratio (Knuth)."""


class BreakerPolicy(Struct, frozen=True):
    """One breaker's parameters. Times in seconds."""

    row: int | None = 3
    """Failures in a row that open it, of requests and probes alike (`failover_threshold`). None: only the share counts."""
    incident_s: float = 0.1
    """Failed requests that end within so short a time of the last that counted are one incident, and one in the row."""
    share: float = 0.25
    """A larger share of failures among the answers of the window opens it."""
    least: int = 10
    """Answers in the window below which a share says nothing."""
    window_s: float = 60.0
    open_s: float = 30.0
    """The first pause."""
    backoff_factor: float = 2.0
    """Every further pause is so many times as long, until a whole one has passed without trouble."""
    longest_open_s: float = 600.0
    spread: float = 0.1
    """Pauses are longer by up to this share, each name by its own, so that not all come back at once."""
    trial_share: float = 0.05
    """What half-open lets through."""
    trials: int = 3
    """Answers or probes that must go well, with no failure between, before it ramps up."""
    ramp_from: float = 0.1
    ramp_s: float = 60.0

    def pause_s(self, trips: int, name: str) -> float:
        """How long it stays open the `trips`-th time in a row."""
        longest = max(self.longest_open_s, self.open_s)
        pause = min(longest, self.open_s * self.backoff_factor ** min(trips - 1, 64))
        return pause * (1.0 + self.spread * place(f"{name} {trips}"))


def place(text: str) -> float:
    """A place from 0 to below 1 that looks random but is always the text's own."""
    return (crc32(text.encode()) * _MIXED & 0xFFFFFFFF) / (1 << 32)

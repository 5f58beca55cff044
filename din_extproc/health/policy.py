"""Parameters of circuit breakers: when they open, for how long, and how they return to full traffic.

`breaker.py` applies them.
"""

from zlib import crc32

from msgspec import Struct

_HASH_MULTIPLIER = 0x9E3779B1
"""Spreads similar CRCs over the range: a prime near 2**32 over the golden ratio (Knuth's multiplicative hash)."""


class BreakerPolicy(Struct, frozen=True):
    """Parameters of one breaker. Times in seconds."""

    consecutive_failures: int | None = 3
    """Consecutive failures of requests or probes that open it (`failover_threshold`). None: only `failure_share` opens it."""
    incident_s: float = 0.1
    """Requests that fail within this time of the last counted failure are one incident and count once."""
    failure_share: float = 0.25
    """A larger share of failures in the window opens it."""
    min_outcomes: int = 10
    """Outcomes in the window below which `failure_share` is not evaluated."""
    window_s: float = 60.0
    open_s: float = 30.0
    """The first open time."""
    backoff_factor: float = 2.0
    """Factor from one open time to the next, until the breaker stays closed for a whole open time."""
    max_open_s: float = 600.0
    jitter: float = 0.1
    """Open times are up to this share longer, by a hash of the name, so that breakers do not all retry at once."""
    trial_share: float = 0.05
    """Share of requests that half-open admits."""
    trials: int = 3
    """Successful requests or probes, without a failure in between, that start the ramp."""
    ramp_from: float = 0.1
    ramp_s: float = 60.0

    def compute_open_s(self, trips: int, name: str) -> float:
        """Return the open time of the `trips`-th consecutive trip, jitter included."""
        cap_s = max(self.max_open_s, self.open_s)
        open_s = min(cap_s, self.open_s * self.backoff_factor ** min(trips - 1, 64))
        return open_s * (1.0 + self.jitter * hash_to_fraction(f"{name} {trips}"))


def hash_to_fraction(text: str) -> float:
    """Return a stable pseudo-random number in [0, 1) for the text."""
    return (crc32(text.encode()) * _HASH_MULTIPLIER & 0xFFFFFFFF) / (1 << 32)

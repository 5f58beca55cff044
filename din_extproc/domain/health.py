"""How far a node or a pool is trusted with requests, as circuit breakers see it.

Rule: times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class BreakerState(StrEnum):
    """The states of a circuit breaker (R26).

    `RAMPING` is `CLOSED` on its way back to everything (R23), `COOLING` is `CLOSED` for one that is busy and has asked for time.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    RAMPING = "ramping"
    COOLING = "cooling"


class BreakerSnapshot(Struct, frozen=True, gc=False):
    """What a breaker says at one time, good for those that come after."""

    state: BreakerState
    since: float
    until: float | None = None
    """When something changes by itself: an open one is tried again, a ramping or cooling one gets everything. None: nothing does."""
    least: float = 1.0
    """The share of its requests that it gets at `since`; it grows evenly to all of them at `until` when it is ramping."""
    reason: str = ""

    @property
    def left_out(self) -> bool:
        """Whether it gets no request at all."""
        return self.state is BreakerState.OPEN or self.state is BreakerState.COOLING

    def share(self, now: float) -> float:
        """What it gets of the requests that would be its own, 0 to 1."""
        if self.state is not BreakerState.RAMPING or self.until is None:
            return self.least
        gone = (now - self.since) / max(1e-9, self.until - self.since)
        return min(1.0, self.least + (1.0 - self.least) * max(0.0, gone))


class BreakerSnapshots(Struct, frozen=True):
    """What has changed, or everything: breakers by name. A closed one is as if it were not there."""

    nodes: Mapping[str, BreakerSnapshot] = {}
    """By node id."""
    pools: Mapping[str, BreakerSnapshot] = {}

    def __bool__(self) -> bool:
        return bool(self.nodes or self.pools)


class ProbeKind(StrEnum):
    """What a probe asks a node for."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANK = "rerank"


class ProbeResult(Struct, frozen=True, gc=False):
    """What came of one probe."""

    node_id: str
    ok: bool | None
    """None: the node answered something that speaks neither for nor against it (429, 4xx)."""
    ttft_ms: float | None = None
    """To the first byte of content; of an answer that is no stream, to its end."""
    reason: str = ""

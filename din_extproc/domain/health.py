"""State of the circuit breakers of nodes and pools.

Times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from collections.abc import Mapping
from enum import StrEnum
from zlib import crc32

from msgspec import Struct

_PSEUDONYM = 8
"""Characters of a tenant's pseudonym."""


class BreakerState(StrEnum):
    """The states of a circuit breaker.

    `RAMPING` is `CLOSED` with a growing share of traffic after recovery. `COOLING` is the state of a node that answered 429.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    RAMPING = "ramping"
    COOLING = "cooling"


NO_CREDIT_REASON = "its account has no credit"
"""Reason of an open breaker of a remote API that answered 402."""
EXCLUDED = frozenset({BreakerState.OPEN, BreakerState.COOLING})
"""The states in which a breaker lets no request pass."""


def make_origin(pseudonym: str, body: bytes) -> str:
    """Return where a failure comes from: a tenant's pseudonym (8 characters) and a digest of its request, which equal requests share."""
    return f"{pseudonym}{crc32(body):08x}"


def tenant_of(origin: str) -> str:
    """Return the part of an origin that names the tenant, "" for none."""
    return origin[:_PSEUDONYM]


class BreakerSnapshot(Struct, frozen=True, gc=False):
    """An immutable snapshot of a breaker, valid until the next one."""

    state: BreakerState
    since: float
    until: float | None = None
    """When the state changes by itself: an open breaker becomes half-open, a ramping or cooling one closes. None: never."""
    initial_share: float = 1.0
    """The share of traffic at `since`, 0 to 1; while ramping it grows linearly to 1 at `until`."""
    reason: str = ""

    @property
    def excluded(self) -> bool:
        """Whether the breaker lets no request pass."""
        return self.state in EXCLUDED

    def share(self, now: float) -> float:
        """Return the share of its usual traffic that passes at `now`, 0 to 1."""
        if self.state is not BreakerState.RAMPING or self.until is None:
            return self.initial_share
        elapsed = (now - self.since) / max(1e-9, self.until - self.since)
        return min(1.0, self.initial_share + (1.0 - self.initial_share) * max(0.0, elapsed))


class BreakerSnapshots(Struct, frozen=True):
    """Breaker snapshots by name: all of them, or those that changed. A missing breaker is closed."""

    nodes: Mapping[str, BreakerSnapshot] = {}
    """By node id."""
    pools: Mapping[str, BreakerSnapshot] = {}

    def __bool__(self) -> bool:
        return bool(self.nodes or self.pools)


class ProbeKind(StrEnum):
    """The kind of request that a probe sends to a node."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANK = "rerank"


class ProbeResult(Struct, frozen=True, gc=False):
    """The result of one probe."""

    node_id: str
    ok: bool | None
    """None: the answer says nothing about the node's health (429 or another 4xx)."""
    ttft_ms: float | None = None
    """Time to the first byte of content of a stream, or to the end of any other answer."""
    reason: str = ""


class HoldKind(StrEnum):
    """An operator's order for a node. A held node gets no new requests; its running requests go on."""

    DRAIN = "drain"
    QUARANTINE = "quarantine"
    NONE = "none"
    """The order before was taken back."""


class NodeHold(Struct, frozen=True, kw_only=True):
    """An operator's order for one node. The newest one of a node counts, in every replica."""

    node_id: str
    kind: HoldKind
    operator: str
    """The id of the admin key that gave the order."""
    at: float
    """Seconds since the epoch."""
    reason: str = ""

    @property
    def text(self) -> str:
        """The order in words, for people."""
        verb = {HoldKind.DRAIN: "drained", HoldKind.QUARANTINE: "quarantined", HoldKind.NONE: "released"}[self.kind]
        return f"{verb} by {self.operator}{f': {self.reason}' if self.reason else ''}"

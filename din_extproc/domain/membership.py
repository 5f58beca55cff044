"""A node as a member of the network: what it registered, what it last said about itself, and what is thought of it.

Rule: what a node *is* (`Registration`) changes only by registering anew; how it *does* (`Heartbeat`) changes with every heartbeat.
"""

from enum import StrEnum

from msgspec import Struct

from din_extproc.domain.node import Node


class NodeState(StrEnum):
    """Whether a node takes requests. Only `READY` ones are routed to."""

    LOADING = "loading"
    """Registered; its weights are not in memory yet."""
    READY = "ready"
    DRAINING = "draining"
    """Ends what it has, takes nothing new."""
    QUARANTINED = "quarantined"
    """Kept out because of what it said or did; `Member.reasons` says why."""
    DEAD = "dead"
    """Not heard of for `dead_after_s`."""


class Registration(Struct, frozen=True, kw_only=True):
    """What a node says of itself when it joins (R12)."""

    node: Node
    engine: str
    network: str = ""
    """Networks of different names never mix; "" is the only one of a gateway that names none."""
    pool: str = ""
    """The pool it wants to join; "": every pool of the same model, dtype and tensor-parallel size."""
    weights_sha256: str = ""
    free_memory_bytes: int | None = None
    epoch: int = 0
    """Grows with every registration of one id (milliseconds since the epoch when it started): the newest one counts."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """What a node says with each heartbeat. None: its engine does not tell."""

    state: NodeState
    sequence: int
    """Grows with each beat of one registration."""
    waiting: int | None = None
    running: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1."""
    tokens_in_use: int | None = None
    prefill_rate: float | None = None
    """Measured, prompt tokens per second."""
    decode_rate: float | None = None
    """Measured, output tokens per second, all requests together."""
    free_memory_bytes: int | None = None
    reason: str = ""
    """Why it is not ready, for people."""


class HeartbeatReading(Struct, frozen=True, gc=False):
    """A beat, and when it came."""

    beat: Heartbeat
    at: float
    """Seconds, by this process's monotonic clock."""
    trust: float = 1.0
    """0 to 1, as the registry has it by then."""


class MembershipDelta(Struct, frozen=True):
    """Who came and who went, by pool. A node that changed went and came."""

    joined: dict[str, tuple[Node, ...]]
    left: dict[str, tuple[str, ...]]
    """Node ids."""


class Member(Struct, frozen=True, kw_only=True):
    """One row of the node table."""

    registration: Registration
    state: NodeState
    trust: float
    """0 to 1 (R14)."""
    reasons: tuple[str, ...] = ()
    """Why state and trust are what they are, newest last."""
    beat: Heartbeat | None = None
    """The latest; None before the first, and for nodes that have no agent."""
    beat_at: float | None = None
    """Seconds since the epoch, by the registry's clock."""
    stale: bool = False
    """The registry could not be asked lately: this is the last that was known."""

"""A node as a member of the network: its registration, its latest heartbeat, its state and its trust.

A `Registration` changes only when the node registers again; a `Heartbeat` replaces the previous one.
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import Node


class NodeState(StrEnum):
    """Whether a node takes requests. Only `READY` nodes are routed to."""

    LOADING = "loading"
    """Registered; its weights are not loaded yet."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes its requests and takes no new ones."""
    QUARANTINED = "quarantined"
    """Excluded because of its claims or its behaviour; `Member.reasons` gives the reasons."""
    DEAD = "dead"
    """No heartbeat for `dead_after_s`."""


class ModelInstance(Struct, frozen=True):
    """A further model of a node's engine: a second model, or an adapter. In all else it is as the node."""

    model: str
    version: str = ""
    """"": the node's."""
    max_concurrency: int = 0
    """0: as the node's."""


class InstanceLoad(Struct, frozen=True):
    """The queue of one of several models of an engine. None: the engine does not report it."""

    model: str
    waiting: int | None = None
    running: int | None = None


class Registration(Struct, frozen=True, kw_only=True):
    """A node's claims when it joins."""

    node: Node
    engine: str
    network: str = ""
    """The network's name; gateways and nodes of different networks never mix. "" is the unnamed network."""
    pool: str = ""
    """The pool to join; "" means every pool of the same model, dtype and tensor-parallel size."""
    weights_sha256: str = ""
    free_memory_bytes: int | None = None
    epoch: int = 0
    """Milliseconds since the Unix epoch at which the node started; the registration with the highest epoch of a node id is current."""
    instances: tuple[ModelInstance, ...] = ()
    """The other models of its engine."""

    @property
    def extra(self) -> tuple["Registration", ...]:
        """The registration of each further instance, as if it were a node of its own: without proof of its weights."""
        return tuple(
            replace(
                self,
                node=replace(
                    self.node,
                    model=each.model,
                    version=each.version or self.node.version,
                    max_concurrency=each.max_concurrency or self.node.max_concurrency,
                ),
                pool="",
                weights_sha256="",
                instances=(),
            )
            for each in self.instances
        )


class Heartbeat(Struct, frozen=True, kw_only=True):
    """One heartbeat of a node. None: the engine does not report the value."""

    state: NodeState
    sequence: int
    """Grows with each heartbeat of one registration."""
    waiting: int | None = None
    running: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1."""
    tokens_in_use: int | None = None
    prefill_rate: float | None = None
    """Measured prompt tokens per second."""
    decode_rate: float | None = None
    """Measured output tokens per second, all requests together."""
    free_memory_bytes: int | None = None
    reason: str = ""
    """Why the node is not ready, as text for operators."""
    instances: tuple[InstanceLoad, ...] = ()
    """By model, if the engine has several and tells their queues apart; the numbers above are of all of them."""
    cached_share: float | None = None
    """The share of recent prompt tokens that came from the engine's prefix cache, 0 to 1."""
    adapters: tuple[str, ...] | None = None
    """The adapters (LoRA) that the engine answers for."""
    active_adapters: tuple[str, ...] = ()
    """The adapters of running and waiting requests."""
    adapter_slots: int | None = None
    """Adapters that the engine can have loaded at once."""


class HeartbeatReading(Struct, frozen=True, gc=False):
    """A heartbeat with its time of arrival and the node's trust at that time."""

    beat: Heartbeat
    at: float
    """Seconds of this process's monotonic clock."""
    trust: float = 1.0
    """From 0 to 1, as computed by the registry."""


class MembershipDelta(Struct, frozen=True):
    """Nodes that joined and left, by pool. A changed node is in both."""

    joined: dict[str, tuple[Node, ...]]
    left: dict[str, tuple[str, ...]]
    """Node ids."""


def join_deltas(one: MembershipDelta, other: MembershipDelta) -> MembershipDelta:
    """Return both changes as one."""
    return MembershipDelta(
        joined={pool: (*one.joined.get(pool, ()), *other.joined.get(pool, ())) for pool in one.joined.keys() | other.joined.keys()},
        left={pool: (*one.left.get(pool, ()), *other.left.get(pool, ())) for pool in one.left.keys() | other.left.keys()},
    )


class Member(Struct, frozen=True, kw_only=True):
    """One row of the node table."""

    registration: Registration
    state: NodeState
    trust: float
    """0 to 1."""
    reasons: tuple[str, ...] = ()
    """Reasons for the state and the trust, newest last."""
    beat: Heartbeat | None = None
    """The latest heartbeat; None before the first one and for nodes without an agent."""
    beat_at: float | None = None
    """Seconds since the Unix epoch, by the registry's clock."""
    stale: bool = False
    """The registry is unreachable: this row is its last known value."""

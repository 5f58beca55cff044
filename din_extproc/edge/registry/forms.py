"""JSON messages between nodes and the registry, and their conversion to domain types.

Invariant: a malformed field is rejected here by name; the registry checks whether the content is plausible.
"""

import re
from typing import Self

from msgspec import Struct

from din_extproc.domain.availability import NodeShare
from din_extproc.domain.health import EXCLUDED, NO_CREDIT_REASON, BreakerSnapshot, BreakerState
from din_extproc.domain.membership import Heartbeat, InstanceLoad, Member, ModelInstance, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node
from din_extproc.registry.claims import MAX_BYTES, MAX_REGISTERED
from din_extproc.route.versions import is_version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_LONGEST = 200
_MOST_INSTANCES = 65
"""Models of one engine."""


class NodeForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Registration of a node."""

    id: str
    address: str
    """`10.0.0.7:8000`, `[fd00::10]:8000`."""
    model: str
    version: str
    dtype: str
    engine: str
    max_seq_len: int
    compute_capability: str = ""
    tp_world_size: int = 1
    max_concurrency: int = 64
    pool: str = ""
    network: str = ""
    weights_sha256: str = ""
    free_memory_bytes: int | None = None
    epoch: int = 0
    instances: tuple[ModelInstance, ...] = ()

    @classmethod
    def of(cls, registration: Registration) -> Self:
        """Create the form of a registration."""
        node = registration.node
        return cls(
            id=node.id,
            address=str(node.endpoint),
            model=node.model,
            version=node.version,
            dtype=node.dtype,
            engine=registration.engine,
            max_seq_len=node.max_seq_len,
            compute_capability=node.compute_capability,
            tp_world_size=node.tp_world_size,
            max_concurrency=node.max_concurrency,
            pool=registration.pool,
            network=registration.network,
            weights_sha256=registration.weights_sha256,
            free_memory_bytes=registration.free_memory_bytes,
            epoch=registration.epoch,
            instances=registration.instances,
        )

    def to_registration(self) -> Registration:
        """Convert the form to a registration.

        Raises:
            ValueError: A field has an invalid value.
        """
        for name in ("id", "dtype", "engine"):
            if _NAME(getattr(self, name)) is None:
                raise ValueError(f"{name} {getattr(self, name)[:_LONGEST]!a} is not a name: letters, digits, '.', '_' and '-'")
        for name in ("model", "version", "compute_capability", "pool", "network", "weights_sha256"):
            text = getattr(self, name)
            if len(text) > _LONGEST or not text.isprintable() or "\n" in text:
                raise ValueError(f"{name} is longer than {_LONGEST} characters or not printable")
        if not self.model or not is_version(self.version):
            raise ValueError(f"version {self.version!r} of model {self.model!r} is not a version such as '2025.3.1'")
        for name, most in MAX_REGISTERED.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)} is not within 1 and {most}")
        if self.free_memory_bytes is not None and not 0 <= self.free_memory_bytes <= MAX_BYTES:
            raise ValueError(f"free_memory_bytes {self.free_memory_bytes} is impossible")
        if not 0 <= self.epoch < 1 << 53:
            raise ValueError(f"epoch {self.epoch} is out of range")
        self._check_instances()
        node = Node(
            id=self.id,
            endpoint=Endpoint.parse(self.address),
            model=self.model,
            version=self.version,
            dtype=self.dtype,
            compute_capability=self.compute_capability,
            tp_world_size=self.tp_world_size,
            max_seq_len=self.max_seq_len,
            max_concurrency=self.max_concurrency,
        )
        return Registration(
            node=node,
            engine=self.engine,
            network=self.network,
            pool=self.pool,
            weights_sha256=self.weights_sha256,
            free_memory_bytes=self.free_memory_bytes,
            epoch=self.epoch,
            instances=self.instances,
        )

    def _check_instances(self) -> None:
        """Raise a ValueError for an instance that can't be."""
        models = [self.model, *(each.model for each in self.instances)]
        if len(models) > _MOST_INSTANCES or len(set(models)) < len(models):
            raise ValueError(f"instances: at most {_MOST_INSTANCES - 1} further models, each once")
        for each in self.instances:
            if not each.model or len(each.model) > _LONGEST or not each.model.isprintable():
                raise ValueError(f"instances: a model's name is empty, longer than {_LONGEST} characters or not printable")
            if each.version and not is_version(each.version):
                raise ValueError(f"version {each.version[:_LONGEST]!a} of model {each.model!r} is not a version such as '2025.3.1'")
            if not 0 <= each.max_concurrency <= MAX_REGISTERED["max_concurrency"]:
                raise ValueError(f"max_concurrency {each.max_concurrency} of model {each.model!r} is impossible")


class BeatForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Heartbeat of a node."""

    lease: str
    sequence: int
    state: NodeState = NodeState.READY
    waiting: int | None = None
    running: int | None = None
    kv_cache_usage: float | None = None
    tokens_in_use: int | None = None
    prefill_rate: float | None = None
    decode_rate: float | None = None
    free_memory_bytes: int | None = None
    reason: str = ""
    instances: tuple[InstanceLoad, ...] = ()
    cached_share: float | None = None
    adapters: tuple[str, ...] | None = None
    active_adapters: tuple[str, ...] = ()
    adapter_slots: int | None = None

    def to_heartbeat(self) -> Heartbeat:
        """Convert the form to a heartbeat."""
        return Heartbeat(**{name: getattr(self, name) for name in Heartbeat.__struct_fields__})


class LeaveForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Drain or deregistration."""

    reason: str = ""
    lease: str = ""
    """Lease of the registration; "": the current one."""


class HealthForm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Breaker state of a node or pool, and the last probe of the node."""

    state: BreakerState
    for_s: float = 0.0
    """Seconds in this state."""
    again_in_s: float | None = None
    """Seconds until an open breaker is tried again, or a ramp ends."""
    share: float = 1.0
    """Share of its usual traffic, 0 to 1."""
    reason: str = ""
    ttft_ms: float | None = None
    """Time to first token of the last successful probe."""
    probe: str = ""
    """Error of the last probe; "" on success."""
    probe_age_s: float | None = None

    @classmethod
    def of(cls, breaker: BreakerSnapshot, now: float) -> Self:
        """Create the form from a snapshot at a time of the monotonic clock."""
        return cls(
            state=breaker.state,
            for_s=round(now - breaker.since, 3),
            again_in_s=None if breaker.until is None else round(max(0.0, breaker.until - now), 3),
            share=round(breaker.share(now), 3),
            reason=breaker.reason,
        )

    @property
    def has_no_credit(self) -> bool:
        """Return whether the account had no credit at the last request."""
        return self.reason == NO_CREDIT_REASON and self.state in {BreakerState.OPEN, BreakerState.HALF_OPEN}

    @property
    def summary(self) -> str:
        """Return the state as text."""
        if self.state is BreakerState.CLOSED:
            return ""
        again = "" if self.again_in_s is None else f", {'tried again' if self.share == 0.0 else 'all of it'} in {self.again_in_s:.0f} s"
        share = "" if self.share == 0.0 else f", gets {self.share:.0%} of its requests"
        return f"breaker {self.state.value.replace('_', ' ')} since {self.for_s:.0f} s{share}{again}: {self.reason}"

    def to_breaker(self) -> BreakerSnapshot:
        """Return the snapshot, relative to time 0."""
        return BreakerSnapshot(self.state, 0.0, self.again_in_s, self.share, self.reason)


class MemberForm(Struct, frozen=True, kw_only=True):
    """One node in a list response."""

    node: NodeForm
    state: NodeState
    trust: float
    reasons: tuple[str, ...]
    beat: Heartbeat | None
    beat_age_s: float | None
    """Seconds since the latest heartbeat; None before the first."""
    stale: bool
    pools: tuple[str, ...]
    """Pools that route to it now."""
    health: HealthForm | None = None
    """Breaker state and last probe; None if unknown."""

    @property
    def share(self) -> NodeShare:
        """Return the node's share of its usual traffic."""
        held_back = self.health is not None and self.health.state is not BreakerState.CLOSED
        passes = 1.0 if self.health is None or not held_back else 0.0 if self.health.state in EXCLUDED else self.health.share
        reason = self.reasons[-1] if self.state is not NodeState.READY and self.reasons else ""
        cause = reason or (self.health.summary if self.health is not None else "")
        return NodeShare(self.node.id, self.node.model, self.state, passes, cause)

    @classmethod
    def of(cls, member: Member, pools: tuple[str, ...], now: float) -> Self:
        """Create the form of a member; `now` in seconds since the epoch."""
        return cls(
            node=NodeForm.of(member.registration),
            state=member.state,
            trust=round(member.trust, 3),
            reasons=member.reasons,
            beat=member.beat,
            beat_age_s=None if member.beat_at is None else round(max(0.0, now - member.beat_at), 3),
            stale=member.stale,
            pools=pools,
        )

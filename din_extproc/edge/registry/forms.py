"""What nodes and their registry say to each other as JSON, and what is made of it.

Rule: a form that can't be meant is refused here, with the field's name; whether it is true is the registry's business.
"""

import re
from typing import Self

from msgspec import Struct

from din_extproc.domain.availability import NodeShare
from din_extproc.domain.health import EXCLUDED, BreakerSnapshot, BreakerState
from din_extproc.domain.membership import Heartbeat, Member, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node
from din_extproc.registry.claims import MAX_BYTES, MAX_REGISTERED
from din_extproc.route.versions import is_version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_LONGEST = 200


class NodeForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a node says of itself when it joins."""

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

    @classmethod
    def of(cls, registration: Registration) -> Self:
        """As a node writes it."""
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
        )

    def registration(self) -> Registration:
        """As the registry takes it.

        Raises:
            ValueError: a field holds what it can't hold.
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
        )


class BeatForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A heartbeat."""

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

    def beat(self) -> Heartbeat:
        """As the registry takes it."""
        return Heartbeat(**{name: getattr(self, name) for name in Heartbeat.__struct_fields__})


class LeaveForm(Struct, frozen=True, forbid_unknown_fields=True):
    """A drain, or the end of a registration."""

    reason: str = ""
    lease: str = ""
    """"": whichever is in force."""


class HealthForm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a breaker says of a node or pool, and what the last probe of a node was like."""

    state: BreakerState
    for_s: float = 0.0
    """How long it has been so."""
    again_in_s: float | None = None
    """Until an open one is tried again, or a ramping one has everything."""
    share: float = 1.0
    """What it gets of its requests, 0 to 1."""
    reason: str = ""
    ttft_ms: float | None = None
    """Time to the first token of the last probe that had one."""
    probe: str = ""
    """Why the last probe failed, "" when it did not."""
    probe_age_s: float | None = None

    @classmethod
    def of(cls, standing: BreakerSnapshot, now: float) -> Self:
        """A standing at a time of the monotonic clock."""
        return cls(
            state=standing.state,
            for_s=round(now - standing.since, 3),
            again_in_s=None if standing.until is None else round(max(0.0, standing.until - now), 3),
            share=round(standing.share(now), 3),
            reason=standing.reason,
        )

    @property
    def said(self) -> str:
        """For people."""
        if self.state is BreakerState.CLOSED:
            return ""
        again = "" if self.again_in_s is None else f", {'tried again' if self.share == 0.0 else 'all of it'} in {self.again_in_s:.0f} s"
        share = "" if self.share == 0.0 else f", gets {self.share:.0%} of its requests"
        return f"breaker {self.state.value.replace('_', ' ')} since {self.for_s:.0f} s{share}{again}: {self.reason}"

    def standing(self) -> BreakerSnapshot:
        """The same at the time 0."""
        return BreakerSnapshot(self.state, 0.0, self.again_in_s, self.share, self.reason)


class MemberForm(Struct, frozen=True, kw_only=True):
    """One row as people and machines see it."""

    node: NodeForm
    state: NodeState
    trust: float
    reasons: tuple[str, ...]
    beat: Heartbeat | None
    beat_age_s: float | None
    """Seconds since the latest heartbeat; None: there was none."""
    stale: bool
    pools: tuple[str, ...]
    """Those that route to it now."""
    health: HealthForm | None = None
    """None: nothing was heard of it yet."""

    @property
    def share(self) -> NodeShare:
        """How much of its usual traffic the node takes now."""
        held_back = self.health is not None and self.health.state is not BreakerState.CLOSED
        passes = 1.0 if self.health is None or not held_back else 0.0 if self.health.state in EXCLUDED else self.health.share
        reason = self.reasons[-1] if self.state is not NodeState.READY and self.reasons else ""
        said = reason or (self.health.said if self.health is not None else "")
        return NodeShare(self.node.id, self.node.model, self.state, passes, said)

    @classmethod
    def of(cls, member: Member, pools: tuple[str, ...], now: float) -> Self:
        """A row, at a time in seconds since the epoch."""
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

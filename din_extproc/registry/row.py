"""One node's row, and what each message of the node makes of it. The only place where a row changes.

Rule: a row is replaced, never changed; a message that may not change it gives a `RegistryDenial` with the reason. Time is an argument.
"""

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, Member, NodeState, Registration
from din_extproc.registry.claims import Catalogue, find_contradiction, find_impossible_value
from din_extproc.registry.trust import Evidence

_MAX_REASONS = 6


class DenialReason(Enum):
    """What kind of no it is."""

    IMPOSSIBLE = "impossible"
    """What it says can't be."""
    UNTRUE = "untrue"
    """What it says is not what the catalogue says."""
    UNKNOWN = "unknown"
    """There is no such registration (any more): register anew."""
    OUTDATED = "outdated"
    """Something newer is known, or the place is taken."""


class RegistryDenial(Struct, frozen=True):
    """A message that changes nothing."""

    kind: DenialReason
    reason: str


class NodeRecord(Struct, frozen=True, kw_only=True):
    """What the network knows of one node."""

    registration: Registration
    lease: str
    """Names this registration to the node; never shown."""
    evidence: Evidence
    registered_at: float
    """Seconds since the epoch, as are all times here."""
    beat: Heartbeat | None = None
    beat_at: float | None = None
    draining: bool = False
    """Asked to drain by somebody else than its own beats."""
    quarantine: str = ""
    """Why it is kept out until it registers soundly."""
    distrust: str = ""
    """Why it is kept out until that has faded, however it registers."""
    reasons: tuple[str, ...] = ()
    revision: int = 0
    """Of the row in the shared table: what a successor replaces. 0: it is in none."""

    @property
    def id(self) -> str:
        """The node's id."""
        return self.registration.node.id

    @property
    def address_and_model(self) -> str:
        """What only one living node can have: an address, for one model."""
        return f"{self.registration.node.endpoint} {self.registration.node.model}"

    @property
    def state(self) -> NodeState:
        """As the node's own messages have it, as long as it lives."""
        if self.quarantine or self.distrust:
            return NodeState.QUARANTINED
        if self.draining:
            return NodeState.DRAINING
        return NodeState.LOADING if self.beat is None else self.beat.state

    def with_reason(self, reason: str) -> "NodeRecord":
        """With one more reason."""
        if self.reasons[-1:] == (reason,):
            return self
        return replace(self, reasons=(*self.reasons, reason)[-_MAX_REASONS:])

    def to_member(self, now: float, state: NodeState, *, stale: bool) -> Member:
        """As others see it."""
        return Member(
            registration=self.registration,
            state=state,
            trust=self.evidence.score_trust(now),
            reasons=self.reasons,
            beat=self.beat,
            beat_at=self.beat_at,
            stale=stale,
        )


def record_registration(
    registration: Registration, lease: str, before: NodeRecord | None, *, alive: bool, catalogue: Catalogue, now: float
) -> NodeRecord | RegistryDenial:
    """The row of a node that registers.

    Args:
        registration: What it says of itself.
        lease: Its new lease.
        before: Its row so far.
        alive: Whether `before` is still heard of: then a smaller epoch is an echo of the past.
        catalogue: What models are known to be.
        now: Seconds since the epoch.
    """
    if before is not None and alive and registration.epoch < before.registration.epoch:
        return RegistryDenial(DenialReason.OUTDATED, f"a newer registration is in force, epoch {before.registration.epoch}")
    lie = find_contradiction(registration, catalogue)
    if lie:
        return RegistryDenial(DenialReason.UNTRUE, lie)
    evidence = Evidence(at=now) if before is None else before.evidence.add(now)
    row = NodeRecord(registration=registration, lease=lease, evidence=evidence, registered_at=now)
    if before is None:
        return row
    return replace(row, revision=before.revision, distrust="" if evidence.is_rehabilitated else before.distrust)


def quarantine(row: NodeRecord, reason: str, now: float) -> NodeRecord:
    """A claim of the node did not hold: it is kept out until it registers soundly. The same claim once more is not held against it anew."""
    mismatches = 0 if row.quarantine == reason else 1
    return replace(row, quarantine=reason, evidence=row.evidence.add(now, mismatches=mismatches)).with_reason(f"quarantined: {reason}")


def record_comparison(row: NodeRecord, *, agreements: int, disagreements: int, reason: str, now: float) -> NodeRecord:
    """Answers of the node were held against those of others of its kind.

    When they differ again and again, it is kept out until that has faded.
    """
    after = replace(row, evidence=row.evidence.add(now, agreements=agreements, disagreements=disagreements))
    if not disagreements:
        return after
    if not after.evidence.is_contradicted or after.distrust:
        return after.with_reason(f"answers differ: {reason}")
    return replace(after, distrust=reason).with_reason(f"quarantined, answers differ: {reason}")


def record_heartbeat(row: NodeRecord | None, lease: str, beat: Heartbeat, *, interval_s: float, now: float) -> NodeRecord | RegistryDenial:
    """The row after a heartbeat. `interval_s`: what the node was told to keep to."""
    if row is None or row.lease != lease:
        return RegistryDenial(DenialReason.UNKNOWN, "no such lease: register anew")
    last = -1 if row.beat is None else row.beat.sequence
    if beat.sequence <= last:
        return RegistryDenial(DenialReason.OUTDATED, f"sequence {beat.sequence} comes after {last}")
    reason = find_impossible_value(beat)
    if reason:
        return RegistryDenial(DenialReason.IMPOSSIBLE, reason)
    since = now - (row.registered_at if row.beat_at is None else row.beat_at)
    missed = max(0, round(min(since, 3600.0) / interval_s) - 1)
    evidence = row.evidence.add(now, beats=1, missed=missed)
    distrust = "" if evidence.is_rehabilitated else row.distrust
    after = replace(row, beat=beat, beat_at=now, evidence=evidence, distrust=distrust)
    after = after.with_reason(f"{missed} heartbeats missed") if missed else after
    said_before = "" if row.beat is None else row.beat.reason
    return after.with_reason(f"{beat.state.value}: {beat.reason}") if beat.reason and beat.reason != said_before else after


def reject_heartbeat(row: NodeRecord, reason: str, now: float) -> NodeRecord:
    """A heartbeat was refused as impossible: it counts as missed."""
    return replace(row, evidence=row.evidence.add(now, missed=1)).with_reason(f"heartbeat refused: {reason}")


def record_drain(row: NodeRecord, reason: str) -> NodeRecord:
    """The node takes nothing new."""
    return replace(row, draining=True).with_reason(f"drained{f': {reason}' if reason else ''}")


def record_release(row: NodeRecord, operator: str) -> NodeRecord:
    """An operator lets the node take requests again: what kept it out is over, and disagreements until now count no more."""
    evidence = replace(row.evidence, disagreements=0.0, mismatches=0.0)
    return replace(row, draining=False, quarantine="", distrust="", evidence=evidence).with_reason(f"released by {operator}")


def record_answers(row: NodeRecord, *, answers: int, failures: int, now: float) -> NodeRecord:
    """So many requests were answered by the node, and so many failed at it."""
    return replace(row, evidence=row.evidence.add(now, answers=answers, failures=failures))

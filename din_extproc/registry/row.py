"""State transitions of a node's row by messages and events.

Invariant: rows are immutable and replaced; an invalid message yields a `RegistryDenial` with the reason. Time is an argument.
"""

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, Member, NodeState, Registration
from din_extproc.registry.claims import Catalogue, find_contradiction, find_impossible_value
from din_extproc.registry.trust import Evidence

_MAX_REASONS = 6


class DenialReason(Enum):
    """Kinds of denials."""

    IMPOSSIBLE = "impossible"
    """The values are implausible."""
    UNTRUE = "untrue"
    """The claim contradicts the catalogue."""
    UNKNOWN = "unknown"
    """The registration is unknown or expired: register again."""
    OUTDATED = "outdated"
    """A newer message is known, or the address is taken."""


class RegistryDenial(Struct, frozen=True):
    """Denial of a message."""

    kind: DenialReason
    reason: str


class NodeRecord(Struct, frozen=True, kw_only=True):
    """Row of one node."""

    registration: Registration
    lease: str
    """Secret id of this registration, known to the node."""
    evidence: Evidence
    registered_at: float
    """Seconds since the epoch, like all times here."""
    beat: Heartbeat | None = None
    beat_at: float | None = None
    draining: bool = False
    """Draining by a call or an operator, not by its own heartbeats."""
    quarantine: str = ""
    """Reason of a quarantine that ends with a valid registration."""
    distrust: str = ""
    """Reason of a quarantine that ends when the evidence has faded."""
    reasons: tuple[str, ...] = ()
    revision: int = 0
    """Revision in the shared table, for compare-and-set. 0: not in the table."""

    @property
    def id(self) -> str:
        """Return the node's id."""
        return self.registration.node.id

    @property
    def address_and_model(self) -> str:
        """Return the address and model, which are unique among living nodes."""
        return f"{self.registration.node.endpoint} {self.registration.node.model}"

    @property
    def places(self) -> tuple[str, ...]:
        """Return the address with each of the models."""
        node = self.registration.node
        return (self.address_and_model, *(f"{node.endpoint} {each.model}" for each in self.registration.instances))

    @property
    def state(self) -> NodeState:
        """Return the state by the node's messages, assuming it is alive."""
        if self.quarantine or self.distrust:
            return NodeState.QUARANTINED
        if self.draining:
            return NodeState.DRAINING
        return NodeState.LOADING if self.beat is None else self.beat.state

    def with_reason(self, reason: str) -> "NodeRecord":
        """Return the row with another reason."""
        if self.reasons[-1:] == (reason,):
            return self
        return replace(self, reasons=(*self.reasons, reason)[-_MAX_REASONS:])

    def to_member(self, now: float, state: NodeState, *, stale: bool) -> Member:
        """Return the member as shown to other components."""
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
    """Return the row after a registration.

    Args:
        registration: The registration.
        lease: Its new lease.
        before: Its current row.
        alive: Whether `before` is alive: a smaller epoch is then outdated.
        catalogue: The catalogue.
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
    row = replace(row, revision=before.revision, distrust="" if evidence.is_rehabilitated else before.distrust)
    if alive and before.beat is not None and registration.epoch and registration.epoch == before.registration.epoch:
        return replace(row, beat=replace(before.beat, sequence=0), beat_at=before.beat_at)  # the same process, with other models
    return row


def quarantine(row: NodeRecord, reason: str, now: float) -> NodeRecord:
    """Quarantine the node for a false claim until a valid registration. The same claim is counted once."""
    mismatches = 0 if row.quarantine == reason else 1
    return replace(row, quarantine=reason, evidence=row.evidence.add(now, mismatches=mismatches)).with_reason(f"quarantined: {reason}")


def record_comparison(row: NodeRecord, *, agreements: int, disagreements: int, reason: str, now: float) -> NodeRecord:
    """Record comparisons with nodes of the same kind.

    Repeated disagreements quarantine the node until the evidence has faded.
    """
    after = replace(row, evidence=row.evidence.add(now, agreements=agreements, disagreements=disagreements))
    if not disagreements:
        return after
    if not after.evidence.is_contradicted or after.distrust:
        return after.with_reason(f"answers differ: {reason}")
    return replace(after, distrust=reason).with_reason(f"quarantined, answers differ: {reason}")


def record_heartbeat(row: NodeRecord | None, lease: str, beat: Heartbeat, *, interval_s: float, now: float) -> NodeRecord | RegistryDenial:
    """Return the row after a heartbeat. `interval_s`: the assigned interval."""
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
    previous_reason = "" if row.beat is None else row.beat.reason
    return after.with_reason(f"{beat.state.value}: {beat.reason}") if beat.reason and beat.reason != previous_reason else after


def reject_heartbeat(row: NodeRecord, reason: str, now: float) -> NodeRecord:
    """Count an implausible heartbeat as missed."""
    return replace(row, evidence=row.evidence.add(now, missed=1)).with_reason(f"heartbeat refused: {reason}")


def record_drain(row: NodeRecord, reason: str) -> NodeRecord:
    """Drain the node."""
    return replace(row, draining=True).with_reason(f"drained{f': {reason}' if reason else ''}")


def record_release(row: NodeRecord, operator: str) -> NodeRecord:
    """Lift drain and quarantine on an operator's order, and forget disagreements."""
    evidence = replace(row.evidence, disagreements=0.0, mismatches=0.0)
    return replace(row, draining=False, quarantine="", distrust="", evidence=evidence).with_reason(f"released by {operator}")


def record_answers(row: NodeRecord, *, answers: int, failures: int, now: float) -> NodeRecord:
    """Record completed and failed requests."""
    return replace(row, evidence=row.evidence.add(now, answers=answers, failures=failures))

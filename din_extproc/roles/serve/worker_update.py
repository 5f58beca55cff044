"""What the process that keeps the accounts tells those that decide about requests.

Rule: plain values, which cross processes; whoever did not hear some of it decides less well, never wrongly.
"""

from msgspec import Struct

from din_extproc.admit.reservation import OutputEstimate
from din_extproc.domain.health import BreakerSnapshots
from din_extproc.domain.membership import HeartbeatReading, MembershipDelta
from din_extproc.domain.usage import NodePace
from din_extproc.intent.calibration import Calibration


class LearnedStats(Struct, frozen=True):
    """What finished exchanges taught, since it was last asked."""

    prompts: dict[str, Calibration]
    """By physical model."""
    outputs: tuple[OutputEstimate, ...]
    paces: tuple[NodePace, ...]
    """How quick nodes are."""

    def __bool__(self) -> bool:
        return bool(self.prompts or self.outputs or self.paces)


class WorkerUpdate(Struct, frozen=True):
    """What the process that keeps the accounts tells a worker."""

    lessons: LearnedStats | None = None
    turnover: MembershipDelta | None = None
    readings: dict[str, HeartbeatReading] = {}
    shut: bool | None = None
    """Requests may (False) or may not be taken, for the audit log's sake; None: as before."""
    configuration: str = ""
    """The fingerprint of the one that is in use now: Envoys know its pools."""
    standings: BreakerSnapshots | None = None
    """Of breakers that changed."""

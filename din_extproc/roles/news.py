"""What the process that keeps the accounts tells those that decide about requests.

Rule: plain values, which cross processes; whoever did not hear some of it decides less well, never wrongly.
"""

from msgspec import Struct

from din_extproc.admit.reservation import Mark
from din_extproc.domain.health import Standings
from din_extproc.domain.membership import Reading, Turnover
from din_extproc.domain.usage import Pace
from din_extproc.intent.calibration import Calibration


class Lessons(Struct, frozen=True):
    """What finished exchanges taught, since it was last asked."""

    prompts: dict[str, Calibration]
    """By physical model."""
    outputs: tuple[Mark, ...]
    paces: tuple[Pace, ...]
    """How quick nodes are."""

    def __bool__(self) -> bool:
        return bool(self.prompts or self.outputs or self.paces)


class News(Struct, frozen=True):
    """What the process that keeps the accounts tells a worker."""

    lessons: Lessons | None = None
    turnover: Turnover | None = None
    readings: dict[str, Reading] = {}
    shut: bool | None = None
    """Requests may (False) or may not be taken, for the audit log's sake; None: as before."""
    configuration: str = ""
    """The fingerprint of the one that is in use now: Envoys know its pools."""
    standings: Standings | None = None
    """Of breakers that changed."""

"""Messages from the accounting process to its workers.

Rule: a message holds plain values that cross process borders. A worker that misses one decides with older data, never wrongly.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from din_extproc.admit.reservation import OutputEstimate
from din_extproc.domain.health import BreakerSnapshots
from din_extproc.domain.membership import HeartbeatReading, MembershipDelta
from din_extproc.domain.usage import NodePace
from din_extproc.intent.calibration import Calibration


class WorkerUpdate(Struct, frozen=True, omit_defaults=True):
    """The changes for workers. None: this part has not changed."""

    membership: MembershipDelta | None = None
    breakers: BreakerSnapshots | None = None
    """The breakers that changed, or all that are not closed."""
    stopped: frozenset[str] | None = None
    """Origins of all requests that are sent to no node."""
    readings: dict[str, HeartbeatReading] | None = None
    """The latest load report of nodes, by node id."""
    missing_adapters: dict[str, str] | None = None
    """Nodes that answered 404 for an adapter (LoRA), and the adapter, by node id."""
    calibrations: dict[str, Calibration] | None = None
    """Bytes per prompt token, by physical model."""
    outputs: tuple[OutputEstimate, ...] | None = None
    paces: tuple[NodePace, ...] | None = None
    audit_blocked: bool | None = None
    """Whether requests are held because the audit log can't be written."""
    configuration: str | None = None
    """The fingerprint of the configuration in use; Envoys know its pools."""

    def apply(self, handlers: Mapping[str, Callable[[Any], None]]) -> None:
        """Call the handler of each part that has changed. `handlers`: by the name of the field."""
        for name, handle in handlers.items():
            value = getattr(self, name)
            if value is not None:
                handle(value)

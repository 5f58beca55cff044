"""The port to where requests wait for tokens and slots."""

from typing import Protocol

from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Queueing


class QueueFull(Struct, frozen=True, gc=False):
    """There is no place to wait."""

    vacancy_ms: int
    """Time in ms until a place in the queue is free at the latest, if no other request takes it."""


class RequestQueue(Protocol):
    """Requests of one process that wait."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def must_queue(self, claim: Claim, priority: Priority) -> bool:
        """Return whether the request must queue, because it may not overtake a waiting one."""

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, deadline_ms: int) -> Granted | Denied | QueueFull:
        """Wait until the claim is granted or the maximum wait is over; then return what was short. May raise `LimitsUnavailable`."""

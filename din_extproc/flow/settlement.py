"""Settlement: the reservation of a finished exchange is replaced by its actual cost.

Rule: no record is lost while the counters can't be reached, and none counts twice: the ledger's methods are idempotent by request id.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from din_extproc.admit.ledger import LimitsUnavailable, Settlement, SettlementLedger
from din_extproc.domain.usage import ExchangeRecord

_RETRIED_AT_ONCE = 16


class SettlementService:
    """Settles finished exchanges. Calls may overlap.

    Args:
        ledger: The counters.
        capacity: The number of records that may wait while the counters can't be reached. Beyond it the oldest are dropped: their
            tokens have flowed back into the bucket meanwhile, and their slots have expired.
    """

    __slots__ = ("_capacity", "_ledger", "_waiting", "dropped", "unknown")

    def __init__(self, ledger: SettlementLedger, *, capacity: int = 10_000) -> None:
        self._ledger = ledger
        self._capacity = capacity
        self._waiting: deque[ExchangeRecord] = deque()
        self.dropped = 0
        """The number of records that were given up."""
        self.unknown = 0
        """The number of records that the ledger had settled before or no longer knew."""

    @property
    def waiting(self) -> int:
        """The number of records that could not be settled yet."""
        return len(self._waiting)

    async def settle(self, records: Sequence[ExchangeRecord]) -> bool:
        """Settle the records. False: the counters can't be reached, and the records wait for `retry`."""
        settled = False
        try:
            settled = await self._charge(records)
        finally:  # when cancelled, too: `retry` may still be called at the end
            if not settled:
                self._keep(records)
        return settled

    async def retry(self) -> bool:
        """Settle the waiting records, oldest first, until the counters fail again. False: some still wait."""
        while self._waiting:
            oldest = list(islice(self._waiting, _RETRIED_AT_ONCE))
            if not await self._charge(oldest):
                return False
            for record in oldest:
                if self._waiting and self._waiting[0] is record:  # not settled by another call meanwhile
                    self._waiting.popleft()
        return True

    async def _charge(self, records: Sequence[ExchangeRecord]) -> bool:
        """Replace reservations by the actual cost and free the slots, where anything was reserved."""
        settlements = [
            Settlement(record.tenant, record.request_id, None if record.unsent else record.usage.total_tokens, record.cost)
            for record in records
            if record.reserved_tokens
        ]
        if settlements:
            try:
                self.unknown += len(settlements) - await self._ledger.settle_all(settlements)
            except LimitsUnavailable:
                return False
        return True

    def _keep(self, records: Sequence[ExchangeRecord]) -> None:
        self._waiting.extend(records)
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.dropped += 1

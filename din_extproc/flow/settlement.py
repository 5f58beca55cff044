"""Settlement: the reservation of a finished exchange is replaced by its actual cost.

Rule: no record is lost while the counters can't be reached, and none counts twice: the ledger's methods are idempotent by request id.
"""

from collections import deque

from din_extproc.admit.ledger import Ledger, LimitsUnavailable
from din_extproc.domain.usage import ExchangeRecord


class SettlementService:
    """Settles finished exchanges, one call each. The calls may overlap.

    Args:
        ledger: The counters.
        capacity: The number of records that may wait while the counters can't be reached. Beyond it the oldest are dropped: their
            tokens have flowed back into the bucket meanwhile, and their slots have expired.
    """

    __slots__ = ("_capacity", "_ledger", "_waiting", "dropped", "unknown")

    def __init__(self, ledger: Ledger, *, capacity: int = 10_000) -> None:
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

    async def settle(self, record: ExchangeRecord) -> bool:
        """Settle the record. False: the counters can't be reached, and the record waits for `retry`."""
        settled = False
        try:
            settled = await self._charge(record)
        finally:  # when cancelled, too: `retry` may still be called at the end
            if not settled:
                self._keep(record)
        return settled

    async def retry(self) -> bool:
        """Settle the waiting records, oldest first, until the counters fail again. False: some still wait."""
        while self._waiting:
            record = self._waiting[0]
            if not await self._charge(record):
                return False
            if self._waiting and self._waiting[0] is record:  # not settled by another call meanwhile
                self._waiting.popleft()
        return True

    async def _charge(self, record: ExchangeRecord) -> bool:
        """Replace the reservation by the actual cost and free the slot, if anything was reserved."""
        if not record.reserved_tokens:
            return True
        try:
            tokens = None if record.unsent else record.usage.total_tokens
            if not await self._ledger.settle(record.tenant, record.request_id, tokens, record.cost):
                self.unknown += 1
        except LimitsUnavailable:
            return False
        return True

    def _keep(self, record: ExchangeRecord) -> None:
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(record)

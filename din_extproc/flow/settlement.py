"""The conductor of the response half: a finished exchange -> its tenant's counters, what the gateway learns from it, who watches.

Rule: no record is lost while the counters can't be reached, and none counts twice: the ledger's verbs are idempotent by request id.
"""

from collections import deque
from typing import Protocol

from din_extproc.admit.ledger import Ledger, LimitsUnavailable
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome

_LESSONS_A_SECOND = 20


class PromptLearner(Protocol):
    """Learns how many tokens prompts really have."""

    def learn(self, model: str, features: tuple[float, ...], fixed: int, prompt_tokens: int) -> None:
        """The engine counted a prompt that was estimated from these features."""


class OutputLearner(Protocol):
    """Learns how long answers usually are."""

    def learn(self, tenant: str, model: str, completion_tokens: int) -> None:
        """An answer of so many tokens ran to its end."""


class ExchangeObserver(Protocol):
    """Told of every finished exchange, once: metrics, audit, spans."""

    def finished(self, record: ExchangeRecord) -> None:
        """The exchange is over; the record is final."""

    def attempt_failed(self, attempt: FailedAttempt) -> None:
        """A try at one node failed; its exchange may go on."""


class SettlementService:
    """Settles finished exchanges, one call each. The calls may overlap; who makes them is the role's business.

    Args:
        ledger: The counters.
        prompts: Told the real size of a prompt.
        outputs: Told the real size of an answer.
        observer: Told of every exchange, refused ones too.
        capacity: Records that wait at most while the counters can't be reached. Past that the oldest go: their tokens
            have flowed back into the bucket by then, and their slots have run out.
    """

    __slots__ = (
        "_capacity", "_ledger", "_lessons", "_observer", "_outputs", "_prompts", "_second", "_waiting", "dropped", "unknown",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, prompts: PromptLearner, outputs: OutputLearner, observer: ExchangeObserver, *, capacity: int = 10_000
    ) -> None:
        self._ledger = ledger
        self._prompts = prompts
        self._outputs = outputs
        self._observer = observer
        self._capacity = capacity
        self._waiting: deque[ExchangeRecord] = deque()
        self._second = 0
        self._lessons: dict[tuple[str, str], int] = {}
        """In that second, by tenant and model."""
        self.dropped = 0
        """Records that were given up, since the start."""
        self.unknown = 0
        """Records that the ledger had settled before or did not know (any more), since the start."""

    @property
    def waiting(self) -> int:
        """Records that could not be settled yet."""
        return len(self._waiting)

    async def settle(self, record: ExchangeRecord) -> bool:
        """Learn from the record and settle it. False: the counters can't be reached, the record waits for `retry`."""
        self._learn(record)
        self._observer.finished(record)
        settled = False
        try:
            settled = await self._charge(record)
        finally:  # cancelled, too: whoever stops us may still call `retry`
            if not settled:
                self._keep(record)
        return settled

    async def retry(self) -> bool:
        """Settle what waits, oldest first, until the counters fail again. False: some still wait."""
        while self._waiting:
            record = self._waiting[0]
            if not await self._charge(record):
                return False
            if self._waiting and self._waiting[0] is record:  # nobody else took it meanwhile
                self._waiting.popleft()
        return True

    def _learn(self, record: ExchangeRecord) -> None:
        """A few lessons a second of each tenant and model are enough: under load, learning from all would cost more than it teaches."""
        usage = record.usage
        if usage.estimated or not usage.prompt_tokens:
            return
        second = int(record.started_at)
        if second != self._second:
            self._second = second
            self._lessons.clear()
        pupil = record.tenant, record.model
        lessons = self._lessons.get(pupil, 0)
        if lessons >= _LESSONS_A_SECOND:
            return
        self._lessons[pupil] = lessons + 1
        if record.features:
            self._prompts.learn(record.model, record.features, record.fixed, usage.prompt_tokens)
        if record.outcome is Outcome.COMPLETED:
            answers = 1 if record.tags is None else record.tags.answers
            self._outputs.learn(record.tenant, record.model, -(-usage.completion_tokens // answers))

    async def _charge(self, record: ExchangeRecord) -> bool:
        """Replace the reservation by the real cost and free the slot. Nothing was reserved: nothing to do."""
        if not record.reserved_tokens:
            return True
        try:
            if not await self._ledger.settle(record.tenant, record.request_id, record.usage.total_tokens):
                self.unknown += 1
        except LimitsUnavailable:
            return False
        return True

    def _keep(self, record: ExchangeRecord) -> None:
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(record)

"""Stand-ins for what a test does not want to be real. Written by hand, each as small as its Protocol."""

from collections.abc import Awaitable, Callable

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, Standing
from din_extproc.domain.request import Head
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.domain.verdict import Answer, Code, Send, Verdict, error_body

Decision = Callable[[Head, bytes], Awaitable[Verdict]]


async def send_on(_head: Head, _body: bytes) -> Verdict:
    """A decision: the request goes to one pool, as it is."""
    return Send(cluster="pool", endpoints=("10.0.0.1:8000", "10.0.0.2:8000"), request_headers=(), response_headers=(), metadata={})


class FakeFlow:
    """Keeps what it was told, and decides as it was made to."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.asked: list[tuple[Head, bytes]] = []
        self.errors: list[BaseException] = []
        self.ends: list[bool] = []

    async def decide(self, head: Head, body: bytes) -> Verdict:
        self.asked.append((head, body))
        return await self.decision(head, body)

    def failed(self, error: BaseException) -> Answer:
        self.errors.append(error)
        body = error_body(Code.INTERNAL_ERROR, "The gateway failed", trace_id="trace-1")
        return Answer(status=500, headers=(("content-type", "application/json"), ("x-din-trace-id", "trace-1")), body=body)

    def ended(self, *, cancelled: bool) -> None:
        self.ends.append(cancelled)


class FakeConductor:
    """Begins a `FakeFlow` per stream and keeps them all."""

    def __init__(self, decision: Decision = send_on) -> None:
        self.decision = decision
        self.flows: list[FakeFlow] = []

    def begin(self) -> FakeFlow:
        self.flows.append(FakeFlow(self.decision))
        return self.flows[-1]


class FakeSink:
    """Keeps what was sent, and how the stream was failed."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failures: list[tuple[int, str]] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def fail(self, status: int, detail: str) -> None:
        self.failures.append((status, detail))


class BrokenLedger:
    """Counters that can't be reached until they are `mended`; keeps what it was told then."""

    def __init__(self, *, mended: bool = False) -> None:
        self.mended = mended
        self.settled: dict[str, int] = {}
        self.released: set[str] = set()

    def _reach(self) -> None:
        if not self.mended:
            raise LimitsUnavailable("gone")

    async def reserve(self, _claim: Claim) -> Granted | Denied:
        self._reach()
        return Granted(Standing())

    async def renew(self, _tenant: str, _request_id: str, _lease_ms: int) -> None:
        self._reach()

    async def release(self, _tenant: str, request_id: str) -> None:
        self._reach()
        self.released.add(request_id)

    async def settle(self, _tenant: str, request_id: str, tokens: int) -> bool:
        self._reach()
        known = request_id in self.settled
        self.settled.setdefault(request_id, tokens)
        return not known


class FakeSchool:
    """Both learners and the observer: keeps what it was taught and told."""

    def __init__(self) -> None:
        self.lessons: list[tuple[object, ...]] = []
        self.finished_ids: list[str] = []

    def learn(self, *lesson: object) -> None:
        self.lessons.append(lesson)

    def finished(self, record: ExchangeRecord) -> None:
        self.finished_ids.append(record.request_id)

"""The last minutes of finished exchanges, for people who watch: pace of nodes, traffic by rule and alias, use by tenant, refusals.

Rule: bounded in time and number whatever passes, and nothing of a prompt: names of the operator's, codes, numbers and trace ids.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from din_extproc.domain.timing import GatewayTimes
from din_extproc.domain.usage import ExchangeRecord, Outcome

STEP_S = 10
"""One point of a line."""
POINTS = 30
WINDOW_S = 60
_REMEMBERED_NODES = 20_000
_NAMES = 1_000
_EVENTS = 60
_EXCHANGES = 2_048
_OTHER = "other"


class Traffic(Struct, frozen=True, omit_defaults=True):
    """What one name had in the last minute."""

    requests: int = 0
    tokens: int = 0
    failed: int = 0
    refused: int = 0
    degraded: int = 0


class Event(Struct, frozen=True, omit_defaults=True):
    """A request that was refused, failed or answered by a fallback."""

    at: float
    """Seconds since the epoch."""
    what: str
    """`refused`, `degraded` or how it failed."""
    code: str
    trace_id: str
    tenant: str = ""
    model: str = ""
    rule: str = ""
    node: str = ""


class _Tally(Struct):
    requests: int = 0
    tokens: int = 0
    failed: int = 0
    refused: int = 0
    degraded: int = 0

    def add(self, record: ExchangeRecord) -> None:
        self.requests += 1
        self.tokens += record.usage.total_tokens
        self.failed += record.outcome.startswith("upstream_")
        self.refused += record.outcome is Outcome.REFUSED
        self.degraded += record.degraded


class _Minute:
    """Tallies by name over the last minute, in steps."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[str, _Tally]]] = deque()

    def add(self, name: str, record: ExchangeRecord, step: int) -> None:
        """`step`: of the clock; it never goes back."""
        self._forget(step)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, {}))
        tallies = self._steps[-1][1]
        tally = tallies.get(name)
        if tally is None:
            if len(tallies) >= _NAMES:
                name = _OTHER
            tally = tallies.setdefault(name, _Tally())
        tally.add(record)

    def shown(self, step: int) -> dict[str, Traffic]:
        self._forget(step)
        total: dict[str, _Tally] = {}
        for _, tallies in self._steps:
            for name, tally in tallies.items():
                whole = total.setdefault(name, _Tally())
                whole.requests += tally.requests
                whole.tokens += tally.tokens
                whole.failed += tally.failed
                whole.refused += tally.refused
                whole.degraded += tally.degraded
        return {name: Traffic(tally.requests, tally.tokens, tally.failed, tally.refused, tally.degraded) for name, tally in total.items()}

    def _forget(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - WINDOW_S // STEP_S:
            self._steps.popleft()


class _Line(Struct):
    """The mean of a node's first-token times, step by step."""

    step: int
    total: float = 0.0
    count: int = 0
    points: tuple[int | None, ...] = ()
    """Milliseconds, the newest last; None: no stream began."""

    def at(self, step: int) -> tuple[int | None, ...]:
        """The finished points at a later step."""
        if step == self.step:
            return self.points
        own = round(self.total / self.count) if self.count else None
        return (*self.points, own, *[None] * min(POINTS, step - self.step - 1))[-POINTS:]


class Recent:
    """What finished lately. `now` is any clock in seconds that only grows, the same one everywhere."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._by = {"rules": _Minute(), "aliases": _Minute(), "tenants": _Minute()}
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        self._records: deque[ExchangeRecord] = deque(maxlen=_EXCHANGES)

    def finished(self, record: ExchangeRecord, now: float) -> None:
        """An exchange is over."""
        self._records.append(record)
        step = int(now) // STEP_S
        self._by["tenants"].add(record.tenant, record, step)
        if record.model:
            self._by["rules"].add(record.rule, record, step)
            self._by["aliases"].add(record.alias, record, step)
        if record.first_token_ms is not None and record.node_id:
            self._learn(record.node_id, record.first_token_ms, step)
        what = _what(record)
        if what:
            code = record.refusal or record.error or (str(record.status) if record.status else "")
            at = round(record.started_at + (record.duration_ms or 0) / 1000, 3)
            asked = record.alias or record.model
            self.events.append(Event(at, what, code, record.trace_id, record.tenant, asked, record.rule, record.node_id))

    def times(self, trace: str) -> list[GatewayTimes]:
        """The exchanges among the last two thousand whose trace id begins so, oldest first."""
        return [GatewayTimes.of(record) for record in self._records if record.trace_id.startswith(trace)]

    def traffic(self, now: float) -> Mapping[str, Mapping[str, Traffic]]:
        """The last minute by rule, alias and tenant."""
        step = int(now) // STEP_S
        return {kind: minute.shown(step) for kind, minute in self._by.items()}

    def first_tokens(self, node_id: str, now: float) -> tuple[int | None, ...]:
        """The node's line: milliseconds to the first token."""
        line = self._lines.get(node_id)
        return () if line is None else line.at(int(now) // STEP_S)

    def _learn(self, node_id: str, first_token_ms: float, step: int) -> None:
        line = self._lines.get(node_id)
        if line is None:
            if len(self._lines) >= _REMEMBERED_NODES:
                del self._lines[next(iter(self._lines))]
            line = self._lines[node_id] = _Line(step)
        elif line.step != step:
            line.points = line.at(step)
            line.step, line.total, line.count = step, 0.0, 0
        line.total += first_token_ms
        line.count += 1


def _what(record: ExchangeRecord) -> str:
    if record.outcome is Outcome.REFUSED:
        return "refused"
    if record.outcome.startswith("upstream_") or record.outcome is Outcome.NOT_DISPATCHED:
        return record.outcome.value
    return "degraded" if record.degraded else ""

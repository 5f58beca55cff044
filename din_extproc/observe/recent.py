"""The last minutes of finished exchanges, for people who watch: pace of nodes, traffic by rule and alias, use by tenant, refusals.

Rule: bounded in time and number whatever passes, and nothing of a prompt: names of the operator's, codes, numbers and trace ids.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from din_extproc.domain.timing import GatewayTimes
from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.observe.timelines import STEP_S, TimelineData, Timelines

POINTS = 30
WINDOW_S = 60
_REMEMBERED_NODES = 20_000
_NAMES = 1_000
"""Of one kind that are shown."""
_COMBINATIONS = 4_000
"""Of names that one step distinguishes."""
_EVENTS = 60
_EXCHANGES = 2_048
_OTHER = "other"


class TrafficStats(Struct, frozen=True, omit_defaults=True):
    """Figures of one name in the last minute."""

    requests: int = 0
    tokens: int = 0
    failed: int = 0
    refused: int = 0
    degraded: int = 0


class RecentEvent(Struct, frozen=True, omit_defaults=True):
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


class _ExchangeSums(Struct):
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

    def join(self, other: "_ExchangeSums") -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.failed += other.failed
        self.refused += other.refused
        self.degraded += other.degraded

    def to_stats(self) -> TrafficStats:
        return TrafficStats(self.requests, self.tokens, self.failed, self.refused, self.degraded)


_Names = tuple[str, str | None, str | None]
"""Tenant, rule and alias; no rule and alias of a request that was refused before it was routed."""
_KINDS = ("tenants", "rules", "aliases")


class _Minute:
    """Tallies by names over the last minute, in steps. They are grouped by kind when they are read."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[_Names, _ExchangeSums]]] = deque()

    def add(self, names: _Names, record: ExchangeRecord, step: int) -> None:
        """`step`: of the clock; it never goes back."""
        steps = self._steps
        if not steps or steps[-1][0] != step:
            self._forget(step)
            steps.append((step, {}))
        tallies = steps[-1][1]
        sums = tallies.get(names)
        if sums is None:
            if len(tallies) >= _COMBINATIONS:
                names = (_OTHER, names[1] and _OTHER, names[2] and _OTHER)
            sums = tallies.setdefault(names, _ExchangeSums())
        sums.add(record)

    def sum_by_kind(self, step: int) -> dict[str, dict[str, TrafficStats]]:
        """By kind and name."""
        self._forget(step)
        total: dict[str, dict[str, _ExchangeSums]] = {kind: {} for kind in _KINDS}
        for _, tallies in self._steps:
            for names, sums in tallies.items():
                for each, name in zip(total.values(), names, strict=True):
                    if name is not None:
                        each.setdefault(name if name in each or len(each) < _NAMES else _OTHER, _ExchangeSums()).join(sums)
        return {kind: {name: counts.to_stats() for name, counts in each.items()} for kind, each in total.items()}

    def _forget(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - WINDOW_S // STEP_S:
            self._steps.popleft()


class _FirstTokenTrend(Struct):
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
    """Recently finished exchanges. `now` is any monotonic clock in seconds, the same one in every call."""

    def __init__(self) -> None:
        self._lines: dict[str, _FirstTokenTrend] = {}
        self._minute = _Minute()
        self._timelines = Timelines()
        self.events: deque[RecentEvent] = deque(maxlen=_EVENTS)
        self._records: deque[ExchangeRecord] = deque(maxlen=_EXCHANGES)

    def on_exchange(self, record: ExchangeRecord, now: float) -> None:
        """An exchange is over."""
        self._records.append(record)
        step = int(now) // STEP_S
        names = (record.tenant, record.rule, record.alias) if record.model else (record.tenant, None, None)
        self._minute.add(names, record, step)
        self._timelines.add(record, step)
        if record.first_token_ms is not None and record.node_id:
            self._learn(record.node_id, record.first_token_ms, step)
        what = _describe_event(record)
        if what:
            code = record.refusal or record.error or (str(record.status) if record.status else "")
            at = round(record.started_at + (record.duration_ms or 0) / 1000, 3)
            model = record.alias or record.model
            self.events.append(
                RecentEvent(
                    at=at,
                    what=what,
                    code=code,
                    trace_id=record.trace_id,
                    tenant=record.tenant,
                    model=model,
                    rule=record.rule,
                    node=record.node_id,
                )
            )

    def get_times(self, trace: str) -> list[GatewayTimes]:
        """The exchanges among the last two thousand whose trace id begins so, oldest first."""
        return [GatewayTimes.from_record(record) for record in self._records if record.trace_id.startswith(trace)]

    def get_traffic(self, now: float) -> Mapping[str, Mapping[str, TrafficStats]]:
        """The last minute by rule, alias and tenant."""
        return self._minute.sum_by_kind(int(now) // STEP_S)

    def get_timelines(self, now: float) -> TimelineData:
        """Return the last 15 minutes per pool and tenant."""
        return self._timelines.snapshot(int(now) // STEP_S)

    def get_first_tokens(self, node_id: str, now: float) -> tuple[int | None, ...]:
        """The node's line: milliseconds to the first token."""
        line = self._lines.get(node_id)
        return () if line is None else line.at(int(now) // STEP_S)

    def _learn(self, node_id: str, first_token_ms: float, step: int) -> None:
        line = self._lines.get(node_id)
        if line is None:
            if len(self._lines) >= _REMEMBERED_NODES:
                del self._lines[next(iter(self._lines))]
            line = self._lines[node_id] = _FirstTokenTrend(step)
        elif line.step != step:
            line.points = line.at(step)
            line.step, line.total, line.count = step, 0.0, 0
        line.total += first_token_ms
        line.count += 1


def _describe_event(record: ExchangeRecord) -> str:
    if record.outcome is Outcome.REFUSED:
        return "refused"
    if record.outcome.startswith("upstream_") or record.outcome is Outcome.NOT_DISPATCHED:
        return record.outcome.value
    return "degraded" if record.degraded else ""

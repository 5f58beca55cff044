"""The results of a run: counts and durations.

Rule: the beginning, while the network fills, is not measured; what had not ended by the last second counts as long as it had taken then.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from din_extproc.domain.node import Pool
from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.tools.simulate.node import SimulatedNode
from din_extproc.tools.simulate.traffic import Arrival

_MS = 1000.0


class Percentiles(Struct, frozen=True):
    """How a time is distributed, in seconds. None: there was none to measure."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Of these."""
        found = sorted(values)
        if not found:
            return cls(None, None, None, None)
        return cls(*(round(found[min(len(found) - 1, int(len(found) * share))], 4) for share in (0.5, 0.9, 0.95, 0.99)))


class PoolFigures(Struct, frozen=True):
    """One pool."""

    nodes: int
    share: float
    """Of the requests that nodes answered."""
    busy: float
    """Share of the time in which its nodes computed, on average."""
    busiest: float
    """Likewise, of the busiest node."""
    first_token_s: Percentiles
    preemptions: int
    """Running requests whose memory was taken away."""
    prefix_hits: int


class SourceFigures(Struct, frozen=True):
    """Requests of one sort."""

    requests: int
    errors: float
    """Share that was refused or failed."""
    first_token_s: Percentiles
    seconds: Percentiles
    pools: dict[str, float]
    """Where they were answered: shares."""


class Outcomes(Struct, frozen=True):
    """One run. Everything is of the time after the warm-up."""

    requests: int
    """That came."""
    requests_per_s: float
    """That were answered whole."""
    tokens_per_s: float
    """Their prompts and answers."""
    output_tokens_per_s: float
    errors: float
    """Share of the requests that came: refused, failed, or given up."""
    refused: dict[str, int]
    """By code."""
    failed: dict[str, int]
    """By outcome."""
    unfinished: int
    """At the last second."""
    degraded: float
    """Share of those that were sent: to a fallback."""
    waited: float
    """Share of those that were sent: after a wait in the tenant's queue."""
    retried: float
    """Share of those that were sent: to another node, too."""
    breakers_opened: int
    first_token_s: Percentiles
    per_token_s: Percentiles
    seconds: Percentiles
    """From a request's arrival to its last token."""
    pools: dict[str, PoolFigures]
    sources: dict[str, SourceFigures]
    tenants_refused: dict[str, int]
    """The ten tenants that were refused most."""
    cost: int = 0
    """Cost of all tokens, in 10**-9 of the currency; 0 without prices."""
    tenants_cost: dict[str, int] = {}
    """The ten tenants that spent most."""


class _Times:
    """Of the requests of one pool or sort."""

    __slots__ = ("first", "whole")

    def __init__(self) -> None:
        self.first = array("d")
        self.whole = array("d")


class SimulationStats:
    """Counts one run.

    Args:
        pools: The pools of the network.
        seconds: How long it goes on.
        warm_up_s: How much of its beginning is not measured.
    """

    def __init__(self, pools: Iterable[Pool], seconds: float, warm_up_s: float) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._seconds = seconds
        self._from = warm_up_s
        self._came: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._refused_of: Counter[str] = Counter()
        """By source."""
        self._refused_tenants: Counter[str] = Counter()
        self._costs: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._failed_of: Counter[str] = Counter()
        self._where: Counter[tuple[str, str]] = Counter()
        """By source and pool."""
        self._open: dict[int, Arrival] = {}
        self._sent = self._degraded = self._waited = self._retried = 0
        self._whole = self._tokens = self._output = 0
        self._opened = 0
        self._per_token = array("d")
        self._of_source: dict[str, _Times] = {}
        self._of_pool: dict[str, _Times] = {name: _Times() for name in self._pools}
        self._machines: Mapping[str, list[SimulatedNode]] = {}

    def on_arrival(self, arrival: Arrival) -> None:
        """A request came."""
        if arrival.at >= self._from:
            self._came[arrival.source] += 1
            self._open[id(arrival)] = arrival

    def on_refused(self, arrival: Arrival, code: str) -> None:
        """The gateway said no."""
        if self._open.pop(id(arrival), None) is not None:
            self._refused[code] += 1
            self._refused_of[arrival.source] += 1
            self._refused_tenants[arrival.tenant] += 1

    def on_ended(self, arrival: Arrival, record: ExchangeRecord, now: float, *, waited: bool) -> None:
        """An exchange is over."""
        completed = record.outcome is Outcome.COMPLETED
        if record.cost and now >= self._from:
            self._costs[record.tenant] += record.cost
        if completed and now >= self._from:
            self._whole += 1
            self._output += record.usage.completion_tokens
            self._tokens += record.usage.total_tokens
        if self._open.pop(id(arrival), None) is None:
            return
        self._sent += 1
        self._degraded += record.degraded or bool(record.moved_from)
        self._waited += waited
        self._retried += record.attempts > 1
        if not completed:
            self._failed[record.outcome.value] += 1
            self._failed_of[arrival.source] += 1
            return
        self._where[arrival.source, record.pool] += 1
        first, whole = (record.first_token_ms or 0.0) / _MS, (record.duration_ms or 0.0) / _MS
        for times in (self._compute_times(arrival.source), self._of_pool[record.pool]):
            times.first.append(first)
            times.whole.append(whole)
        if record.usage.completion_tokens > 1:
            self._per_token.append((whole - first) / (record.usage.completion_tokens - 1))

    def on_breaker_opened(self, _node_id: str) -> None:
        """A breaker has opened."""
        self._opened += 1

    def close(self, machines: Iterable[SimulatedNode], begun: Mapping[int, float]) -> None:
        """The run is over. `begun`: how long the first token took, by the identity of arrivals that have one and have not ended."""
        by_id = {machine.node.id: machine for machine in machines}
        self._machines = {name: [by_id[node.id] for node in pool.nodes] for name, pool in self._pools.items()}
        for name, arrival in self._open.items():
            times, lasts_s = self._compute_times(arrival.source), self._seconds - arrival.at
            times.whole.append(lasts_s)
            times.first.append(begun.get(name, lasts_s))

    def compute_outcomes(self) -> Outcomes:
        """The figures."""
        came, measured_s = sum(self._came.values()), self._seconds - self._from
        bad = sum(self._refused.values()) + sum(self._failed.values())
        sources = list(self._of_source.values())
        return Outcomes(
            requests=came,
            requests_per_s=round(self._whole / measured_s, 3),
            tokens_per_s=round(self._tokens / measured_s, 1),
            output_tokens_per_s=round(self._output / measured_s, 1),
            errors=_compute_share(bad, came),
            refused=dict(sorted(self._refused.items())),
            failed=dict(sorted(self._failed.items())),
            unfinished=len(self._open),
            degraded=_compute_share(self._degraded, self._sent),
            waited=_compute_share(self._waited, self._sent),
            retried=_compute_share(self._retried, self._sent),
            breakers_opened=self._opened,
            first_token_s=Percentiles.of(each for times in sources for each in times.first),
            per_token_s=Percentiles.of(self._per_token),
            seconds=Percentiles.of(each for times in sources for each in times.whole),
            pools={name: self._compute_pool(name) for name in self._pools},
            sources={name: self._compute_source(name) for name in sorted(self._came)},
            tenants_refused=dict(sorted(self._refused_tenants.items(), key=lambda pair: (-pair[1], pair[0]))[:10]),
            cost=sum(self._costs.values()),
            tenants_cost=dict(sorted(self._costs.items(), key=lambda pair: (-pair[1], pair[0]))[:10]),
        )

    def _compute_pool(self, name: str) -> PoolFigures:
        machines, answered = self._machines[name], sum(self._where.values())
        busy = [machine.busy_s / self._seconds for machine in machines]
        return PoolFigures(
            nodes=len(machines),
            share=_compute_share(sum(number for (_, pool), number in self._where.items() if pool == name), answered),
            busy=round(sum(busy) / len(busy), 4) if busy else 0.0,
            busiest=round(max(busy, default=0.0), 4),
            first_token_s=Percentiles.of(self._of_pool[name].first),
            preemptions=sum(machine.engine.preemptions for machine in machines),
            prefix_hits=sum(machine.hits for machine in machines),
        )

    def _compute_source(self, name: str) -> SourceFigures:
        times, answered = self._compute_times(name), sum(number for (source, _), number in self._where.items() if source == name)
        return SourceFigures(
            requests=self._came[name],
            errors=_compute_share(self._refused_of[name] + self._failed_of[name], self._came[name]),
            first_token_s=Percentiles.of(times.first),
            seconds=Percentiles.of(times.whole),
            pools={pool: _compute_share(number, answered) for (source, pool), number in sorted(self._where.items()) if source == name},
        )

    def _compute_times(self, source: str) -> _Times:
        found = self._of_source.get(source)
        if found is None:
            found = self._of_source[source] = _Times()
        return found


def _compute_share(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0

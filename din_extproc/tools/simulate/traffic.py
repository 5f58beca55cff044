"""The requests of clients and their times: drawn from rates, rhythms and lengths, or taken from a record.

Rule: arrivals don't wait; each source has its own chance, so that a changed source leaves the others as they were.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from math import cos, exp, pi
from operator import attrgetter

from msgspec import Struct

from din_extproc.admit.keys import Authenticated
from din_extproc.domain.request import Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.tools.simulate.plan import RandomSource

_HOUR_S = 3600.0
_DAY_H = 24.0


class Lengths(Struct, frozen=True):
    """How long something is, in tokens: around a median, by factors."""

    median: int
    spread: float = 0.0
    """Standard deviation of the logarithm: at 0.5 two of three lie between 0.6 and 1.65 times the median."""
    most: int = 1 << 30
    least: int = 1

    def draw(self, chance: RandomSource) -> int:
        """One of them."""
        length = int(self.median * exp(chance.gauss(0.0, self.spread))) if self.spread else self.median
        return min(max(length, self.least), self.most)


class Prefixes(Struct, frozen=True):
    """Beginnings that prompts share: the first is the commonest, the second half as common, the third a third as common."""

    name: str
    number: int
    least: int
    most: int
    """Tokens of one."""


class Rhythm(Struct, frozen=True):
    """How a rate changes with time; its mean stays. The plain one does not change."""

    burst: float = 1.0
    """Within bursts, so many times what it is between them."""
    burst_every_s: float = 60.0
    burst_s: float = 0.0
    """0: there are no bursts."""
    night: float = 1.0
    """The least rate of a day as a share of the greatest."""
    peak_hour: float = 14.0
    """UTC, when the rate is greatest."""

    @property
    def most(self) -> float:
        """The largest factor there is."""
        return self._compute_burst(0.0) * 2.0 / (1.0 + self.night)

    def compute_factor(self, at_s: float, hour: float) -> float:
        """Rate now as a share of the mean. `at_s`: since the beginning; `hour`: UTC, of the day."""
        swing = (1.0 - self.night) / (1.0 + self.night)
        return self._compute_burst(at_s) * (1.0 + swing * cos(2 * pi * (hour - self.peak_hour) / _DAY_H))

    def _compute_burst(self, at_s: float) -> float:
        if not self.burst_s:
            return 1.0
        share = self.burst_s / self.burst_every_s
        base = 1.0 / (share * self.burst + 1.0 - share)
        return base * self.burst if at_s % self.burst_every_s < self.burst_s else base


class TrafficSource(Struct, frozen=True, kw_only=True):
    """Requests of one sort."""

    name: str
    rate: float
    """A second, on average."""
    who: Authenticated
    tenants: int = 0
    """So many tenants with the limits of that one, each with counters of its own; 0: that one itself."""
    model: str
    operation: Operation = Operation.CHAT
    prompt: Lengths
    output: Lengths
    max_tokens: int | None = None
    """The largest output that clients ask for; None: they don't say."""
    stream: bool = True
    headers: Mapping[str, str] = {}
    task_tier: str = ""
    version: str = ""
    priority: Priority | None = None
    prefixes: Prefixes | None = None
    client_timeout_s: float | None = None
    """None: clients wait for ever."""
    rhythm: Rhythm = Rhythm()


class Arrival(Struct, frozen=True, gc=False):
    """One request. Times in seconds, lengths in tokens."""

    at: float
    source: str
    tenant: str
    """Whose counters it is charged to."""
    who: Authenticated
    intent: Intent
    head: RequestHead
    prompt_tokens: int
    output_tokens: int
    """Those of its whole answer."""
    prefix: int = 0
    prefix_tokens: int = 0
    client_timeout_s: float | None = None


def generate_traffic(
    sources: Sequence[TrafficSource], seconds: float, hour: float, chance: Callable[[str], RandomSource]
) -> Iterator[Arrival]:
    """The requests of all sources in the order in which they come.

    Args:
        sources: Of every sort.
        seconds: How long they come.
        hour: UTC, of the beginning.
        chance: Makes a source of chance for a name; the same name, the same chance.
    """
    streams = [_generate_arrivals(source, seconds, hour, chance) for source in sources]
    return streams[0] if len(streams) == 1 else merge(*streams, key=attrgetter("at"))


def _generate_arrivals(source: TrafficSource, seconds: float, hour: float, chance: Callable[[str], RandomSource]) -> Iterator[Arrival]:
    draws = chance(source.name)
    beginnings = _Beginnings(source.prefixes, chance)
    rhythm, plain = source.rhythm, source.rhythm == Rhythm()
    peak = source.rate * rhythm.most
    head = RequestHead(
        "POST", source.operation.value, {**source.headers, **({"x-task-tier": source.task_tier} if source.task_tier else {})}
    )
    at = 0.0
    while (at := at + draws.expovariate(peak)) < seconds:
        if not plain and draws.random() * rhythm.most > rhythm.compute_factor(at, hour + at / _HOUR_S):
            continue
        prefix, prefix_tokens = beginnings.draw(draws)
        prompt, output = prefix_tokens + source.prompt.draw(draws), source.output.draw(draws)
        tenant = f"{source.who.tenant.id}~{int(draws.random() * source.tenants)}" if source.tenants else source.who.tenant.id
        yield Arrival(
            at=at,
            source=source.name,
            tenant=tenant,
            who=source.who,
            intent=_make_intent(source, prompt),
            head=head,
            prompt_tokens=prompt,
            output_tokens=output if source.max_tokens is None else min(output, source.max_tokens),
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            client_timeout_s=source.client_timeout_s,
        )


def _make_intent(source: TrafficSource, prompt_tokens: int) -> Intent:
    return Intent(
        operation=source.operation,
        model=source.model,
        estimate=Estimate(prompt_tokens),
        output_tokens=source.max_tokens,
        stream=source.stream,
        task_tier=source.task_tier,
        version=source.version,
        priority=source.priority,
        output_each=source.max_tokens,
    )


class _Beginnings:
    """The beginnings that a source's prompts share. Sources that share them draw the same lengths."""

    def __init__(self, prefixes: Prefixes | None, chance: Callable[[str], RandomSource]) -> None:
        self._lengths: list[int] = []
        self._sums: list[float] = []
        self._first = 0
        if prefixes is None:
            return
        draws = chance(f"prefixes {prefixes.name}")
        self._first = 1 + int(draws.random() * (1 << 62))
        self._lengths = [prefixes.least + int(draws.random() * (prefixes.most - prefixes.least + 1)) for _ in range(prefixes.number)]
        total = 0.0
        for rank in range(1, prefixes.number + 1):
            total += 1.0 / rank
            self._sums.append(total)

    def draw(self, chance: RandomSource) -> tuple[int, int]:
        """A beginning, and its length; zeros when there are none."""
        if not self._lengths:
            return 0, 0
        place = chance.random() * self._sums[-1]
        rank = next(rank for rank, upto in enumerate(self._sums) if place < upto)
        return self._first + rank, self._lengths[rank]

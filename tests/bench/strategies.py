"""The strategies side by side on uneven nodes (R22): modelled engines in virtual time, requests that wait for nobody.

Rule: nothing here waits or draws twice: the same seed gives the same figures on every machine, and what decides is the product's own code.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from math import exp
from random import Random

from msgspec import Struct
from msgspec.structs import asdict

from din_extproc.domain.membership import Beat, NodeState, Reading
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.schedule.ask import Ask
from din_extproc.schedule.load import Load, Taken
from din_extproc.schedule.pace import Paces
from din_extproc.schedule.pick import STRATEGIES, ranking
from din_extproc.sim.engine import Emission, Engine, EngineSpec, Sequence
from tests.bench.field import Field, Figures

_GATEWAYS = 2
"""Replicas that know of each other's requests only through the nodes' heartbeats."""
_BEAT_S = 3.0
_LESSON_S = 0.5
_PREFIXES = 48
_MOST = 8192
_UNLIMITED = 100_000
"""Requests at once that nodes declare: none is passed over because it is full, so that only the strategies differ."""
RATE = 19.5
"""Requests per second: a little under what all machines together can do."""


class Kind(Struct, frozen=True):
    """A sort of machine."""

    number: int
    prefill_rate: float
    decode_rate: float
    kv_tokens: int
    slots: int
    max_seq_len: int
    prefixes: int
    """Beginnings of prompts that its memory keeps for the next request."""


UNEVEN = (
    Kind(2, 16_000.0, 80.0, 262_144, 256, 32_768, 12),
    Kind(2, 8_000.0, 50.0, 98_304, 256, 16_384, 6),
    Kind(4, 4_000.0, 30.0, 40_960, 256, 8_192, 4),
)
"""Two of the newest cards, two of the last generation, four small ones: 6 : 2.4 : 1 in requests per second."""


class Request(Struct, frozen=True):
    """What a client sends, and when."""

    at: float
    prefix: int
    prefix_tokens: int
    prompt_tokens: int
    """The prefix among them."""
    output_tokens: int


class Outcomes(Struct, frozen=True):
    """What came out of one run."""

    requests_per_s: float
    """Ended within the run, by how long it was."""
    tokens_per_s: float
    p50_s: float
    p99_s: float
    """From arrival to the last token; of a request that did not end, until the run did."""
    first_token_p99_s: float


def requests(seed: int, rate: float, seconds: float) -> Iterator[Request]:
    """Poisson arrivals of mixed lengths: questions, long documents, long answers; each behind one of a few dozen system prompts."""
    random = Random(seed)
    lengths = [random.randint(200, 1600) for _ in range(_PREFIXES)]
    popular = [1 / (rank + 1) for rank in range(_PREFIXES)]
    at = 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        (prefix,) = random.choices(range(_PREFIXES), popular)
        prompt, output = random.choices(((300, 160), (2800, 120), (400, 700)), (60, 25, 15))[0]
        own = int(prompt * exp(random.gauss(0, 0.5)))
        out = max(8, int(output * exp(random.gauss(0, 0.5))))
        total = min(lengths[prefix] + own, _MOST - 2000)
        yield Request(at, prefix + 1, lengths[prefix], total, min(out, 2000))


class Machine:
    """One engine with what it remembers of prompts."""

    def __init__(self, number: int, kind: Kind) -> None:
        self.kind = kind
        self.engine = Engine(
            EngineSpec(
                max_model_len=kind.max_seq_len,
                max_num_seqs=kind.slots,
                prefill_rate=kind.prefill_rate,
                decode_rate=kind.decode_rate,
                kv_tokens=kind.kv_tokens,
            )
        )
        self.node = Node(f"gpu-{number}", Endpoint("10.0.0.1", 8000 + number), "m", "1", "bf16", "", 1, kind.max_seq_len, _UNLIMITED)
        self.hits = 0
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._decoded = 0
        self._busy_s = 0.0
        self._looked_at = 0.0

    def take(self, request: Request, now: float) -> Sequence:
        """Begin a request; the prefix costs nothing when it was here lately."""
        cached = request.prefix_tokens if request.prefix in self._kept else 0
        self.hits += bool(cached)
        self._kept[request.prefix] = None
        self._kept.move_to_end(request.prefix)
        if len(self._kept) > self.kind.prefixes:
            self._kept.popitem(last=False)
        sequence = Sequence(request.prompt_tokens, request.output_tokens, computed=min(cached, request.prompt_tokens - 1))
        self.engine.submit(sequence, now)
        return sequence

    def step(self, now: float) -> list[Emission]:
        """Move to `now`."""
        if self.engine.running:
            self._busy_s += now - self._looked_at
        self._looked_at = now
        emissions = self.engine.step(now)
        self._decoded += len(emissions)
        return emissions

    def beat(self, sequence: int) -> Beat:
        """What an agent beside it would say."""
        engine, busy, decoded = self.engine, self._busy_s, self._decoded
        self._busy_s, self._decoded = 0.0, 0
        usage = engine.kv_usage
        return Beat(
            state=NodeState.READY,
            sequence=sequence,
            waiting=len(engine.waiting),
            running=len(engine.running),
            kv_cache_usage=usage,
            tokens_in_use=int(usage * self.kind.kv_tokens),
            prefill_rate=self.kind.prefill_rate,
            decode_rate=decoded / busy if busy > _BEAT_S / 2 else None,
        )


class _Gateway:
    """One replica: the product's strategy, load and lessons."""

    def __init__(self, strategy: str, nodes: tuple[Node, ...]) -> None:
        self.load = Load()
        self.paces = Paces({})
        pool = Pool(name="p", model="m", served_model="m", engine="vllm", scheduler=strategy, nodes=nodes)
        self.strategy = ranking(pool, nodes, self.load).strategy

    def send(self, request: Request, now: float, chance: int) -> Taken:
        ask = Ask(request.prompt_tokens, request.output_tokens, now, chance, request.prefix)
        taken = Taken(self.strategy.pick(1, ask)[0].id, request.prompt_tokens, request.output_tokens)
        self.load.take(taken, now)
        return taken

    def ended(self, taken: Taken, sequence: Sequence, now: float) -> None:
        self.load.give(taken)
        self.paces.learn(_record(taken.node_id, sequence, now), now)


def _record(node_id: str, sequence: Sequence, now: float) -> ExchangeRecord:
    return ExchangeRecord(
        request_id="", trace_id="", tenant="", key_id="", model="m", alias="m", pool="p", rule="", node_id=node_id, status=200,
        outcome=Outcome.COMPLETED, stream=True, usage=Usage(sequence.prompt_tokens, sequence.produced), reserved_tokens=0,
        prompt_estimate=0, features=(), fixed=0, attempts=1, degraded=False, started_at=sequence.arrived,
        duration_ms=(now - sequence.arrived) * 1000, first_token_ms=((sequence.first_token or now) - sequence.arrived) * 1000,
    )  # fmt: skip


class _Run:
    """One strategy under one load: a queue of what happens next, and what to do then."""

    def __init__(self, strategy: str, arrivals: Iterator[Request], seconds: float, kinds: tuple[Kind, ...], *, agents: bool) -> None:
        self.sequences: list[Sequence] = []
        self._machines = [Machine(number, kind) for number, kind in enumerate(kind for kind in kinds for _ in range(kind.number))]
        nodes = tuple(machine.node for machine in self._machines)
        self._by_id = {machine.node.id: machine for machine in self._machines}
        self._gateways = [_Gateway(strategy, nodes) for _ in range(_GATEWAYS)]
        self._arrivals = arrivals
        self._seconds = seconds
        self._under_way: dict[int, tuple[_Gateway, Taken]] = {}
        self._tie = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._next_arrival()
        for place, machine in enumerate(self._machines if agents else ()):
            self._later(_BEAT_S * (place + 1) / len(self._machines), partial(self._beat, machine))
        self._later(_LESSON_S, self._lesson)

    def run(self) -> None:
        """From the first arrival to the last second."""
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def _later(self, at: float, happen: Callable[[float], None]) -> None:
        if at <= self._seconds:
            heapq.heappush(self._events, (at, next(self._tie), happen))

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._later(request.at, partial(self._arrive, request))

    def _arrive(self, request: Request, now: float) -> None:
        gateway = self._gateways[len(self.sequences) % _GATEWAYS]
        taken = gateway.send(request, now, len(self.sequences) * 0x9E3779B97F4A7C15)
        machine = self._by_id[taken.node_id]
        was_idle = machine.engine.next_at is None
        sequence = machine.take(request, now)
        self.sequences.append(sequence)
        self._under_way[id(sequence)] = (gateway, taken)
        if was_idle:
            self._watch(machine)
        self._next_arrival()

    def _watch(self, machine: Machine) -> None:
        if machine.engine.next_at is not None:
            self._later(machine.engine.next_at, partial(self._step, machine))

    def _step(self, machine: Machine, now: float) -> None:
        for emission in machine.step(now):
            if emission.is_last:
                gateway, taken = self._under_way.pop(id(emission.sequence))
                gateway.ended(taken, emission.sequence, now)
        self._watch(machine)

    def _beat(self, machine: Machine, now: float) -> None:
        reading = Reading(machine.beat(int(now)), now)
        for gateway in self._gateways:
            gateway.load.hear(machine.node.id, reading)
        self._later(now + _BEAT_S, partial(self._beat, machine))

    def _lesson(self, now: float) -> None:
        for gateway in self._gateways:
            gateway.load.learn(gateway.paces.changed())
        self._later(now + _LESSON_S, self._lesson)


def run(
    strategy: str, *, rate: float = RATE, seconds: float, seed: int = 1, kinds: tuple[Kind, ...] = UNEVEN, agents: bool = True
) -> Outcomes:
    """One strategy under one load.

    Args:
        strategy: Its name.
        rate: Requests per second, all replicas together.
        seconds: Virtual ones.
        seed: Of what arrives when.
        kinds: The machines.
        agents: Nodes send heartbeats.
    """
    simulated = _Run(strategy, requests(seed, rate, seconds), seconds, kinds, agents=agents)
    simulated.run()
    return _outcomes(simulated.sequences, seconds)


def measure(seconds: float = 240.0) -> dict[str, Outcomes]:
    """Every strategy under the same load."""
    return {name: run(name, seconds=seconds) for name in STRATEGIES}


def strategies(field: Field) -> Figures:
    """Throughput and P99 of every strategy, near saturation."""
    measured = measure(field.effort.virtual_seconds)
    figures = {f"strategy_{name}_{figure}": value for name, each in measured.items() for figure, value in asdict(each).items()}
    rates = {name: each.requests_per_s for name, each in measured.items()}
    base = rates.pop("round_robin")
    return {
        **figures,
        "token_available_vs_round_robin": rates["token_available"] / base,
        "best_strategy_vs_round_robin": max(rates.values()) / base,
    }


def table(figures: Figures) -> str:
    """For the README."""
    base = figures["strategy_round_robin_requests_per_s"]
    lines = ["| strategy | requests/s | against round robin | P50 s | P99 s | first token P99 s |", "|---|---|---|---|---|---|"]
    for name in STRATEGIES:
        rate, p50, p99, first = (figures[f"strategy_{name}_{each}"] for each in ("requests_per_s", "p50_s", "p99_s", "first_token_p99_s"))
        lines.append(f"| `{name}` | {rate:.1f} | {rate / base - 1:+.0%} | {p50:.1f} | {p99:.0f} | {first:.1f} |")
    return "\n".join(lines)


def _outcomes(sequences: list[Sequence], seconds: float) -> Outcomes:
    """Of the whole run but its first quarter, while machines fill."""
    begin = seconds / 4
    counted = [each for each in sequences if each.arrived >= begin]
    ended = [each for each in sequences if each.finished is not None and each.finished >= begin]
    took = sorted((each.finished or seconds) - each.arrived for each in counted)
    first = sorted((each.first_token or seconds) - each.arrived for each in counted)
    return Outcomes(
        requests_per_s=len(ended) / (seconds - begin),
        tokens_per_s=sum(each.prompt_tokens + each.produced for each in ended) / (seconds - begin),
        p50_s=took[len(took) // 2],
        p99_s=took[int(len(took) * 0.99)],
        first_token_p99_s=first[int(len(first) * 0.99)],
    )

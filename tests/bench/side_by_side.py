"""The same chat request through every contender in turn: CPU of each process, requests per second, latency at half load.

Rule: a ratio is taken within one round, and the figure is the median of the rounds.
"""

from tests.bench.contenders import ENVOY, EVERYTHING, GRPC_AIO, LITELLM, WIRE
from tests.bench.field import Field, Figures
from tests.bench.harness import Spent, median, spread

_LANES = 64
"""Connections that stand ready for the open loop."""
Rounds = dict[str, list[Spent]]


def side_by_side(field: Field) -> Figures:
    """CPU and throughput of everyone, 16 connections."""
    rounds = _rounds(field, [ENVOY, WIRE, GRPC_AIO, EVERYTHING, *field.others()])
    figures: Figures = {}
    for name, spents in rounds.items():
        figures[f"requests_per_s_{name}"] = median(spent.per_second for spent in spents)
        for part in spents[0].cpu_us:
            figures[f"cpu_us_{name}_{part}"] = median(spent.cpu_us[part] for spent in spents)
    ours = rounds[EVERYTHING]
    figures |= _ratio("sidecar_cpu_vs_grpc_aio_noop", ours, rounds[GRPC_AIO], _server)
    figures |= _ratio("sidecar_cpu_vs_wire_noop", ours, rounds[WIRE], _server)
    figures |= _ratio("throughput_vs_wire_noop", ours, rounds[WIRE], lambda spent: spent.per_second)
    if LITELLM in rounds:
        figures |= _ratio("stack_cpu_vs_litellm", ours, rounds[LITELLM], lambda spent: sum(spent.cpu_us.values()))
    return figures


def half_load(field: Field) -> Figures:
    """Latency at half of what everything on can carry, over plain Envoy at the same rate; and how long decisions took meanwhile."""
    ours, plain = field.contender(EVERYTHING), field.contender(ENVOY)
    assert ours is not None
    assert plain is not None
    assert ours.stack is not None
    capacity = max(field.spend(ours, field.request(ours)).per_second for _ in range(2))
    rate = capacity / 2
    before = _decisions(ours.stack.status())
    added: list[tuple[float, float]] = []
    for _ in range(field.effort.rounds):
        under, over = (field.spend(each, field.request(each), rate=rate, connections=_LANES) for each in (plain, ours))
        added.append((over.p50_ms - under.p50_ms, over.p99_ms - under.p99_ms))
    taken = _decisions(ours.stack.status())
    counts = {bound: count - before.get(bound, 0) for bound, count in taken.items()}
    return {
        "half_load_requests_per_s": rate,
        "added_p50_ms_half_load": median(p50 for p50, _ in added),
        "added_p99_ms_half_load": median(p99 for _, p99 in added),
        "decision_p50_ms_half_load": percentile_us(counts, 0.5) / 1e3,
        "decision_p99_ms_half_load": percentile_us(counts, 0.99) / 1e3,
    }


def _rounds(field: Field, names: list[str]) -> Rounds:
    contenders = [found for name in names if (found := field.contender(name)) is not None]
    requests = {each.name: field.request(each) for each in contenders}
    rounds: Rounds = {each.name: [] for each in contenders}
    for _ in range(field.effort.rounds):
        for each in contenders:
            rounds[each.name].append(field.spend(each, requests[each.name]))
    return rounds


def _server(spent: Spent) -> float:
    return spent.cpu_us["server"]


def _ratio(name: str, over: list[Spent], under: list[Spent], of) -> Figures:
    """The median of the rounds, and the lowest and highest one."""
    each = [of(one) / of(other) for one, other in zip(over, under, strict=True)]
    lowest, highest = spread(each)
    return {name: median(each), f"{name}_lowest": lowest, f"{name}_highest": highest}


def _decisions(status: dict) -> dict[float, int]:
    """Decisions so far by upper bound of their time, in microseconds."""
    return {float("inf" if bound == "more" else bound): count for bound, count in status["counts"]["decisions_by_us"].items()}


def percentile_us(counts: dict[float, int], share: float) -> float:
    """The upper bound of the bucket in which the percentile lies."""
    left = share * sum(counts.values())
    for bound in sorted(counts):
        left -= counts[bound]
        if left <= 0:
            return bound
    raise ValueError("no decision was taken")

"""The same chat request through every contender in turn: CPU of each process, requests per second, latency at half load.

Rule: a ratio is taken within one round, and the figure is the median of the rounds.
"""

import asyncio
import time

import uvloop

from din_extproc.admit.ledger import Claim, Granted
from din_extproc.domain.tenant import Budget, RateLimits
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from tests.bench.contenders import ENVOY, EVERYTHING, GRPC_AIO, GRPC_GO, LITELLM, WIRE
from tests.bench.field import Field, Figures
from tests.bench.harness import Spent, cpu_s, median, pin, spread
from tests.bench.peers.go_gateways import AIBRIX, AIGW, AIGW_LIMITS
from tests.support.servers import RedisServer

_LANES = 64
"""Connections that stand ready for the open loop."""
_FEW = 2
"""Connections of a light load."""
_RATES = (100, 200)
"""Requests a second of the open loop beside AIBrix."""
_CALLS = 2_000
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
    if GRPC_GO in rounds:
        figures |= _ratio("sidecar_cpu_vs_grpc_go_noop", ours, rounds[GRPC_GO], _server)
    figures |= _stack_ratios(rounds)
    figures["redis_cpu_vs_one_evalsha"] = median(spent.cpu_us["redis"] for spent in ours) / _one_evalsha_us(field.effort.rounds)
    return figures


def light(field: Field) -> Figures:
    """CPU of the whole stacks at 2 connections."""
    rounds = _rounds(field, [EVERYTHING, *field.others()], connections=_FEW)
    return {f"{name}_light": figure for name, figure in _stack_ratios(rounds).items()} | {
        f"cpu_us_{name}_light": median(_stack(spent) for spent in spents) for name, spents in rounds.items()
    }


def beside_aibrix(field: Field) -> Figures:
    """Latency over plain Envoy at fixed rates, ours and AIBrix's in the same rounds; and how long our decisions took at the highest."""
    ours, theirs, plain = (field.contender(name) for name in (EVERYTHING, AIBRIX, ENVOY))
    assert ours is not None
    assert plain is not None
    assert ours.stack is not None
    figures: Figures = {}
    for rate in _RATES:
        before = _decisions(ours.stack.status())
        rounds: list[list[Spent]] = []
        for _ in range(field.effort.rounds):
            asked = [each for each in (plain, ours, theirs) if each is not None]
            rounds.append([field.spend(each, field.request(each), rate=rate, connections=_LANES) for each in asked])
        after = _decisions(ours.stack.status())
        figures[f"decision_p99_ms_{rate}"] = percentile_us({at: count - before.get(at, 0) for at, count in after.items()}, 0.99) / 1e3
        for name, of in (("p50", lambda spent: spent.p50_ms), ("p99", lambda spent: spent.p99_ms)):
            figures[f"added_{name}_ms_{rate}"] = added = median(of(spents[1]) - of(spents[0]) for spents in rounds)
            if theirs is not None:
                peer = median(of(spents[2]) - of(spents[0]) for spents in rounds)
                figures |= {f"added_{name}_ms_{rate}_aibrix": peer, f"added_{name}_vs_aibrix_{rate}": added / peer}
    return figures


def _stack(spent: Spent) -> float:
    return sum(spent.cpu_us.values())


def _stack_ratios(rounds: Rounds) -> Figures:
    """CPU of our whole stack over that of each other one that runs."""
    figures: Figures = {}
    for name in (LITELLM, AIBRIX, AIGW_LIMITS, AIGW):
        if name in rounds:
            figures |= _ratio(f"stack_cpu_vs_{name}", rounds[EVERYTHING], rounds[name], _stack)
    return figures


def _one_evalsha_us(rounds: int) -> float:
    """Redis CPU of a reservation that is alone in its round trip, in microseconds."""
    limits = RateLimits(rpm=100_000_000, tpm=2_000_000_000, max_streams=30_000)
    budgets = (Budget("tenant", limits),)
    with RedisServer() as server:
        pin(server.pid, "redis")

        async def located() -> Address:
            return Address(host="127.0.0.1", port=server.port)

        async def measure() -> float:
            link = Link(located, SCRIPTS, timeout_ms=20_000)
            assert await link.start()
            ledger = RedisLedger(link)
            spent = []
            for _ in range(rounds):
                before = cpu_s(server.pid)
                for at in range(_CALLS):
                    granted = await ledger.reserve(Claim(f"{time.monotonic_ns():x}-{at:x}", "acme", budgets, 300, 30_000))
                    assert isinstance(granted, Granted)
                    await asyncio.sleep(0)  # the next reservation leaves in a turn of its own
                spent.append((cpu_s(server.pid) - before) / _CALLS * 1e6)
            await link.close()
            return median(spent)

        return uvloop.run(measure())


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


def _rounds(field: Field, names: list[str], **options: float) -> Rounds:
    contenders = [found for name in names if (found := field.contender(name)) is not None]
    requests = {each.name: field.request(each) for each in contenders}
    rounds: Rounds = {each.name: [] for each in contenders}
    for _ in range(field.effort.rounds):
        for each in contenders:
            rounds[each.name].append(field.spend(each, requests[each.name], **options))
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

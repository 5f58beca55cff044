"""Cost by body size (1 kB, 32 kB, 1 MB) and of streams of 100 events."""

from tests.bench import contenders
from tests.bench.contenders import ENVOY, EVERYTHING, WIRE, Contender
from tests.bench.field import Field, Figures
from tests.bench.harness import Spent, median
from tests.bench.upstream import CHUNKS

_SIZES = {"1kb": (1 << 10, 16), "32kb": (32 << 10, 16), "1mb": (1 << 20, 4)}
"""Bytes, and connections at once."""
_STREAMS = 40


def bodies(field: Field) -> Figures:
    """CPU of the sidecar and of Envoy per request, in milliseconds, by size of the body."""
    figures: Figures = {}
    running = {name: field.contender(name) for name in (ENVOY, WIRE, EVERYTHING)}
    rounds = max(1, field.effort.rounds // 2)
    for size, (length, connections) in _SIZES.items():
        spents: dict[str, list[Spent]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, each in running.items():
                assert each is not None
                request = field.request(each, size=length)
                spents[name].append(field.spend(each, request, connections=connections, seconds=field.effort.seconds / 2))
        figures[f"body_{size}_sidecar_ms"] = _ms(spents[EVERYTHING], "server")
        figures[f"body_{size}_wire_noop_ms"] = _ms(spents[WIRE], "server")
        figures[f"body_{size}_envoy_ms"] = _ms(spents[EVERYTHING], "envoy")
        figures[f"body_{size}_envoy_alone_ms"] = _ms(spents[ENVOY], "envoy")
    return figures


def streams(field: Field) -> Figures:
    """CPU per event of a stream, 40 streams of 100 events at once: what the usage filter adds in Envoy, and what everything on costs."""
    ours = field.contender(EVERYTHING)
    assert ours is not None
    without = field.contender(WIRE)
    assert without is not None
    with_lua = contenders.wire_noop(field.exits, field.node_ports, field.folder, lua=True)
    spents: dict[str, list[Spent]] = {"none": [], "lua": [], "all": []}
    for _ in range(max(1, field.effort.rounds)):
        for name, each in (("none", without), ("lua", with_lua), ("all", ours)):
            spents[name].append(_streamed(field, each))
    pairs = zip(spents["lua"], spents["none"], strict=True)
    return {
        "chunk_envoy_cpu_lua_vs_none": median(one.cpu_us["envoy"] / other.cpu_us["envoy"] for one, other in pairs),
        "chunk_envoy_us_none": _us_per_chunk(spents["none"], "envoy"),
        "chunk_envoy_us_lua": _us_per_chunk(spents["lua"], "envoy"),
        "chunk_envoy_us_everything_on": _us_per_chunk(spents["all"], "envoy"),
        "chunk_sidecar_us_everything_on": _us_per_chunk(spents["all"], "server"),
    }


def _streamed(field: Field, each: Contender) -> Spent:
    return field.spend(each, field.request(each, stream=True), connections=_STREAMS, seconds=field.effort.seconds)


def _ms(spents: list[Spent], part: str) -> float:
    return median(spent.cpu_us[part] for spent in spents) / 1e3


def _us_per_chunk(spents: list[Spent], part: str) -> float:
    return median(spent.cpu_us[part] for spent in spents) / CHUNKS

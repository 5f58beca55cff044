"""Streams that are translated while they pass, beside the same streams passed on: 100 events each, Ollama's lines against vLLM's events."""

from tests.bench import contenders
from tests.bench.contenders import EVERYTHING, Contender
from tests.bench.field import Field, Figures
from tests.bench.harness import Spent, median
from tests.bench.upstream import CHUNKS

_STREAMS, _FEW = 40, 4
"""At once: to see the cost, and to see the delay without a queue."""


def translation(field: Field) -> Figures:
    """CPU per event in Envoy and sidecar, translated and passed on, and by how much an event comes later."""
    passed = field.contender(EVERYTHING)
    assert passed is not None
    translated = contenders.translating(field.exits, field.node_ports, field.folder)
    spents: dict[str, list[Spent]] = {"passed": [], "translated": []}
    delays: dict[str, list[float]] = {"passed": [], "translated": []}
    for _ in range(max(1, field.effort.rounds)):
        for name, each in (("passed", passed), ("translated", translated)):
            spents[name].append(_streamed(field, each, _STREAMS))
            delays[name].append(_streamed(field, each, _FEW).p50_ms)
    pairs = list(zip(spents["translated"], spents["passed"], strict=True))
    return {
        "chunk_cpu_translated_vs_passed": median(_cpu(one) / _cpu(other) for one, other in pairs),
        "chunk_translated_envoy_us": median(spent.cpu_us["envoy"] for spent in spents["translated"]) / CHUNKS,
        "chunk_translated_sidecar_us": median(spent.cpu_us["server"] for spent in spents["translated"]) / CHUNKS,
        "chunk_passed_envoy_us": median(spent.cpu_us["envoy"] for spent in spents["passed"]) / CHUNKS,
        "chunk_translated_added_ms": median(delays["translated"]) - median(delays["passed"]),
    }


def _cpu(spent: Spent) -> float:
    return spent.cpu_us["envoy"] + spent.cpu_us["server"]


def _streamed(field: Field, each: Contender, connections: int) -> Spent:
    return field.spend(each, field.request(each, stream=True), connections=connections, seconds=field.effort.seconds)

"""The strategies side by side on uneven nodes: `din-extproc simulate` near saturation, requests that wait for nobody.

Rule: nothing here waits or draws twice: the same seed gives the same figures on every machine, and what decides is the product's own code.
"""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from din_extproc.schedule.pick import STRATEGIES
from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, simulate
from din_extproc.tools.simulate.stats import Outcomes
from tests.bench.field import Field, Figures
from tests.support.stack import node, tenant

_UNLIMITED = 100_000
"""Requests at once that nodes declare: none is passed over because it is full, so that only the strategies differ."""
RATE = 19.5
"""Requests per second: a little under what all machines together can do."""
_MIX = {"questions": (0.6, 300, 160), "documents": (0.25, 2800, 120), "essays": (0.15, 400, 700)}
"""Share, own prompt and answer, in tokens."""


def _kind(count: int, prefill: float, decode: float, kv_tokens: int, max_seq_len: int, prefixes: int) -> dict[str, Any]:
    speed = {"prefill_rate": prefill, "decode_rate": decode, "kv_tokens": kv_tokens}
    return {"count": count, **speed, "max_seq_len": max_seq_len, "max_num_seqs": 256, "prefixes": prefixes}


UNEVEN = (
    _kind(2, 16_000.0, 80.0, 262_144, 32_768, 12),
    _kind(2, 8_000.0, 50.0, 98_304, 16_384, 6),
    _kind(4, 4_000.0, 30.0, 40_960, 8_192, 4),
)
"""Two of the newest cards, two of the last generation, four small ones: 6 : 2.4 : 1 in requests per second."""


def workload(seconds: float) -> dict[str, Any]:
    """Poisson arrivals of mixed lengths: questions, long documents, long answers; each behind one of a few dozen system prompts."""
    requests = [
        {
            "name": name,
            "rate": RATE * share,
            "prompt_tokens": {"median": prompt, "spread": 0.5, "most": 4500},
            "output_tokens": {"median": output, "spread": 0.5, "least": 8, "most": 2000},
            "prefixes": "system",
        }
        for name, (share, prompt, output) in _MIX.items()
    ]
    prefixes = {"system": {"number": 48, "tokens": [200, 1600]}}
    run = {"seconds": seconds, "warm_up_s": seconds / 4, "gateways": 2, "overhead_ms": 0}
    return {**run, "nodes": {"p": list(UNEVEN)}, "prefixes": prefixes, "requests": requests}


def run(strategies: tuple[str, ...], *, seconds: float, agents: bool = True) -> dict[str, Outcomes]:
    """These strategies under one load. `agents`: nodes say how they do."""
    config = {
        "version": 1,
        "gateway": {
            "ext_proc": {"socket": "/tmp/x.sock"},
            "access_log": {"address": "127.0.0.1:1"},
            "scrape_s": 3 if agents else 0,
        },
        "store": {"url": "redis://127.0.0.1:1"},
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("gpu", "10.0.0.1:8000", max_concurrency=_UNLIMITED)]}},
        "tenants": [tenant("acme")],
    }
    with tempfile.TemporaryDirectory(prefix="din-bench-") as folder:
        din, load = Path(folder) / "din.yaml", Path(folder) / "workload.yaml"
        din.write_text(yaml.safe_dump(config))
        load.write_text(yaml.safe_dump(workload(seconds)))
        simulated = simulate(SimulateOptions(config=din, workload=load, tries=(("pools.p.scheduler", strategies),)), {})
    assert isinstance(simulated, Simulated), str(simulated)
    return {row.variant["pools.p.scheduler"]: row.outcomes for row in simulated.rows}


def measure(seconds: float = 240.0) -> dict[str, Outcomes]:
    """Every strategy under the same load."""
    return run(tuple(STRATEGIES), seconds=seconds)


def strategies(field: Field) -> Figures:
    """Throughput and P99 of every strategy, near saturation."""
    measured = measure(field.effort.virtual_seconds)
    figures: Figures = {}
    for name, each in measured.items():
        figures |= {
            f"strategy_{name}_requests_per_s": each.requests_per_s,
            f"strategy_{name}_p50_s": each.seconds.p50 or 0.0,
            f"strategy_{name}_p99_s": each.seconds.p99 or 0.0,
            f"strategy_{name}_first_token_p99_s": each.first_token_s.p99 or 0.0,
        }
    rates = {name: each.requests_per_s for name, each in measured.items()}
    base = rates.pop("round_robin")
    return {
        **figures,
        "token_available_vs_round_robin": rates["token_available"] / base,
        "best_strategy_vs_round_robin": max(rates.values()) / base,
    }


def table(figures: Figures) -> str:
    """For the performance page."""
    base = figures["strategy_round_robin_requests_per_s"]
    lines = ["| strategy | requests/s | against round robin | P50 s | P99 s | first token P99 s |", "|---|---|---|---|---|---|"]
    for name in STRATEGIES:
        rate, p50, p99, first = (figures[f"strategy_{name}_{each}"] for each in ("requests_per_s", "p50_s", "p99_s", "first_token_p99_s"))
        lines.append(f"| `{name}` | {rate:.1f} | {rate / base - 1:+.0%} | {p50:.1f} | {p99:.0f} | {first:.1f} |")
    return "\n".join(lines)

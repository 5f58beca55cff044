"""The claims of the two papers beside measured figures: those of other benchmarks, and two of its own.

Rule: each figure says how it was obtained; nothing in the table is typed in but the papers' words.
"""

import tempfile
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline import BaselineOptions, compare
from din_extproc.tools.bench.baseline_figures import BaselineLoad
from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, simulate
from din_extproc.tools.simulate.stats import Outcomes
from tests.bench.contenders import ROOT
from tests.bench.field import Field, Figures
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

_USE = (
    "{shipped_utilisation:.2f} times: {shipped_busy:.0%} busy, was {shipped_busy_direct:.0%} (first token P50 {shipped_first:.2g} s, "
    "was {shipped_first_direct:.2g} s)"
)
_ROWS = (
    (
        "`token_available` against round robin, throughput on uneven nodes",
        "about +30 %",
        "{token_available_vs_round_robin:.2f} times; the best strategy {best_strategy_vs_round_robin:.2f} times",
        "`simulate`: eight engines of three speeds near saturation (`strategies`)",
    ),
    (
        "one of eight nodes stalls for 30 s, threshold 2: errors",
        "about 0.3 %",
        "{stall_errors_papers_2:.2%} as theirs; ours {stall_errors_probes_2:.2%} by probes, {stall_errors_breaker_2:.2%} with the breaker",
        "engine simulators, one of them stopped, behind a gateway as in the papers, and behind Envoy and sidecar (`stall`)",
    ),
    (
        "the same, threshold 5",
        "over 4 %",
        "{stall_errors_papers_5:.2%} as theirs; ours {stall_errors_probes_5:.2%} by probes, {stall_errors_breaker_5:.2%} with the breaker",
        "likewise",
    ),
    (
        "a routing decision, P99",
        "within 5 ms",
        "{decision_p99_ms_half_load:.2g} ms",
        "inside the sidecar with everything on, at half of its highest rate (`half_load`)",
    ),
    (
        "throughput of a network of two nodes ÷ one node asked directly",
        "at least 0.5",
        "{baseline_ratio:.2f}",
        "`bench baseline`: the same prompts both ways, two engine simulators (`baseline`)",
    ),
    (
        "light requests that the rules keep off the 70B pool",
        "over 60 %",
        "{shipped_light_off_big:.0%} of the light ones, {shipped_all_off_big:.0%} of all",
        "`simulate` over `envoy/din.yaml`; seven of ten requests are light (`shipped_rules`)",
    ),
    (
        "use of all nodes, by the rules ÷ everything to the 70B model",
        "over 2 times",
        _USE,
        "likewise, at half as many requests again as the 70B pool can do alone",
    ),
)
"""Claim, the papers' figure, ours, and how it was obtained."""
_FIGURES = tuple(dict.fromkeys(name for row in _ROWS for _, name, _, _ in Formatter().parse(row[2]) if name))
PARTS = ("strategies", "stall", "half_load", "baseline", "shipped_rules")
"""The benchmarks that the page is made from."""
_BIG = "cluster-standard-reasoning"
_LIGHT = ("intent", "extraction", "question")
_NODES = {
    "cluster-fast-throughput-14b": {"prefill_rate": 16_000, "decode_rate": 80, "kv_tokens": 262_144},
    "cluster-long-context-32k": {"prefill_rate": 16_000, "decode_rate": 80, "kv_tokens": 262_144},
    _BIG: {"prefill_rate": 4_000, "decode_rate": 25, "kv_tokens": 262_144},
}
"""Cards alike; a 70 B model takes four times as long per token as one of 14 B."""
_MIX = (
    ("intent", 0.30, 150, 30, {}),
    ("extraction", 0.15, 900, 60, {"task_tier": "extraction"}),
    ("question", 0.25, 300, 200, {}),
    ("analysis", 0.22, 2_000, 500, {}),
    ("agent", 0.05, 6_000, 400, {}),
    ("document", 0.03, 20_000, 300, {}),
)
"""Share, prompt and answer in tokens: seven of ten requests are light, and they are a fifth of the tokens."""
_SECONDS = 240.0
"""Virtual ones: a second or so of real ones, also in a smoke run."""
_RATE = 4.5
"""Requests per second: half as many again as the big pool can do alone, and what all nodes can do by the rules."""


def baseline(field: Field) -> Figures:
    """Throughput of a network of two nodes, as a share of what the same prompts get from one of them without it."""
    short = field.effort.rounds == 1
    asked = BaselineLoad(prompts=8, at_once=4, tokens=8, rounds=1) if short else BaselineLoad(prompts=48, at_once=8, tokens=64, rounds=5)
    with EngineSim(model="m", max_num_seqs=8) as one, EngineSim(model="m", max_num_seqs=8) as other:
        nodes = [node("n0", one.address), node("n1", other.address)]
        with Stack({"pools": {"p": {"model": "m", "engine": "vllm", "nodes": nodes}}, "tenants": [tenant("acme")]}) as stack:
            settings = load(stack.config_file, {})
            assert isinstance(settings, Settings), str(settings)
            compared = compare(settings, BaselineOptions(url=stack.url, key=key_of("acme"), load=asked))
    return {"baseline_ratio": compared.ratio}


def shipped_rules(_field: Field) -> Figures:
    """A mixed workload over `envoy/din.yaml`: by its rules, and with every request sent to the big model as before there were any."""
    ruled, direct = (_simulated(model) for model in ("bx-auto", "bx-reasoning-pro"))
    light = [ruled.sources[name] for name in _LIGHT]
    total = sum(source.requests for source in light)
    return {
        "shipped_light_off_big": 1.0 - sum(source.requests * source.pools.get(_BIG, 0.0) for source in light) / total,
        "shipped_all_off_big": 1.0 - ruled.pools[_BIG].share,
        "shipped_busy": _busy(ruled),
        "shipped_busy_direct": _busy(direct),
        "shipped_utilisation": _busy(ruled) / _busy(direct),
        "shipped_first": ruled.first_token_s.p50 or 0.0,
        "shipped_first_direct": direct.first_token_s.p50 or 0.0,
    }


def table(figures: Figures) -> str:
    """For the performance page. KeyError: a figure was not measured."""
    found = {name: figures[name] for name in _FIGURES}
    rows = [[each.format(**found) for each in row] for row in _ROWS]
    return "\n".join(["| claim | papers | here | obtained by |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _simulated(model: str) -> Outcomes:
    requests: list[dict[str, Any]] = [
        {
            "name": name,
            "rate": _RATE * share,
            "tenants": 1000,
            "model": model,
            "prompt_tokens": {"median": prompt, "spread": 0.3, "most": 30_000},
            "output_tokens": {"median": output, "spread": 0.5, "most": 2_000},
            **more,
        }
        for name, share, prompt, output, more in _MIX
    ]
    workload = {"seconds": _SECONDS, "warm_up_s": _SECONDS / 4, "gateways": 2, "nodes": _NODES, "requests": requests}
    with tempfile.TemporaryDirectory(prefix="din-bench-") as folder:
        file = Path(folder) / "workload.yaml"
        file.write_text(yaml.safe_dump(workload))
        simulated = simulate(SimulateOptions(config=ROOT / "envoy" / "din.yaml", workload=file), {})
    assert isinstance(simulated, Simulated), str(simulated)
    return simulated.rows[0].outcomes


def _busy(outcomes: Outcomes) -> float:
    """Of the nodes that generate text, the mean share of time in which they compute."""
    pools = [outcomes.pools[name] for name in _NODES]
    return sum(pool.busy * pool.nodes for pool in pools) / sum(pool.nodes for pool in pools)

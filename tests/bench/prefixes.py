"""Long prompts with common beginnings on equal nodes with prefix caches: `din-extproc simulate`, strategy by strategy.

Rule: as in `strategies.py`, the same seed gives the same figures on every machine.
"""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, simulate
from din_extproc.tools.simulate.stats import Outcomes
from tests.bench.field import Field, Figures
from tests.support.stack import node, tenant

STRATEGIES = ("round_robin", "predicted_time", "prefix_affinity")
_PREFIXES, _KEPT = 64, 12
"""System prompts, and how many of them one engine's cache holds."""
_RATE = 10.0
"""Requests per second: half of what eight nodes can do without any cache."""


def _config() -> dict[str, Any]:
    return {
        "version": 1,
        "gateway": {"ext_proc": {"socket": "/tmp/x.sock"}, "access_log": {"address": "127.0.0.1:1"}, "scrape_s": 3},
        "store": {"url": "redis://127.0.0.1:1"},
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("gpu", "10.0.0.1:8000", max_concurrency=1000)]}},
        "tenants": [tenant("acme")],
    }


def _workload(seconds: float) -> dict[str, Any]:
    speed = {"prefill_rate": 8000.0, "decode_rate": 60.0, "kv_tokens": 262_144, "max_seq_len": 32_768, "max_num_seqs": 256}
    prompt, answer = {"median": 200, "spread": 0.3}, {"median": 100, "spread": 0.3}
    request = {"name": "chat", "rate": _RATE, "prompt_tokens": prompt, "output_tokens": answer, "prefixes": "system"}
    return {
        "seconds": seconds,
        "warm_up_s": seconds / 4,
        "gateways": 2,
        "overhead_ms": 0,
        "nodes": {"p": [{"count": 8, **speed, "prefixes": _KEPT}]},
        "prefixes": {"system": {"number": _PREFIXES, "tokens": [3000, 5000]}},
        "requests": [request],
    }


def measure(seconds: float = 120.0) -> dict[str, Outcomes]:
    """Each strategy under the same load."""
    with tempfile.TemporaryDirectory(prefix="din-bench-") as folder:
        din, load = Path(folder) / "din.yaml", Path(folder) / "workload.yaml"
        din.write_text(yaml.safe_dump(_config()))
        load.write_text(yaml.safe_dump(_workload(seconds)))
        simulated = simulate(SimulateOptions(config=din, workload=load, tries=(("pools.p.scheduler", STRATEGIES),)), {})
    assert isinstance(simulated, Simulated), str(simulated)
    return {row.variant["pools.p.scheduler"]: row.outcomes for row in simulated.rows}


def prefixes(field: Field) -> Figures:
    """P90 of the time to the first token of every strategy, and of prefix affinity against round robin."""
    figures = {
        f"prefixes_{name}_first_token_p90_s": each.first_token_s.p90 or 0.0 for name, each in measure(field.effort.virtual_seconds).items()
    }
    ratio = figures["prefixes_prefix_affinity_first_token_p90_s"] / figures["prefixes_round_robin_first_token_p90_s"]
    return {**figures, "prefix_affinity_first_token_vs_round_robin": ratio}

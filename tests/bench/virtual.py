"""How long a simulation of many nodes and tenants takes: `din-extproc simulate` over a thousand nodes for an hour.

Rule: what is measured is the time of this process, from the files to the figures.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, simulate
from tests.bench.field import Field, Figures
from tests.support.stack import node, tenant

_HOUR_S = 3600.0
_SORTS = (("questions", 40.0, 300, 150), ("reports", 10.0, 2000, 400))
"""Requests per second, prompt and answer in tokens."""


def virtual(field: Field) -> Figures:
    """Seconds for an hour of a thousand nodes, and requests simulated per second."""
    virtual_s = min(_HOUR_S, field.effort.simulated_s)
    with tempfile.TemporaryDirectory(prefix="din-bench-") as folder:
        config, workload = Path(folder) / "din.yaml", Path(folder) / "workload.yaml"
        config.write_text(yaml.safe_dump(_config()))
        workload.write_text(yaml.safe_dump(_workload(virtual_s)))
        began = time.monotonic()
        simulated = simulate(SimulateOptions(config=config, workload=workload), {})
        took_s = time.monotonic() - began
    assert isinstance(simulated, Simulated), str(simulated)
    outcomes = simulated.rows[0].outcomes
    assert outcomes.errors == 0, outcomes.refused
    return {"simulate_1k_nodes_hour_s": took_s * _HOUR_S / virtual_s, "simulated_requests_per_s": outcomes.requests / 0.9 / took_s}


def _config() -> dict[str, Any]:
    return {
        "version": 1,
        "gateway": {"ext_proc": {"socket": "/tmp/x.sock"}, "access_log": {"address": "127.0.0.1:1"}},
        "store": {"url": "redis://127.0.0.1:1"},
        "pools": {
            "small": {"model": "s", "engine": "vllm", "nodes": [node("s", "10.0.0.1:8000")]},
            "big": {"model": "b", "engine": "vllm", "scheduler": "predicted_time", "nodes": [node("b", "10.0.0.2:8000")]},
        },
        "aliases": {"any": {"models": ["s", "b"]}},
        "rules": [
            {"id": "light", "when": {"estimated_tokens": {"lt": 1000}}, "pool": "small"},
            {"id": "rest", "when": "always", "pool": "big"},
        ],
        "tenants": [tenant("acme")],
    }


def _workload(seconds: float) -> dict[str, Any]:
    requests = [
        {
            "name": name,
            "rate": rate,
            "tenants": 100_000,
            "model": "any",
            "prompt_tokens": {"median": prompt, "spread": 0.3},
            "output_tokens": {"median": answer, "spread": 0.5},
        }
        for name, rate, prompt, answer in _SORTS
    ]
    nodes = {"small": {"count": 800}, "big": {"count": 200, "decode_rate": 25, "prefill_rate": 4000}}
    return {"seconds": seconds, "nodes": nodes, "requests": requests}

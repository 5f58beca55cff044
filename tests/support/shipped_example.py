"""The shipped `envoy/din.yaml` in front of modelled engines, as a test's deployment."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.engine_fleet import EngineFleet
from tests.support.stack import Stack, tenant

SHIPPED = Path(__file__).parents[2] / "envoy" / "din.yaml"
FAST = {"decode_rate": 5000.0, "prefill_rate": 1e7, "kv_tokens": 10_000_000, "max_num_seqs": 256}
ENGINES: dict[str, dict[str, Any]] = {
    "gpu-07": {"model": "qwen2.5-14b-instruct", "max_model_len": 8192, **FAST},
    "gpu-08": {"model": "qwen2.5-14b-instruct", "max_model_len": 8192, **FAST},
    "gpu-11": {"model": "qwen2.5-14b-instruct", "max_model_len": 32768, **FAST},
    "gpu-21": {"model": "llama-3.3-70b-instruct", "max_model_len": 131072, **FAST},
    "gpu-22": {"model": "llama-3.3-70b-instruct", "max_model_len": 131072, **FAST},
    "gpu-31": {"model": "bge-m3", "max_model_len": 8192, "api": "triton", "runner": "pooling", "dimensions": 8, **FAST},
}
"""Node -> the engine that the example says it runs."""


@contextlib.contextmanager
def shipped_example(**sections: Any) -> Iterator[tuple[Stack, EngineFleet]]:
    """The example with its nodes at modelled engines, and a tenant `acme` without limits beside its own; `sections` replace whole ones."""
    with EngineFleet(ENGINES) as fleet:
        config = yaml.safe_load(SHIPPED.read_text())
        for section in ("version", "gateway", "store"):
            del config[section]
        for each in ("listener", "admin"):
            del config["envoy"][each]
        for pool in config["pools"].values():
            for node in pool["nodes"]:
                node["address"] = fleet.members[node["id"]].address
        config["tenants"].append(tenant("acme"))
        stack = Stack({**config, **sections})
        shutil.copy(SHIPPED.parent / "models.json", stack.folder)
        with stack:
            yield stack, fleet

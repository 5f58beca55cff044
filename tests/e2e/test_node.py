"""A node beside a modelled engine: what its agent tells, and what the Envoy in front of the engine lets through."""

import hashlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.node_stack import NodeStack, RegistryThread
from tests.support.servers import EngineSim

pytestmark = pytest.mark.e2e
CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def engine():
    with EngineSim(max_num_seqs=2, decode_rate=200.0) as running:
        yield running


@pytest.fixture(scope="module")
def registry():
    with RegistryThread() as running:
        yield running


def verified(folder):
    """Weights, and the sections of a node.yaml that holds them against a catalogue."""
    weights = folder / "model.gguf"
    weights.write_bytes(b"weights" * 1000)
    expected = hashlib.sha256(weights.read_bytes()).hexdigest()
    entry = {"model_name": "sim-model", "model_version": "2025.3.1", "dtype": "bf16", "max_seq_len": 8192, "sha256": expected}
    (folder / "models.json").write_text(json.dumps({"models": [entry]}))
    return {"catalog": {"source": str(folder / "models.json")}, "weights": {"path": str(weights)}}, weights


@pytest.fixture(scope="module")
def node(engine, registry, tmp_path_factory):
    sections, _ = verified(tmp_path_factory.mktemp("weights"))
    with NodeStack(engine.address, registry.url, envoy=True, **sections) as running:
        yield running


def chat(node, body=CHAT, **headers):
    with node.client() as client:
        return client.post("/v1/chat/completions", json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_a_node_registers_with_the_address_of_its_envoy_and_beats(node, registry):
    node.eventually(lambda: registry.registrations, "a registration")
    registration = registry.registrations[0]
    assert (registration["id"], registration["address"], registration["model"], registration["version"]) == (
        "gpu-1",
        node.address,
        "sim-model",
        "2025.3.1",
    )
    assert registration["weights_sha256"] == hashlib.sha256(b"weights" * 1000).hexdigest()
    node.eventually(lambda: len(registry.beats) >= 2, "a second heartbeat")
    assert registry.beats[-1]["state"] == "ready"


def test_an_answer_names_the_node_its_version_the_time_and_the_trace(node):
    reply = chat(node, x_din_model_version=">=2025.3,<2026")
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-din-node-id"], reply.headers["x-din-model-version"]) == ("gpu-1", "2025.3.1")
    assert reply.headers["x-din-trace-id"] == "trace-of-a-test"
    assert float(reply.headers["x-din-exec-time-ms"]) >= 0


def test_a_request_without_a_trace_id_is_refused(node, engine):
    before = engine.seen()[0]["requests"]
    reply = chat(node, x_din_trace_id="")
    body = reply.json()
    assert (reply.status_code, body["code"], body["error"]["code"]) == (400, "trace_missing", "trace_missing")
    assert reply.headers["x-din-node-id"] == "gpu-1"
    assert engine.seen()[0]["requests"] == before


def test_a_request_for_another_version_is_refused(node, engine):
    before = engine.seen()[0]["requests"]
    reply = chat(node, x_din_model_version=">=2026")
    assert (reply.status_code, reply.json()["code"]) == (409, "version_mismatch")
    assert engine.seen()[0]["requests"] == before


def test_the_engine_gets_no_header_between_envoy_and_agent(node, engine):
    chat(node, authorization="Bearer secret")
    headers = dict(engine.seen(1)[1][0]["headers"])
    assert {"x-din-cluster", "x-din-endpoint", "authorization"} & headers.keys() == set()
    assert headers["x-din-trace-id"] == "trace-of-a-test"


def test_the_paths_of_an_engines_operator_stay_inside(node):
    with node.client() as client:
        assert client.post("/_faults", json={}).status_code == 404
        assert client.get("/metrics").status_code == 404
        assert client.get("/v1/models").json()["data"][0]["id"] == "sim-model"


def test_health_shows_the_real_queue_to_the_agents_port_and_through_envoy(node, registry):
    long = {**CHAT, "max_tokens": 300}

    def queue(port=None):
        status, health_report = node.health(port)
        return status, health_report["state"], health_report["waiting"], health_report["running"], health_report["in_flight"]

    with ThreadPoolExecutor(5) as clients:
        running = [clients.submit(chat, node, long) for _ in range(5)]
        node.eventually(lambda: queue() == (200, "ready", 3, 2, 5), "three that wait and two that run")
        assert queue(node.port)[0] == 200
        node.eventually(lambda: registry.beats[-1]["waiting"], "a heartbeat with the queue")
        assert [each.result().status_code for each in running] == [200] * 5
    node.eventually(lambda: queue(node.port)[4] == 0, "an empty node")


def test_requests_of_like_length_reach_the_engine_together(engine):
    """With a window that never ends by itself, three requests of one length go when the batch is full, and a long one stays behind."""
    window = {"batch": {"max_batch_tokens": 40, "max_wait_ms": 10_000}}
    with (
        RegistryThread() as registry,
        NodeStack(engine.address, registry.url, envoy=True, proxy=window) as node,
        ThreadPoolExecutor(3) as clients,
    ):
        engine.forget()
        first = clients.submit(chat, node)
        node.eventually(lambda: node.health()[1]["in_flight"] == 1, "a request that is held back")
        assert engine.seen()[0]["requests"] == 0
        assert node.health()[1]["waiting"] >= 1
        rest = [clients.submit(chat, node, CHAT | {"messages": [{"role": "user", "content": "word " * 30}]}) for _ in range(2)]
        assert [each.result().status_code for each in (first, rest[0])] == [200, 200]
        node.agent.terminate()
        assert rest[1].result().status_code == 200


def test_a_node_whose_engine_serves_another_model_stays_loading_and_says_why(engine):
    with RegistryThread() as registry:
        node = NodeStack(engine.address, registry.url, model="another").start(ready=False)
        try:
            node.eventually(lambda: "lists sim-model, not another" in node.health()[1].get("reason", ""), "a reason")
            assert node.health()[0] == 503
            node.eventually(lambda: len(registry.beats) > 1, "heartbeats")
            assert {beat["state"] for beat in registry.beats} == {"loading"}
            assert "lists sim-model, not another" in registry.beats[-1]["reason"]
        finally:
            node.stop()


def test_a_flipped_byte_in_the_weights_keeps_a_node_out(engine, tmp_path):
    sections, weights = verified(tmp_path)
    weights.write_bytes(b"f" + weights.read_bytes()[1:])
    with RegistryThread() as registry:
        node = NodeStack(engine.address, registry.url, **sections).start(ready=False)
        try:
            assert node.wait() == 1
            assert f"{weights} differs" in node.log()
            assert registry.registrations == []
        finally:
            node.stop()


def test_a_node_that_gets_sigterm_finishes_its_requests_and_leaves(engine):
    with RegistryThread() as registry, NodeStack(engine.address, registry.url, envoy=True) as node, ThreadPoolExecutor(1) as clients:
        running = clients.submit(chat, node, {**CHAT, "max_tokens": 200, "stream": True})
        node.eventually(lambda: node.health()[1]["in_flight"] == 1, "a stream")
        node.agent.send_signal(signal.SIGTERM)
        node.eventually(lambda: node.health()[1].get("state") == "draining", "a drain")
        assert node.health(node.port)[0] == 503
        reply = running.result()
        assert reply.status_code == 200
        assert reply.text.rstrip().endswith("data: [DONE]")
        assert node.wait() == 0
        assert registry.farewells == ["drain", "deregister"]
        assert "draining" in [beat["state"] for beat in registry.beats]


def test_an_engine_that_dies_is_reported_and_answered_for_and_its_return_is_reported_too():
    with EngineSim() as engine, RegistryThread() as registry, NodeStack(engine.address, registry.url, envoy=True) as node:
        engine.end()
        reply = chat(node)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_healthy_node")
        assert int(reply.headers["retry-after"]) >= 1
        node.eventually(lambda: node.health()[0] == 503, "an engine that is missed")
        node.eventually(lambda: registry.beats[-1]["state"] == "loading", "a heartbeat that says so")
        engine.start()
        node.eventually(lambda: registry.beats[-1]["state"] == "ready", "its return")

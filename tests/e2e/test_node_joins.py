"""A node's agent and a real sidecar's registry; and a node without an agent, which the sidecar asks itself."""

import asyncio
import json
import urllib.request

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline import BaselineOptions, compare
from din_extproc.tools.bench.baseline_figures import BaselineLoad
from din_extproc.tools.bench.split import SplitOptions, make_report, measure
from tests.support.node_stack import NodeStack
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e
TOKEN = make_node_token("gpu-1", bytes(ENTROPY_BYTES))


@pytest.fixture(scope="module")
def engine():
    with EngineSim(max_num_seqs=2) as running:
        yield running


@pytest.fixture(scope="module")
def registry():
    """Base URL of a registry."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def fronted(engine):
    """A node with an Envoy in front, which is listed and registers nowhere."""
    with NodeStack(engine.address, "http://127.0.0.1:1", envoy=True) as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(engine, registry, fronted):
    newer = node("front-2", fronted.address, version="2026.1.0")
    config = {
        "aliases": {"newest": {"model": "new", "version": ">=2026"}},
        "pools": {
            "joined": {"model": "sim-model", "engine": "vllm", "dtype": "bf16"},
            "listed": {"model": "sim-model", "engine": "vllm", "nodes": [node("listed-1", engine.address)]},
            "lying": {"model": "new", "served_model": "sim-model", "engine": "vllm", "nodes": [newer]},
            "fronted": {"model": "front", "served_model": "sim-model", "engine": "vllm", "nodes": [node("front-1", fronted.address)]},
        },
        "tenants": [tenant("acme")],
    }
    section = {"http_address": registry.removeprefix("http://"), "node_tokens_file": "tokens.yaml", "heartbeat_s": 0.3, "dead_after_s": 2}
    stack = Stack(config, gateway={"registry": section, "scrape_s": 0.2})
    (stack.folder / "tokens.yaml").write_text(f'gpu-1: "{TOKEN.hash}"\n')
    try:
        yield stack.start()
    finally:
        stack.stop()


@pytest.fixture
def agent(engine, registry, tmp_path, sidecar):
    (tmp_path / "token").write_text(TOKEN.text + "\n")
    with NodeStack(engine.address, registry, token_file=str(tmp_path / "token"), node={"address": "127.0.0.2:8000"}) as running:
        yield running


def row(sidecar, node_id):
    with urllib.request.urlopen(f"http://127.0.0.1:{sidecar.admin_port}/nodes", timeout=5) as reply:
        return next((row for row in json.loads(reply.read())["nodes"] if row["node"]["id"] == node_id), None)


def is_ready(sidecar, node_id):
    found = row(sidecar, node_id)
    return found is not None and found["state"] == "ready" and found["beat"] is not None


def test_an_agent_joins_a_real_registry_survives_its_loss_and_leaves(agent, sidecar):
    sidecar.eventually(lambda: is_ready(sidecar, "gpu-1"), "a ready node")
    joined = row(sidecar, "gpu-1")
    assert "joined" in joined["pools"]
    assert (joined["beat"]["waiting"], joined["beat"]["running"], joined["beat"]["kv_cache_usage"]) == (0, 0, 0.0)
    sidecar.redis.restart()
    sidecar.eventually(lambda: agent.health()[1]["registered"] and is_ready(sidecar, "gpu-1"), "a node that registered anew")
    agent.agent.terminate()
    assert agent.wait() == 0
    sidecar.eventually(lambda: row(sidecar, "gpu-1") is None, "a node that left")


def test_a_listed_node_is_asked_by_the_sidecar(sidecar, engine):
    sidecar.eventually(lambda: is_ready(sidecar, "listed-1"), "a page that was read")
    assert row(sidecar, "listed-1")["beat"]["waiting"] == 0
    assert row(sidecar, "listed-1")["beat_age_s"] < 60


def test_a_request_passes_the_gateways_envoy_and_the_nodes(sidecar, engine):
    engine.forget()
    reply = sidecar.chat(model="front", headers={"x-din-model-version": ">=2025.3", "x-din-trace-id": "trace-through-both"})
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-din-node-id"], reply.headers["x-din-trace-id"]) == ("front-1", "trace-through-both")
    headers = dict(engine.seen(1)[1][0]["headers"])
    assert (headers["x-din-trace-id"], headers["x-din-model-version"]) == ("trace-through-both", ">=2025.3")


@pytest.mark.parametrize("model", ["newest", "new@>=2026"])
def test_a_node_that_is_not_what_the_gateway_takes_it_for_refuses_by_the_constraint_of_alias_and_model_name(sidecar, engine, model):
    engine.forget()
    reply = sidecar.chat(model=model)
    assert (reply.status_code, reply.json()["code"]) == (409, "version_mismatch"), reply.text
    assert "serves version 2025.3.1, which does not meet '>=2026'" in reply.json()["detail"]
    assert engine.seen()[0]["requests"] == 0


def test_the_envoy_in_front_of_an_engine_tells_the_node_s_clock_and_what_the_way_takes(sidecar):
    settings = load(sidecar.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    options = SplitOptions(url=sidecar.url, key=key_of("acme"), model="front", tokens=(1, 8), repeats=1, clock_requests=2)
    asked = asyncio.run(measure(settings, options))
    assert all(each.answer.node is not None for each in asked.exchanges)
    found = make_report(asked, options)
    assert found.adds_up, found.lines()
    node_clock = found.clocks[1]
    assert node_clock.whose.startswith("front-")
    assert node_clock.high_ms - node_clock.low_ms < 300  # whole seconds alone, from four requests, would leave more
    load_ = BaselineLoad(prompts=4, at_once=2, tokens=4, rounds=1)
    compared = compare(settings, BaselineOptions(url=sidecar.url, key=key_of("acme"), model="front", load=load_))
    assert compared.direct.failed == compared.through.failed == 0

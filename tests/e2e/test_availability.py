"""Availability reports of a gateway whose only node is dead, and of an Envoy that does not know a node."""

import json
from collections.abc import Iterator

import pytest

from tests.support.operating import Operator
from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m") as running:
        yield running


def config(**nodes: str) -> dict:
    pool = {"model": "m", "engine": "vllm", "nodes": [node(name, address) for name, address in nodes.items()]}
    return {"pools": {"p": pool}, "aliases": {"alias": {"model": "m"}}, "tenants": [tenant("acme")]}


def diagnosed(stack: Stack) -> dict[str, dict]:
    return {each["what"]: each for each in json.loads(Operator(stack, "").run("doctor", "--json").stdout)}


def test_with_the_only_node_dead_every_view_says_so_and_the_sidecar_stays_ready(engine):
    health = {"probe": {"every_s": 0.2, "timeout_s": 1}, "open_s": 60}
    with Stack({**config(a=engine.address), "health": health}) as stack:
        operator = Operator(stack, "")
        assert operator.get("/availability?model=alias").status_code == 200
        engine.end()
        stack.eventually(lambda: operator.get("/availability").status_code == 503, "the only node is dead")
        (model,) = operator.get("/availability?model=alias").json()["models"]
        assert (model["model"], model["state"], model["available"]) == ("m", "unavailable", 0)
        assert operator.get("/readyz").status_code == 200
        assert "ejected" in operator.run("nodes").stdout
        findings = diagnosed(stack)
        assert findings["model m"]["verdict"] != findings["configuration"]["verdict"]
        assert findings["model m"]["said"] == "0 of 1 nodes take requests, 0% of the capacity"
        assert "the breaker of a is open" in findings["nodes"]["said"]
        assert stack.status()["membership"]["models"][0]["state"] == "unavailable"


def test_a_node_that_envoy_has_not_been_rendered_with_is_named_until_it_is(engine):
    with Stack(config(a=engine.address)) as stack, EngineSim(model="m") as second:
        assert stack.status()["nodes_unknown_to_envoy"] == []
        stack.write(config(a=engine.address, b=second.address))
        missing = f"node b ({second.address}) of pool p"
        stack.eventually(lambda: stack.status()["nodes_unknown_to_envoy"] == [missing], "Envoy does not know it")
        found = diagnosed(stack)["nodes in Envoy"]
        assert found["said"] == f"Envoy does not know {missing}"
        assert "render envoy.yaml again" in found["change"]
        stack.envoy.terminate()
        stack.envoy.wait()
        stack.start_envoy()
        stack.eventually(lambda: stack.status()["nodes_unknown_to_envoy"] == [], "it does now")
        assert "said" in diagnosed(stack)["nodes in Envoy"]
        assert missing not in diagnosed(stack)["nodes in Envoy"]["said"]


def test_a_native_engine_that_accepts_requests_and_never_answers_is_ejected():
    health = {"probe": {"every_s": 0.2, "timeout_s": 0.5}, "open_s": 60}
    with EngineSim(model="m", api="ollama") as ollama:
        pool = {"model": "m", "engine": "ollama", "api": "native", "nodes": [node("a", ollama.address)]}
        with Stack({"pools": {"p": pool}, "tenants": [tenant("acme")], "health": health}) as stack:
            assert stack.chat().status_code == 200
            asked = {each["path"].partition("?")[0] for each in ollama.seen()[1]}
            assert asked == {"/api/chat"}, "probes and requests are in the engine's own words"
            ollama.fail("stall")
            operator = Operator(stack, "")
            stack.eventually(lambda: operator.get("/availability").status_code == 503, "its breaker opens")

"""An engine that is stuck behind an open port, found by probes while no client asks for anything; two replicas share one Redis."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, RedisServer, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineSim]]:
    sims = [EngineSim(model="m", decode_rate=2000.0) for _ in range(2)]
    try:
        yield [sim.start() for sim in sims]
    finally:
        for sim in sims:
            sim.stop()


@pytest.fixture(scope="module")
def replicas(engines) -> Iterator[tuple[Stack, Stack]]:
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node(f"n{at}", sim.address) for at, sim in enumerate(engines)]}},
        "tenants": [tenant("acme")],
        "health": {"probe": {"every_s": 1, "timeout_s": 1.5}, "open_s": 2, "trials": 2, "ramp": {"from": 0.5, "over_s": 1}},
        "envoy": {"health_check": False},
    }
    with contextlib.ExitStack() as exits:
        server = exits.enter_context(RedisServer())
        yield (exits.enter_context(Stack(config, server=server)), exits.enter_context(Stack(config, server=server)))


def health(stack: Stack, name: str) -> dict:
    (row,) = [row for row in stack.status()["membership"]["nodes"] if row["node"]["id"] == name]
    return row["health"] or {}


def test_one_replica_asks_both_know_and_a_stuck_engine_is_left_out_by_both(replicas, engines):
    for stack in replicas:
        stack.eventually(lambda stack=stack: all(health(stack, name).get("ttft_ms") for name in ("n0", "n1")), "times to first tokens")
    assert sum(stack.status()["breakers"]["probes"]["asked_here"] for stack in replicas) == 1
    replicas[0].eventually(lambda: (totals := engines[0].seen()[0])["completion_tokens"] == totals["completed"] > 0, "each costs one token")
    _, asked = engines[0].seen()
    assert {record["path"] for record in asked} == {"/v1/chat/completions"}
    engines[0].pause()
    try:
        for stack in replicas:
            stack.eventually(lambda stack=stack: health(stack, "n0")["state"] == "open", "n0 is left out")
            assert "no token within 1.5 s" in health(stack, "n0")["reason"]
            assert stack.chat().headers["x-din-node-id"] == "n1", "no client had to find out"
    finally:
        engines[0].resume()
    for stack in replicas:
        stack.eventually(lambda stack=stack: health(stack, "n0")["state"] == "closed", "n0 is back, by probes alone")


def test_when_the_replica_that_asks_goes_the_other_one_does(replicas, engines):
    first, second = sorted(replicas, key=lambda stack: not stack.status()["breakers"]["probes"]["asked_here"])
    first.sidecar.terminate()
    first.sidecar.wait(30)
    try:
        second.eventually(lambda: second.status()["breakers"]["probes"]["asked_here"], "the other asks")
        engines[0].forget()
        second.eventually(lambda: engines[0].seen()[0]["requests"] > 0, "it does ask")
        assert second.status()["breakers"]["probes"]["asked_here"]
    finally:
        first.start_sidecar()


NATIVE = {
    "ollama": ("ollama", "/v1/chat/completions", "/api/chat"),
    "tgi": ("tgi", "/v1/completions", "/generate_stream"),
    "triton": ("triton", "/v1/rerank", "/v2/models/m/infer"),
}


@pytest.fixture(scope="module")
def native() -> Iterator[tuple[Stack, dict[str, EngineSim]]]:
    runner = {"triton": "pooling"}
    sims = {name: EngineSim(model="m", api=api, runner=runner.get(name, "generate"), dimensions=8) for name, (api, _, _) in NATIVE.items()}
    with together(sims) as engines:
        pools = {
            name: {"model": name, "served_model": "m", "engine": name, "api": "native", "nodes": [node(name, engines[name].address)]}
            for name in NATIVE
        }
        for name, (_, operation, _) in NATIVE.items():
            pools[name]["operations"] = [operation]
        probe = {"every_s": 1, "timeout_s": 1.5}
        health = {"probe": probe, "open_s": 2, "trials": 2, "ramp": {"from": 0.5, "over_s": 1}}
        config = {"pools": pools, "tenants": [tenant("acme")], "health": health, "envoy": {"health_check": False}}
        with Stack(config) as stack:
            yield stack, engines


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_engine_is_probed_in_its_own_words_and_left_out_while_it_is_stuck(native, name):
    stack, engines = native
    engine = engines[name]
    stack.eventually(lambda: health(stack, name).get("ttft_ms"), "a probe that was answered")
    assert {record["path"] for record in engine.seen()[1] if record["method"] == "POST"} == {NATIVE[name][2]}
    assert stack.status()["breakers"]["nodes"].get(name, {}).get("state", "closed") == "closed"
    engine.pause()
    try:
        stack.eventually(lambda: health(stack, name).get("state") == "open", "its breaker opens, though no client has asked")
    finally:
        engine.resume()
    stack.eventually(lambda: health(stack, name).get("state") == "closed", "it is back, by probes alone")

"""An engine that is stuck behind an open port, found by probes while no client asks for anything; two replicas share one Redis."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, RedisServer
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

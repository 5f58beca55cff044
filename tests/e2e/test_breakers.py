"""Nodes that fail, through a real Envoy: left out by the sidecar, tried again, and what clients see meanwhile."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e

NAMES = ("a-1", "a-2", "b-1")


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    sims = {name: EngineSim(model=f"model-{name[0]}", decode_rate=2000.0, prefill_rate=1e6) for name in NAMES}
    with together(sims) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    def at(*names: str) -> list[dict]:
        return [node(name, engines[name].address) for name in names]

    config = {
        "aliases": {"m": {"model": "model-a"}},
        "pools": {
            "primary": {"model": "model-a", "engine": "vllm", "scheduler": "round_robin", "nodes": at("a-1", "a-2")},
            "light": {"model": "model-b", "engine": "vllm", "nodes": at("b-1")},
        },
        "rules": [{"id": "all", "when": "always", "pool": "primary", "fallback": "light"}],
        "tenants": [tenant("acme"), tenant("narrow", models=("m",))],
        "health": {"open_s": 1, "backoff_factor": 1, "trial_share": 0.25, "trials": 2, "ramp": {"from": 0.5, "over_s": 1}},
        "envoy": {
            "timeouts": {"connect_ms": 500, "node_idle_ms": 2000},
            "health_check": False,
            "outlier": {"max_ejection_percent": 0},  # what is left out here, the sidecar leaves out
        },
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(autouse=True)
def well(stack, engines):
    """Every test begins and ends with engines and breakers that are well."""
    yield
    for engine in engines.values():
        engine.fail("")
    stack.eventually(lambda: [stack.chat(tenant_name=name) for name in ("acme", "narrow")] and not breakers(stack), "all are closed")


def breakers(stack: Stack) -> dict[str, str]:
    """States that are not closed, by name of node or pool."""
    breaker_states = stack.status()["breakers"]
    return {name: each["state"] for kind in ("nodes", "pools") for name, each in breaker_states[kind].items()}


def until_open(stack: Stack, *names: str) -> list[int]:
    """Send until they are open. Returns what clients saw."""
    seen: list[int] = []

    def are_open() -> bool:
        if {name for name, state in breakers(stack).items() if state == "open"} >= set(names):
            return True
        number = len(seen)  # equal requests that no node answers count once, and one tenant's alone open half of a pool
        seen.append(stack.chat(tenant_name=("acme", "narrow")[number % 2], user=str(number)).status_code)
        return False

    stack.eventually(are_open, lambda: breakers(stack))
    return seen


def test_a_node_that_refuses_connections_is_left_out_and_clients_see_nothing_of_it(stack, engines):
    engines["a-1"].end()
    try:
        assert set(until_open(stack, "a-1")) <= {200}
        before = stack.envoy_stats("cluster.primary.light.upstream_rq_retry$")
        answers = [stack.chat() for _ in range(10)]
        assert {(reply.status_code, reply.headers["x-din-node-id"]) for reply in answers} == {(200, "a-2")}
        assert stack.envoy_stats("cluster.primary.light.upstream_rq_retry$") == before != {}, "nobody tries it any more"
    finally:
        engines["a-1"].start()


def test_it_is_tried_again_after_its_pause_and_comes_back(stack, engines):
    engines["a-1"].fail("unavailable")
    until_open(stack, "a-1")
    engines["a-1"].fail("")
    engines["a-1"].forget()
    stack.eventually(lambda: breakers(stack).get("a-1") == "half_open", "half open")
    first = [stack.chat().headers["x-din-node-id"] for _ in range(7)]
    assert first.count("a-1") <= 1, "a part of its half"
    seen: list[int] = []
    stack.eventually(lambda: seen.append(stack.chat().status_code) or not breakers(stack), "it is closed")
    assert set(seen) == {200}
    assert {stack.chat().headers["x-din-node-id"] for _ in range(4)} == {"a-1", "a-2"}


def test_a_pool_that_is_dead_answers_by_its_fallback_and_says_so(stack, engines):
    engines["a-1"].fail("reset")
    engines["a-2"].fail("reset")
    until_open(stack, "a-1", "a-2")
    reply = stack.chat()
    assert reply.status_code == 200
    assert reply.headers["x-bxagent-degraded"] == "true"
    assert reply.headers["x-din-degraded-reason"] in {"no_healthy_node", "breaker_open"}
    assert reply.headers["x-din-node-id"] == "b-1"
    assert reply.json()["model"] == "model-b"
    refused = stack.chat(tenant_name="narrow")
    assert refused.status_code == 503
    assert refused.json()["code"] == "no_healthy_node"
    assert int(refused.headers["retry-after"]) >= 1


def test_what_is_left_out_is_reported_wherever_one_asks(stack, engines, tmp_path):
    engines["a-1"].fail("unavailable")
    until_open(stack, "a-1")
    node_breaker = stack.status()["breakers"]["nodes"]["a-1"]
    assert (node_breaker["state"], node_breaker["share"]) == ("open", 0.0)
    assert "consecutive failures, the last: 503" in node_breaker["reason"]
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}))
    explained = CliRunner().invoke(app, ["explain", str(request), "--tenant", "acme", "--live", "-c", str(stack.config_file)])
    assert "a-1: left out: breaker open since" in explained.output, explained
    listed = CliRunner().invoke(app, ["nodes", "-c", str(stack.config_file), "--json"])
    (row,) = [row for row in json.loads(listed.output)["nodes"] if row["node"]["id"] == "a-1"]
    assert row["health"]["state"] == "open"


def test_a_client_s_short_deadline_does_not_count_against_the_node(stack, engines):
    for engine in engines.values():
        engine.fail("latency:ms=300")
    codes = {stack.chat(headers={"x-din-timeout-ms": "60"}).status_code for _ in range(12)}
    assert codes == {504}
    stack.all_accounted()
    assert breakers(stack) == {}


def test_client_errors_and_back_pressure_do_not_count_against_the_node(stack, engines):
    assert {stack.chat(temperature="hot").status_code for _ in range(12)} == {400}
    stack.all_accounted()
    assert breakers(stack) == {}
    engines["a-1"].fail("throttle")
    engines["a-2"].fail("throttle")
    stack.eventually(lambda: stack.chat().status_code == 200, "the fallback answers while both are busy")
    assert breakers(stack) == {"a-1": "cooling", "a-2": "cooling"}, "busy is not dead"


def test_busy_nodes_are_left_alone_for_as_long_as_they_ask_and_are_not_taken_for_dead(stack, engines):
    engines["a-1"].fail("throttle:count=1,retry_after_s=2")
    first = [stack.chat() for _ in range(2)]
    assert sorted(reply.status_code for reply in first) == [200, 429]
    busy = next(reply for reply in first if reply.status_code == 429)
    assert (busy.json()["code"], busy.headers["retry-after"]) == ("upstream_busy", "2")
    stack.eventually(lambda: breakers(stack) == {"a-1": "cooling"}, "it is left alone")
    assert {stack.chat().headers["x-din-node-id"] for _ in range(6)} == {"a-2"}
    engines["a-2"].fail("throttle:count=1,retry_after_s=9")
    assert stack.chat().status_code == 429
    stack.eventually(lambda: breakers(stack).get("a-2") == "cooling", "so is the other")
    for engine in engines.values():
        engine.forget()
    elsewhere = stack.chat()
    assert (elsewhere.status_code, elsewhere.headers.get("x-din-node-id"), elsewhere.headers["x-bxagent-degraded"]) == (200, "b-1", "true")
    nowhere = stack.chat(tenant_name="narrow")  # it may not use the fallback's model
    assert (nowhere.status_code, nowhere.json()["code"]) == (503, "no_healthy_node")
    assert 1 <= int(nowhere.headers["retry-after"]) <= 2
    assert engines["a-1"].seen()[0]["requests"] + engines["a-2"].seen()[0]["requests"] == 0, "nobody is asked in vain"
    stack.eventually(lambda: stack.chat().headers.get("x-din-node-id") == "a-1", "it has had its time, and gets everything at once")
    assert "a-1" not in breakers(stack)

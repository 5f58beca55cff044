"""What one replica finds out about a node, the others keep to as well: two gateways over one Redis."""

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.support.servers import EngineSim, RedisServer, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    sims = {name: EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) for name in ("a", "b")}
    with together(sims) as running:
        yield running


@pytest.fixture(scope="module")
def config(engines) -> dict[str, Any]:
    nodes = [node(name, sim.address) for name, sim in engines.items()]
    return {
        "pools": {"p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}},
        "tenants": [tenant("acme")],
        "health": {"probe": {"every_s": 3600}, "open_s": 60},
        "envoy": {"health_check": False},
    }


@pytest.fixture(scope="module")
def pair(config) -> Iterator[tuple[Stack, Stack]]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        yield stack.enter_context(Stack(config, server=redis)), stack.enter_context(Stack(config, server=redis))


def breaker(stack: Stack, name: str) -> dict:
    return stack.status()["breakers"]["nodes"].get(name, {})


def test_a_request_that_broke_two_nodes_at_one_replica_is_sent_to_no_node_by_any(pair, engines):
    one, two = pair
    for engine in engines.values():
        engine.fail("reset:containing=poison")
    try:
        first = one.chat(user="poison")
        assert (first.status_code, first.headers["x-should-retry"]) == (502, "false")
        assert {sum(b"poison" in each["body"] for each in engine.seen()[1]) for engine in engines.values()} == {1}
        for each in pair:
            each.eventually(lambda each=each: each.status()["breakers"]["stopped_requests"] == 1, "it is stopped")
        for engine in engines.values():
            engine.forget()
        again = two.chat(user="poison")
        assert (again.status_code, again.json()["code"], again.headers["x-should-retry"]) == (422, "request_breaks_nodes", "false")
        assert two.chat(user="sound").status_code == 200
        assert not any(b"poison" in each["body"] for engine in engines.values() for each in engine.seen()[1])
    finally:
        for engine in engines.values():
            engine.fail("")


def test_a_node_that_asks_one_replica_for_time_is_left_alone_by_all(pair, engines):
    one, two = pair
    engines["a"].fail("throttle:count=1,retry_after_s=20")
    while one.chat().status_code == 200:
        pass
    two.eventually(lambda: breaker(two, "a").get("state") == "cooling", "the other replica has it")
    assert breaker(two, "a")["again_in_s"] > 10, "for as long as it asked"
    assert {two.chat().headers["x-din-node-id"] for _ in range(6)} == {"b"}


def test_a_node_whose_breaker_opens_at_one_replica_is_left_alone_by_all(pair, engines):
    one, two = pair
    engines["b"].fail("reset")
    for number in range(12):
        one.chat(user=str(number))
        if breaker(one, "b"):
            break
    two.eventually(lambda: breaker(two, "b").get("state") == "open", "the other replica has it")
    assert "reported by" in breaker(two, "b")["reason"]


def test_a_breaker_that_is_switched_off_lets_go_of_what_is_open_at_once_at_every_replica(pair, engines, config):
    one, two = pair
    engines["b"].fail("reset")
    for number in count():
        if breaker(one, "b").get("state") == "open":
            break
        one.chat(user=str(number))
    two.eventually(lambda: breaker(two, "b").get("state") == "open", "the other replica has it")
    engines["b"].fail("")
    try:
        for each in pair:
            each.write({**config, "health": {**config["health"], "breaker": False}})
        for each in pair:
            each.eventually(lambda each=each: not any(each.status()["breakers"][kind] for kind in ("nodes", "pools")), "all are let go")
            assert {each.chat().headers["x-din-node-id"] for _ in range(6)} == {"a", "b"}
    finally:
        for each in pair:
            each.write(config)

"""Requests that break the connections of the nodes that get them, beside connections that broke for another reason."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e

POOL = ("a", "b", "c")
AT_ONCE, REQUESTS = 40, 200


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6) for name in (*POOL, "spare")}) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    def pool(model: str, *names: str) -> dict:
        nodes = [node(f"{model}-{name}", engines[name].address) for name in names]
        return {"model": model, "served_model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}

    config = {
        "pools": {"stays": pool("stays", *POOL), "moves": pool("moves", *POOL), "spare": pool("spare", "spare")},
        "rules": [{"id": "moves", "when": {"model": "moves"}, "pool": "moves", "fallback": "spare"}],
        "tenants": [tenant("acme")],
        "health": {"breaker": False},
        "envoy": {"health_check": False, "retry": {"attempts": 2}, "outlier": {"consecutive_connect_failures": 1000}},
    }
    with Stack(config) as running:
        yield running


def ask(stack: Stack, model: str, number: int):
    return stack.chat(model=model, messages=[{"role": "user", "content": f"hello {number}"}], max_tokens=1)


def ask_at_once(stack: Stack, model: str, count: int) -> list:
    with ThreadPoolExecutor(AT_ONCE) as clients:
        return list(clients.map(lambda number: ask(stack, model, number), range(count)))


@contextlib.contextmanager
def stopped(stack: Stack) -> Iterator[None]:
    """Envoy sees what happens meanwhile all at once."""
    assert stack.envoy is not None
    os.kill(stack.envoy.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stack.envoy.pid, signal.SIGCONT)


@pytest.mark.parametrize("idle", [True, False], ids=["on idle connections", "on new connections"])
@pytest.mark.parametrize("model", ["stays", "moves"])
def test_a_request_that_breaks_connections_is_tried_at_two_nodes_at_most(stack, engines, model, idle):
    """`retry.attempts` allows three, and a fallback pool a fourth."""
    if idle:
        assert {reply.status_code for reply in ask_at_once(stack, model, AT_ONCE)} == {200}
    else:
        for name in POOL:
            engines[name].end()
            engines[name].start()
    for engine in engines.values():
        engine.forget()
        engine.fail("reset:containing=poison")
    poison = {"model": model, "user": f"poison {model} {idle}"}
    reply = stack.chat(**poison)
    assert (reply.status_code, reply.json()["code"], reply.headers["x-should-retry"]) == (502, "upstream_error", "false")
    assert sorted(engine.seen()[0]["requests"] for engine in engines.values()) == [0, 0, 1, 1]
    stack.eventually(lambda: stack.chat(**poison).status_code == 422, "its next tries are stopped")
    for engine in engines.values():
        engine.forget()
    again = stack.chat(**poison)
    assert (again.json()["code"], again.headers["x-should-retry"]) == ("request_breaks_nodes", "false")
    assert [engine.seen()[0]["requests"] for engine in engines.values()] == [0, 0, 0, 0]
    assert ask(stack, model, 0).status_code == 200, "other requests are served by all"


def test_a_request_that_ends_the_processes_of_nodes_ends_two_at_most(stack, engines):
    def ended() -> int:
        return sum(engine.process.poll() is not None for engine in engines.values())

    def stopped_requests() -> int:
        return stack.status()["breakers"]["stopped_requests"]

    for engine in engines.values():
        engine.fail("exit:containing=poison")
    try:
        before, poison = stopped_requests(), {"model": "moves", "user": "poison that ends processes"}
        reply = stack.chat(**poison)
        assert (reply.status_code, reply.headers["x-should-retry"]) == (502, "false")
        stack.eventually(lambda: stopped_requests() > before, "it is stopped")
        assert stack.chat(**poison).status_code == 422
        stack.eventually(lambda: ended() >= 2, "two have ended")
        assert ended() == 2
        assert ask(stack, "moves", 0).status_code == 200
    finally:
        for engine in engines.values():
            engine.end()
            engine.start()


def test_a_request_that_nodes_answer_with_an_error_moves_on_past_two_of_them(stack, engines):
    for name in POOL:
        engines[name].forget()
        engines[name].fail("unavailable")
    engines["spare"].forget()
    engines["spare"].fail("")
    assert stack.chat(model="moves", user="busy").headers["x-din-node-id"] == "spare-spare"
    assert [engines[name].seen()[0]["requests"] for name in (*POOL, "spare")] == [1, 1, 1, 1], "each of them answered"


def test_idle_connections_of_nodes_that_died_cost_no_client_an_error(stack, engines):
    for engine in engines.values():
        engine.fail("")
    assert {reply.status_code for reply in ask_at_once(stack, "moves", AT_ONCE)} == {200}
    with ThreadPoolExecutor(AT_ONCE) as clients:
        with stopped(stack):
            replies = [clients.submit(ask, stack, "moves", number) for number in range(REQUESTS)]
            for name in POOL:
                engines[name].end()
        answered = [reply.result() for reply in replies]
    assert {(reply.status_code, reply.headers["x-din-node-id"]) for reply in answered} == {(200, "spare-spare")}

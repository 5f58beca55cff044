"""Requests that move to the rule's other pool in flight: their own pool's nodes fail after they were sent."""

from collections.abc import Iterator

import pytest

from din_extproc.domain.request import Operation
from din_extproc.tools.verify.sample_body import build_body, content_type
from tests.e2e.test_node_errors import Parrot
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e

OPTIONS = {"decode_rate": 40.0, "batch_slowdown": 0.0, "prefill_rate": 1e6, "max_num_seqs": 256, "kv_tokens": 10_000_000}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    names = {"big-1": "big", "big-2": "big", "lone": "lone", "small": "small", "tiny": "tiny"}
    sims = {name: EngineSim(model=model, served_model=(f"{model}-served",), **OPTIONS) for name, model in names.items()}
    with together(sims) as running:
        yield running


def pool(engines, model: str, *names: str, **fields) -> dict:
    nodes = [node(name, engines[name].address, **fields) for name in names]
    return {"model": model, "served_model": f"{model}-served", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}


@pytest.fixture(scope="module")
def liar() -> Iterator[Parrot]:
    """A node whose answers say what only the gateway may say."""
    with Parrot() as bird:
        forged = {"x_bxagent_degraded": "true", "x_din_degraded_reason": "lie", "x_din_node_id": "lie", "set_cookie": "a=b"}
        bird.answers(200, b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}', content_type="application/json", **forged)
        yield bird


@pytest.fixture(scope="module")
def stack(engines, liar) -> Iterator[Stack]:
    config = {
        "pools": {
            "big": pool(engines, "big", "big-1", "big-2"),
            "lone": pool(engines, "lone", "lone"),
            "small": pool(engines, "small", "small"),
            "tiny": pool(engines, "tiny", "tiny", max_seq_len=64),
            "lies": {"model": "lies", "engine": "vllm", "nodes": [node("liar", liar.address)]},
        },
        "rules": [
            {"id": "short", "when": {"header": {"x-task-tier": "tiny"}}, "pool": "big", "fallback": "tiny"},
            {"id": "big", "when": {"model": "big"}, "pool": "big", "fallback": "small"},
            {"id": "lone", "when": {"model": "lone"}, "pool": "lone", "fallback": "small"},
            {"id": "lies", "when": {"model": "lies"}, "pool": "lies", "fallback": "small"},
        ],
        "tenants": [tenant("acme", max_streams=150), tenant("narrow", models=("big",))],
        "health": {"breaker": False},
        "envoy": {
            "health_check": False,
            "timeouts": {"connect_ms": 500, "node_idle_ms": 3000},
            "outlier": {"consecutive_connect_failures": 1000},
        },
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(autouse=True)
def well(engines) -> Iterator[None]:
    for engine in engines.values():
        engine.forget()
    yield
    for engine in engines.values():
        engine.fail("")


def fail(engines, fault: str, *names: str) -> None:
    for name in names:
        engines[name].fail(fault)


@pytest.mark.parametrize("fault", ["unavailable", "stall"])
def test_a_request_that_its_pool_can_t_answer_moves_to_the_fallback_in_flight(stack, engines, fault):
    fail(engines, fault, "big-1", "big-2")
    streams = fault == "stall"  # a whole answer is waited for
    reply = stack.chat(model="big", user="é\u2028 model", metadata={"model": "big-served"}, stream=streams)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-din-node-id"] == "small"
    assert reply.headers["x-bxagent-degraded"] == "true"
    assert reply.headers["x-din-degraded-reason"] == "upstream_failed"
    assert (events(reply.text)[0] if streams else reply.json())["model"] == "small-served"
    tried = [engines[name].seen()[0]["requests"] for name in ("big-1", "big-2", "small")]
    assert tried == [1, 1, 1], "one quick retry on the other node, then the other pool"
    (first,) = engines["big-1"].seen()[1]
    (moved,) = engines["small"].seen()[1]
    assert moved["body"] == first["body"].replace(b'"model":"big-served"', b'"model":"small-served"', 1)


def test_a_request_that_breaks_both_nodes_of_its_pool_goes_to_no_third_one(stack, engines):
    fail(engines, "reset", "big-1", "big-2")
    reply = stack.chat(model="big", user="poison")
    assert (reply.status_code, reply.json()["code"], reply.headers["x-should-retry"]) == (502, "upstream_error", "false")
    assert [engines[name].seen()[0]["requests"] for name in ("big-1", "big-2", "small")] == [1, 1, 0]
    stack.eventually(lambda: stack.chat(model="big", user="poison").status_code == 422, "its next tries are stopped")
    assert engines["small"].seen()[0]["requests"] == 0
    for name in ("big-1", "big-2"):
        engines[name].end()
    try:
        assert stack.chat(model="big", user="sound").headers["x-din-node-id"] == "small", "what broke at no node moves"
    finally:
        for name in ("big-1", "big-2"):
            engines[name].start()


def test_a_form_moves_to_the_fallback_in_flight_with_the_other_model_s_name(stack, engines):
    fail(engines, "unavailable", "big-1", "big-2")
    operation = Operation.TRANSCRIPTIONS
    with stack.client() as client:
        body = build_body(operation, "big", 3)
        reply = client.post(operation.value, content=body, headers={"content-type": content_type(operation)})
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-din-node-id"], reply.headers["x-bxagent-degraded"]) == ("small", "true")
    (moved,) = engines["small"].seen()[1]
    assert moved["body"] == build_body(operation, "small-served", 3)


def test_the_nodes_of_a_rule_whose_requests_can_move_are_chosen_by_the_scheduler(stack, engines):
    before = stack.envoy_stats("cluster.big.small.upstream_rq_completed")
    names = [stack.chat(model="big").headers["x-din-node-id"] for _ in range(12)]
    assert names[:2] in (["big-1", "big-2"], ["big-2", "big-1"])
    assert names == names[:2] * 6, "in turn, every one"
    after = stack.envoy_stats("cluster.big.small.upstream_rq_completed")
    assert sum(after.values()) - sum(before.values()) == 12, "they went where requests can move"
    fail(engines, "unavailable", "big-1", "big-2")
    assert {stack.chat(model="big").headers["x-din-node-id"] for _ in range(3)} == {"small"}


def test_a_pool_of_one_node_gives_up_after_it_has_been_asked_twice(stack, engines):
    fail(engines, "unavailable", "lone")
    reply = stack.chat(model="lone")
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "small")
    assert engines["lone"].seen()[0]["requests"] == 2
    assert engines["small"].seen()[0]["requests"] == 1


def test_what_its_own_pool_answers_is_not_marked(stack, engines):
    reply = stack.chat(model="big")
    assert reply.headers["x-din-node-id"] in {"big-1", "big-2"}
    assert "x-bxagent-degraded" not in reply.headers
    fail(engines, "unavailable", "big-1")
    replies = [stack.chat(model="big") for _ in range(4)]
    assert {each.headers["x-din-node-id"] for each in replies} == {"big-2"}
    assert not any("x-bxagent-degraded" in each.headers for each in replies)


def test_a_node_can_not_say_that_its_answer_is_another_pool_s(stack):
    reply = stack.chat(model="lies")
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "liar")
    assert not {"x-bxagent-degraded", "x-din-degraded-reason", "set-cookie"} & set(reply.headers)


def test_a_request_does_not_move_where_it_does_not_fit(stack, engines):
    fail(engines, "unavailable", "big-1", "big-2")
    short = {"headers": {"x-task-tier": "tiny"}, "model": "big"}
    assert stack.chat(**short).headers["x-din-node-id"] == "tiny"
    long = stack.chat(**short, messages=[{"role": "user", "content": "word " * 400}])
    assert long.status_code == 503, long.text
    assert long.json()["error"]["code"] != "context_length_exceeded"
    assert engines["tiny"].seen()[0]["requests"] == 1


def test_a_tenant_s_request_does_not_move_to_a_model_that_it_may_not_use(stack, engines):
    fail(engines, "unavailable", "big-1", "big-2")
    reply = stack.chat(model="big", tenant_name="narrow")
    assert reply.status_code == 503
    assert engines["small"].seen()[0]["requests"] == 0


def test_a_stream_moves_whole_and_its_usage_is_the_fallback_s(stack, engines):
    fail(engines, "unavailable", "big-1", "big-2")
    with stack.client() as client:
        reply = client.post(
            "/v1/chat/completions",
            json={"model": "big", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        )
    assert reply.headers["x-bxagent-degraded"] == "true"
    chunks = events(reply.text)
    assert {chunk["model"] for chunk in chunks} == {"small-served"}
    assert not any(chunk.get("usage") for chunk in chunks), "it was asked for by the gateway, not by the client"
    assert engines["small"].seen()[0]["completion_tokens"] == 5

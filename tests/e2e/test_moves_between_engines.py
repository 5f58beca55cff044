"""Requests that move in flight to a pool of another engine: translated for every attempt that needs it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e

OPTIONS = {"decode_rate": 2000.0, "batch_slowdown": 0.0, "prefill_rate": 1e6, "max_num_seqs": 256}
APIS = {"fast-1": "vllm", "fast-2": "vllm", "spare": "vllm", "local": "ollama", "old": "tgi"}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model=name.split("-", maxsplit=1)[0], api=api, **OPTIONS) for name, api in APIS.items()}) as running:
        yield running


def pool(engines, engine: str, *names: str, **fields) -> dict:
    nodes = [node(name, engines[name].address) for name in names]
    return {"model": names[0].split("-", maxsplit=1)[0], "engine": engine, "scheduler": "round_robin", "nodes": nodes, **fields}


def config(engines) -> dict:
    return {
        "pools": {
            "fast": pool(engines, "vllm", "fast-1", "fast-2", timeouts={"first_byte_s": 1}),
            "local": pool(engines, "ollama", "local", api="native"),
            "old": pool(engines, "tgi", "old", api="native", unmappable="drop"),
            "spare": pool(engines, "vllm", "spare"),
        },
        "rules": [
            {"id": "lenient", "when": {"header": {"x-task-tier": "lenient"}}, "pool": "fast", "fallback": "old"},
            {"id": "fast", "when": {"model": "fast"}, "pool": "fast", "fallback": "local"},
            {"id": "local", "when": {"model": "local"}, "pool": "local", "fallback": "spare"},
            {"id": "old", "when": {"model": "old"}, "pool": "old", "fallback": "local"},
        ],
        "tenants": [tenant("acme")],
        "health": {"breaker": False},
        "envoy": {"health_check": False, "outlier": {"consecutive_connect_failures": 1000}},
    }


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    with Stack(config(engines)) as running:
        yield running


@pytest.fixture(autouse=True)
def well(engines) -> Iterator[None]:
    for engine in engines.values():
        engine.forget()
    yield
    for engine in engines.values():
        engine.fail("")


def fail(engines, *names: str, fault: str = "unavailable") -> None:
    for name in names:
        engines[name].fail(fault)


def moved(reply) -> None:
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-bxagent-degraded"], reply.headers["x-din-degraded-reason"]) == ("true", "upstream_failed")


def test_a_chat_moves_from_openai_s_interface_to_a_native_one(stack, engines):
    fail(engines, "fast-1", "fast-2")
    reply = stack.chat(model="fast", max_tokens=5)
    moved(reply)
    assert reply.headers["x-din-node-id"] == "local"
    assert (reply.json()["object"], reply.json()["usage"]["completion_tokens"]) == ("chat.completion", 5)
    [asked] = engines["local"].seen()[1]
    assert asked["path"] == "/api/chat"
    assert [engines[name].seen()[0]["requests"] for name in ("fast-1", "fast-2")] == [1, 1]


def test_a_stream_moves_from_openai_s_interface_to_a_native_one(stack, engines):
    fail(engines, "fast-1", "fast-2")
    reply = stack.chat(model="fast", max_tokens=5, stream=True)
    moved(reply)
    chunks = events(reply.text)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert not any(chunk.get("usage") for chunk in chunks), "the client did not ask for it"


def test_a_stream_of_stuck_nodes_moves_when_the_limit_of_its_first_byte_has_passed(stack, engines):
    fail(engines, "fast-1", "fast-2", fault="stall")
    reply = stack.chat(model="fast", max_tokens=3, stream=True)
    moved(reply)
    assert reply.headers["x-din-node-id"] == "local"
    assert float(reply.headers["x-din-exec-time-ms"]) < 1000, "the time is that of the node that answered, not of the attempts before"


def test_a_parameter_that_the_first_engine_renames_reaches_the_other_one_as_the_client_wrote_it(stack, engines):
    fail(engines, "fast-1", "fast-2")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    reply = stack.chat(model="fast", guided_json=schema)
    moved(reply)
    [asked] = engines["local"].seen()[1]
    assert b'"format":{"type":"object"' in asked["body"]


def test_the_first_engine_still_gets_its_own_words_for_such_a_request(stack, engines):
    reply = stack.chat(model="fast", guided_choice=["a", "b"])
    assert (reply.status_code, reply.headers["x-din-node-id"][:4]) == (200, "fast")
    [asked] = [*engines["fast-1"].seen()[1], *engines["fast-2"].seen()[1]]
    assert b'"structured_outputs":{"choice":["a","b"]}' in asked["body"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_moves_from_a_native_interface_to_openai_s(stack, engines, stream):
    well = stack.chat(model="local", max_tokens=5, stream=stream)
    assert (well.status_code, well.headers["x-din-node-id"]) == (200, "local"), well.text
    assert "x-bxagent-degraded" not in well.headers
    fail(engines, "local")
    reply = stack.chat(model="local", max_tokens=5, stream=stream)
    moved(reply)
    assert reply.headers["x-din-node-id"] == "spare"
    chunks = events(reply.text) if stream else [reply.json()]
    assert {chunk["model"] for chunk in chunks} == {"spare"}
    assert not stream or not any(chunk.get("usage") for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_moves_between_two_native_interfaces(stack, engines, stream):
    fail(engines, "old")
    reply = stack.chat(model="old", max_tokens=5, stream=stream)
    moved(reply)
    assert reply.headers["x-din-node-id"] == "local"
    assert engines["old"].seen()[0]["requests"] == 2


def test_a_large_body_moves_whole(stack, engines):
    fail(engines, "fast-1", "fast-2")
    text = "word " * 500 + "x" * (3 << 20)
    reply = stack.chat(model="fast", max_tokens=2, messages=[{"role": "user", "content": "hi"}], metadata={"note": text})
    moved(reply)
    assert engines["local"].seen()[0]["requests"] == 1


def test_a_request_that_breaks_both_nodes_of_its_pool_is_not_translated_for_a_third_one(stack, engines):
    fail(engines, "fast-1", "fast-2", fault="reset")
    reply = stack.chat(model="fast", user="poison")
    assert (reply.status_code, reply.headers["x-should-retry"]) == (502, "false"), reply.text
    assert [engines[name].seen()[0]["requests"] for name in ("fast-1", "fast-2", "local")] == [1, 1, 0]


def test_a_moved_request_is_settled_for_the_pool_that_answered(stack, engines):
    before = stack.all_accounted()["counts"]
    fail(engines, "fast-1", "fast-2")
    reply = stack.chat(model="fast", max_tokens=5)
    moved(reply)
    after = stack.all_accounted()["counts"]
    assert after["outcomes"]["completed"] == before["outcomes"].get("completed", 0) + 1
    url = f"{stack.admin_url}/exchanges?trace={reply.headers['x-din-trace-id']}"
    [record] = httpx.get(url).json()["exchanges"]
    assert (record["pool"], record["node_id"], record["completion_tokens"]) == ("local", "local", 5), record


def test_a_request_that_the_other_engine_can_not_take_fails_as_its_own_pool_did(stack, engines):
    fail(engines, "fast-1", "fast-2")
    reply = stack.chat(model="fast", logit_bias={"5": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_error"), reply.text
    assert "logit_bias" in reply.json()["error"]["message"]
    assert engines["local"].seen()[0]["requests"] == 0
    assert stack.chat(model="fast").status_code == 200


def test_the_answer_names_the_parameters_that_the_other_engine_did_not_get(stack, engines):
    fail(engines, "fast-1", "fast-2")
    reply = stack.chat(model="fast", headers={"x-task-tier": "lenient"}, logit_bias={"5": 1})
    moved(reply)
    assert (reply.headers["x-din-node-id"], reply.headers["x-din-dropped-parameters"]) == ("old", "logit_bias")
    assert "x-din-attempt-pool" not in reply.headers
    assert "x-din-dropped-parameters" not in stack.chat(model="fast", headers={"x-task-tier": "lenient"}).headers


def test_requests_move_between_clusters_that_come_by_discovery(engines):
    with Stack(config(engines), gateway={"xds": {"address": f"127.0.0.1:{free_port()}"}}) as stack:
        stack.eventually(lambda: stack.chat(model="fast").status_code == 200, "Envoy has it all")
        fail(engines, "fast-1", "fast-2")
        reply = stack.chat(model="fast", stream=True, max_tokens=3)
    moved(reply)
    assert (reply.headers["x-din-node-id"], events(reply.text)[0]["object"]) == ("local", "chat.completion.chunk")


def test_no_client_sees_an_error_when_the_pool_is_killed(stack, engines):
    for name in ("fast-1", "fast-2"):
        engines[name].end()
    try:
        replies = [stack.chat(model="fast", max_tokens=3, stream=bool(turn % 2)) for turn in range(10)]
    finally:
        for name in ("fast-1", "fast-2"):
            engines[name].start()
    assert [reply.status_code for reply in replies] == [200] * 10
    assert {reply.headers["x-din-node-id"] for reply in replies} == {"local"}


def test_an_attempt_can_not_be_forged_by_a_client(stack, engines):
    headers = {"x-din-attempt-pool": "local", "x-din-attempt-plan": "every standard /v1/chat/completions fast", "authorization": "none"}
    reply = stack.chat(model="fast", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")

"""The main job through a real Envoy, a real Redis and modelled engines: routing, admission, node choice, accounting."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, events, key_of, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    options = {"max_model_len": 32768, "decode_rate": 2000.0, "prefill_rate": 1e6, "max_num_seqs": 256, "kv_tokens": 10_000_000}
    names = {"fast-a": "physical-fast", "fast-b": "physical-fast", "long": "physical-fast", "deep": "physical-deep"}
    sims = {name: EngineSim(model=model, auto_tool_choice=True, **options) for name, model in names.items()}
    sims["embed"] = EngineSim(model="embedder", runner="pooling", dimensions=32)
    with together(sims) as running:
        yield running


def config(engines: dict[str, EngineSim], **sections) -> dict:
    def at(name: str, **fields) -> dict:
        return node(name, engines[name].address, **fields)

    return {
        "aliases": {
            "m": {"model": "physical-fast"},
            "auto": {"models": ["physical-fast", "physical-deep"]},
        },
        "pools": {
            "fast": {"model": "physical-fast", "engine": "vllm", "scheduler": "round_robin", "nodes": [at("fast-a"), at("fast-b")]},
            "long": {"model": "physical-fast", "engine": "vllm", "nodes": [at("long", max_seq_len=32768, version="2025.4.0")]},
            "deep": {"model": "physical-deep", "engine": "vllm", "nodes": [at("deep")]},
            "embed": {"model": "embedder", "engine": "vllm", "nodes": [at("embed")]},
        },
        "rules": [
            {"id": "vectors", "when": {"path": ["/v1/embeddings", "/v1/rerank"]}, "pool": "embed"},
            {"id": "long", "when": {"estimated_tokens": {"gt": 16000}}, "pool": "long"},
            {"id": "light", "when": {"header": {"x-task-tier": "extraction"}}, "pool": "fast", "fallback": "deep"},
            {"id": "rest", "when": "always", "pool": "deep"},
        ],
        "tenants": [
            tenant("acme"),
            tenant("trial", rpm=3, tpm=5000, max_streams=2),
            tenant("other", models=("physical-deep",)),
        ],
        **sections,
    }


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    with Stack(config(engines)) as running:
        yield running


def openai_error(reply: httpx.Response, status: int, code: str) -> dict:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body["code"] == body["error"]["code"] == code
    assert body["status"] == status
    assert body["trace_id"] == reply.headers["x-din-trace-id"]
    assert reply.headers["content-type"] == "application/json"
    return body


def test_an_answer_names_the_node_the_version_the_time_and_the_trace(stack):
    reply = stack.chat(headers={"x-din-trace-id": "client-trace-0001"})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-din-node-id"] in {"fast-a", "fast-b"}
    assert reply.headers["x-din-model-version"] == "2025.3.1"
    assert float(reply.headers["x-din-exec-time-ms"]) >= 0
    assert reply.headers["x-din-trace-id"] == "client-trace-0001"
    made = stack.chat().headers["x-din-trace-id"]
    assert len(made) == 32
    assert made != stack.chat().headers["x-din-trace-id"]


def test_a_client_s_patience_becomes_envoy_s_timeout_in_a_header_that_the_node_does_not_see(stack, engines):
    late = stack.chat(headers={"x-din-timeout-ms": "5"}, max_tokens=600)
    openai_error(late, 504, "upstream_timeout")
    for sim in engines.values():
        sim.forget()
    assert stack.chat(headers={"x-din-timeout-ms": "30000"}, max_tokens=3).status_code == 200
    (seen,) = [request for sim in engines.values() for request in sim.seen()[1]]
    assert "rq-timeout" not in str(seen["headers"]).lower()


def test_the_node_gets_the_physical_name_and_every_other_byte_as_sent(stack, engines):
    body = (
        b'{ "model" : "m","temperature":0.10, "seed":9007199254740993,"x_vendor":{"a":[1, 2]},'
        b'"messages":[{"role":"user","content":"caf\\u00e9 \xe4\xbd\xa0"}],"max_tokens":3}'
    )
    for sim in engines.values():
        sim.forget()
    with stack.client() as client:
        reply = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    seen = engines[reply.headers["x-din-node-id"]].seen()[1][-1]
    assert seen["body"] == body.replace(b'"model" : "m"', b'"model" : "physical-fast"')
    sent = (
        {name.lower(): value for name, value in seen["headers"].items()}
        if isinstance(seen["headers"], dict)
        else {k.lower(): v for k, v in seen["headers"]}
    )
    assert sent["x-din-trace-id"] == reply.headers["x-din-trace-id"]
    assert not {"authorization", "x-api-key", "x-din-cluster", "x-din-endpoint"} & sent.keys()


def test_a_long_request_and_an_extraction_task_land_in_different_pools(stack):
    long = stack.chat(model="auto", messages=[{"role": "user", "content": "word " * 18_000}])
    assert long.headers["x-din-node-id"] == "long", long.text
    light = stack.chat(model="auto", headers={"x-task-tier": "extraction"})
    assert light.headers["x-din-node-id"] in {"fast-a", "fast-b"}
    rest = stack.chat(model="auto")
    assert rest.headers["x-din-node-id"] == "deep"


def test_embeddings_take_the_fast_path(stack):
    with stack.client() as client:
        reply = client.post("/v1/embeddings", json={"model": "embedder", "input": ["a", "b"]})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-din-node-id"] == "embed"
    assert len(reply.json()["data"]) == 2


def test_refusals_have_one_shape_and_the_right_code(stack):
    openai_error(stack.chat(model="nobody-has-this"), 404, "model_not_found")
    openai_error(stack.chat(tenant_name="other"), 403, "model_not_allowed")
    openai_error(stack.chat(headers={"x-din-model-version": ">=2030"}), 409, "version_mismatch")
    openai_error(stack.chat(headers={"x-din-model-version": "not a version!"}), 400, "invalid_request")
    openai_error(stack.chat(max_tokens=40_000), 400, "context_length_exceeded")
    with stack.client(None) as client:
        wrong = client.post("/v1/chat/completions", json={}, headers={"authorization": "Bearer din_acme_wrong-SECRET-text"})
        body = openai_error(wrong, 401, "invalid_api_key")
        assert "SECRET" not in json.dumps(body)
        openai_error(client.post("/v1/chat/completions", json={}), 401, "invalid_api_key")


def test_problem_json_is_called_so_when_the_client_asks_for_it(stack):
    reply = stack.chat(model="nobody-has-this", headers={"accept": "application/problem+json"})
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["title"]


def test_a_version_constraint_chooses_the_node(stack):
    assert stack.chat(headers={"x-din-model-version": ">=2025.4"}).headers["x-din-node-id"] == "long"
    assert stack.chat(headers={"x-din-model-version": "2025.03.1"}).headers["x-din-node-id"] in {"fast-a", "fast-b"}


def test_models_are_listed_as_the_tenant_may_use_them(stack):
    with stack.client() as client:
        listed = {model["id"] for model in client.get("/v1/models").json()["data"]}
        assert {"m", "auto", "physical-fast", "physical-deep", "embedder"} == listed
        assert client.get("/v1/models/m").json()["alias_for"] == ["physical-fast"]
        assert client.get("/v1/models/missing").status_code == 404
    with stack.client("other") as client:
        assert {model["id"] for model in client.get("/v1/models").json()["data"]} == {"auto", "physical-deep"}


@pytest.fixture
def limited(engines) -> Iterator[Stack]:
    with Stack(config(engines)) as running:
        yield running


def test_requests_per_minute_are_limited_with_the_headers_that_clients_know(limited):
    for left in (2, 1, 0):
        reply = limited.chat(tenant_name="trial")
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ratelimit-limit-requests"] == "3"
        assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
        assert reply.headers["x-ratelimit-limit-tokens"] == "5000"
        assert 0 < int(reply.headers["x-ratelimit-remaining-tokens"]) < 5000
    refused = limited.chat(tenant_name="trial")
    openai_error(refused, 429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_per_minute_are_limited_and_a_prompt_that_never_fits_is_reported(limited):
    assert limited.chat(tenant_name="trial", max_tokens=4900).status_code == 200
    limited.settled(1)
    assert limited.chat(tenant_name="trial", max_tokens=3000).status_code == 200, "what was not used came back"
    never = limited.chat(tenant_name="trial", messages=[{"role": "user", "content": "word " * 7000}], max_tokens=1)
    body = openai_error(never, 400, "request_exceeds_limit")
    assert "retry-after" not in never.headers
    assert never.headers["x-should-retry"] == "false"
    assert "5000" in body["error"]["message"]


def test_streams_at_once_are_limited_and_a_place_is_free_when_one_ends(limited, engines):
    for name in ("fast-a", "fast-b", "deep"):
        engines[name].fail("latency:ms=1500")
    try:

        async def three() -> list[httpx.Response]:
            headers = {"authorization": f"Bearer {key_of('trial')}"}
            async with httpx.AsyncClient(base_url=limited.url, headers=headers, timeout=30) as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                return list(await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(3))))

        replies = asyncio.run(three())
    finally:
        for name in ("fast-a", "fast-b", "deep"):
            engines[name].fail("")
    assert sorted(reply.status_code for reply in replies) == [200, 200, 429]
    refused = next(reply for reply in replies if reply.status_code == 429)
    openai_error(refused, 429, "concurrency_limit_exceeded")
    limited.settled(2)
    assert limited.chat(tenant_name="trial").status_code == 200


def test_a_dead_node_is_passed_over_and_the_headers_name_who_answered(engines):
    spare = EngineSim(model="physical-fast")
    with spare:
        own = {**engines, "fast-a": spare}
        with Stack(config(own)) as running:
            assert {running.chat().headers["x-din-node-id"] for _ in range(4)} == {"fast-a", "fast-b"}
            spare.end()
            replies = [running.chat() for _ in range(6)]
            assert [reply.status_code for reply in replies] == [200] * 6, [reply.text for reply in replies]
            assert {reply.headers["x-din-node-id"] for reply in replies} == {"fast-b"}


def test_two_hundred_streams_at_once_release_every_slot_and_settle_to_the_token(engines):
    sims = [engines["fast-a"], engines["fast-b"]]
    for sim in sims:
        sim.forget()
    with Stack(config(engines)) as running:

        async def all_of_them() -> list[httpx.Response]:
            headers = {"authorization": f"Bearer {key_of('acme')}"}
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60, limits=limits) as client:

                async def one(number: int) -> httpx.Response:
                    body = {
                        "model": "m",
                        "stream": True,
                        "max_tokens": 5 + number % 30,
                        "messages": [{"role": "user", "content": f"number {number} " * (1 + number % 7)}],
                    }
                    return await client.post("/v1/chat/completions", json=body)

                return list(await asyncio.gather(*(one(number) for number in range(200))))

        replies = asyncio.run(all_of_them())
        assert {reply.status_code for reply in replies} == {200}
        assert all("usage" not in event or event["usage"] is None for reply in replies for event in events(reply.text))
        status = running.settled(200)
        totals = [sim.seen()[0] for sim in sims]
        assert status["counts"]["outcomes"] == {"completed": 200}
        assert status["counts"]["prompt_tokens"] == sum(each["prompt_tokens"] for each in totals)
        assert status["counts"]["completion_tokens"] == sum(each["completion_tokens"] for each in totals)
        assert status["exchanges"] == {"open": 0, "unsettled": 0, "given_up": 0, "unknown": 0}
        assert running.redis_keys(":lease:") == []
        assert all(node["tokens_in_use"] == 0 for node in status["nodes"].values())

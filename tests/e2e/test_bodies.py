"""Request bodies of every size, encoding and spelling, through the whole gateway: what the node gets and what the client hears."""

import gzip
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
MIB = 1 << 20
CAP = 5 * MIB
JSON = {"content-type": "application/json"}
ALIASES = {"longer-than-the-physical-name": "engine-m", "m": "engine-m", "fits-in2": "engine-m"}
"""One that is longer, one that is shorter and one that is as long as the physical name."""


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="engine-m", decode_rate=5000.0, prefill_rate=1e8, max_model_len=10_000_000, kv_tokens=10**9) as server:
        yield server


@pytest.fixture(scope="module")
def stack(sim) -> Iterator[Stack]:
    config = {
        "aliases": {alias: {"model": model} for alias, model in ALIASES.items()},
        "pools": {"pool": {"model": "engine-m", "engine": "vllm", "nodes": [node("sim", sim.address, max_seq_len=10_000_000)]}},
        "rules": [{"id": "all", "when": "always", "pool": "pool"}],
        "tenants": [tenant("acme")],
        "envoy": {"body_limit_mib": CAP // MIB},
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack) -> Iterator[httpx.Client]:
    with stack.client() as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(sim) -> None:
    sim.forget()


def body_of(size: int, model: str = "m", text: str = "hi") -> bytes:
    """A chat request of exactly this many bytes."""
    head = json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "pad": ""}, ensure_ascii=False)
    data = head.encode()
    return data[:-2] + b"x" * (size - len(data)) + data[-2:]


def arrived(sim: EngineSim) -> dict:
    """The newest request that the node got, its headers as a mapping."""
    found = sim.seen()[1][-1]
    return {**found, "headers": dict(found["headers"])}


def refused(reply: httpx.Response, status: int, code: str) -> dict:
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json"), reply.text
    body = reply.json()
    assert body["error"]["code"] == code
    assert body["trace_id"] == reply.headers["x-din-trace-id"]
    assert len(reply.content) < 2000
    return body


# Encodings


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "  gzip  ", "x-gzip"])
def test_a_compressed_body_arrives_plain_with_its_own_length_and_without_the_label(stack, sim, coding):
    plain = body_of(100_000)
    body = gzip.compress(plain)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key_of('acme')}\r\ncontent-type: application/json\r\n"
    head += f"content-encoding: {coding}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    assert raw_request(stack.port, head.encode() + body).startswith(b"HTTP/1.1 200 ")
    got = arrived(sim)
    assert got["body"] == plain.replace(b'"m"', b'"engine-m"', 1)
    assert "content-encoding" not in got["headers"]
    assert got["headers"]["content-length"] == str(len(got["body"]))


@pytest.mark.parametrize(
    ("coding", "body", "status", "code"),
    [
        ("zstd", b"\x28\xb5\x2f\xfd rest", 415, "unsupported_media"),
        ("br", body_of(200), 415, "unsupported_media"),
        ("gzip, gzip", gzip.compress(gzip.compress(body_of(200))), 415, "unsupported_media"),
        ("gzip", body_of(200), 400, "invalid_request"),
        ("gzip", gzip.compress(body_of(200), mtime=0)[:-9], 400, "invalid_request"),
        ("gzip", zlib.compress(body_of(200)), 400, "invalid_request"),
        ("gzip", b"", 400, "invalid_request"),
        ("gzip", gzip.compress(b"x" * (CAP + 1)), 413, "request_too_large"),
    ],
)
def test_what_can_not_be_decoded_reaches_no_node(client, sim, coding, body, status, code):
    refused(client.post(PATH, content=body, headers={**JSON, "content-encoding": coding}), status, code)
    assert sim.seen()[1] == []


# Sizes


def in_chunks(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), 65_000):
        yield body[at : at + 65_000]


@pytest.mark.parametrize("size", [32_769, 1_100_000, CAP - 100])
@pytest.mark.parametrize("chunked", [False, True])
def test_every_body_below_the_cap_passes(client, sim, size, chunked):
    body = body_of(size)
    reply = client.post(PATH, content=in_chunks(body) if chunked else body, headers=JSON)
    assert reply.status_code == 200, reply.text
    assert len(arrived(sim)["body"]) == size + len("engine-")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_cap_is_a_413_in_our_shape(client, sim, chunked):
    body = body_of(CAP + 1)
    refused(client.post(PATH, content=in_chunks(body) if chunked else body, headers=JSON), 413, "request_too_large")
    assert sim.seen()[1] == []


@pytest.mark.parametrize("size", [127_000, 129_000, 3_900_000, 4_100_000, CAP])
@pytest.mark.parametrize("model", ["engine-m", "m"])
def test_no_size_is_too_large_for_the_road_to_the_sidecar_and_back(client, sim, size, model):
    body = body_of(size, model=model)
    assert client.post(PATH, content=body, headers=JSON).status_code == 200
    assert arrived(sim)["body"] == body.replace(b'"m"', b'"engine-m"', 1)


@pytest.mark.parametrize(("size", "status"), [(300_000, 200), (CAP, 200), (CAP + 1, 413)])
def test_http2_carries_the_same_bodies(stack, sim, size, status):
    body = body_of(size)
    with stack.client(http1=False, http2=True) as client:
        assert client.post(PATH, content=body, headers=JSON).status_code == status
    assert len(sim.seen()[1]) == (status == 200)


def test_five_megabytes_of_prose_are_weighed_in_time(client, sim):
    text = "The quick brown fox jumps over the lazy dog. 你好,世界 " * 80_000
    body = body_of(CAP - 10, text=text[: 4 * MIB])
    assert client.post(PATH, content=body, headers=JSON).status_code == 200
    assert sim.seen()[0]["completed"] == 1


def test_sixteen_large_bodies_at_once_are_all_decided(stack, client, sim):
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: client.post(PATH, content=body_of(3 * MIB), headers=JSON), range(16)))
    assert {reply.status_code for reply in replies} == {200}
    assert stack.envoy_stats("ext_proc.message_timeouts") == {"http.din.ext_proc.message_timeouts": 0}
    assert sim.seen()[0]["completed"] == 16


# Lengths after an edit


@pytest.mark.parametrize("model", [*ALIASES, "engine-m"])
@pytest.mark.parametrize("text", ["plain", "größer 你好 \U0001f600"])
def test_content_length_is_what_is_sent_and_the_next_request_on_the_connection_is_understood(client, sim, model, text):
    for _ in range(2):
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}, ensure_ascii=False).encode()
        assert client.post(PATH, content=body, headers=JSON).status_code == 200
        got = arrived(sim)
        assert got["body"] == body.replace(b'"%s"' % model.encode(), b'"engine-m"', 1)
        assert got["headers"]["content-length"] == str(len(got["body"]))
    wrong = client.post(PATH, content=b"{}", headers=JSON)
    assert wrong.headers["content-length"] == str(len(wrong.content))


# Contents


def test_parameters_that_nobody_here_knows_pass(client, sim):
    unknown = {"store": False, "metadata": {}, "parallel_tool_calls": True, "reasoning_effort": "low", "x_vendor": [1, {"a": None}]}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **unknown}
    assert client.post(PATH, json=body).status_code == 200
    assert json.loads(arrived(sim)["body"]) == {**body, "model": "engine-m"}


def test_what_the_engine_itself_refuses_is_passed_on_and_asked_once(client, sim):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": -3}
    reply = client.post(PATH, json=body)
    assert reply.status_code == 400
    assert "temperature" in reply.json()["error"]["message"]
    assert sim.seen()[0]["requests"] == 1


SECRET = "the-secret-of-the-prompt"
BROKEN = {
    "a trailing comma in five megabytes": b'{"model":"m","messages":[{"role":"user","content":"' + SECRET.encode() * 200_000 + b'"}],}',
    "no messages": b'{"model":"m","prompt":"' + SECRET.encode() + b'"}',
    "a list": b'["' + SECRET.encode() + b'"]',
    "a text": b'"' + SECRET.encode() + b'"',
    "nothing": b"",
    "UTF-16": body_of(200, text=SECRET).decode().encode("utf-16"),
    "NaN": b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"' + SECRET.encode() + b'"}]}',
    "two models": b'{"model":"m","messages":[],"model":"' + SECRET.encode() + b'"}',
    "very deep": b'{"model":"m","messages":[],"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_a_short_400_that_quotes_nothing(stack, client, sim, name):
    reply = client.post(PATH, content=BROKEN[name], headers=JSON)
    refused(reply, 400, "invalid_request")
    assert SECRET not in reply.text
    assert SECRET not in stack.log("sidecar") + stack.log("envoy") + json.dumps(stack.status())
    assert sim.seen()[1] == []
    assert client.post(PATH, content=body_of(200), headers={"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_a_byte_order_mark_is_tolerated_or_refused_but_never_a_fault(client):
    assert client.post(PATH, content=b"\xef\xbb\xbf" + body_of(200), headers=JSON).status_code in {200, 400}


def test_a_body_that_is_never_completed_is_a_408_in_our_shape(sim):
    config = {
        "pools": {"pool": {"model": "engine-m", "engine": "vllm", "nodes": [node("sim", sim.address)]}},
        "rules": [{"id": "all", "when": "always", "pool": "pool"}],
        "tenants": [tenant("acme")],
        "envoy": {"timeouts": {"request_ms": 300}},
    }
    with Stack(config) as hasty:
        reply = raw_request(hasty.port, b"POST " + PATH.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
        assert not hasty.status()["exchanges"]["open"]

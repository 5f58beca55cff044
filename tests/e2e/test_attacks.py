"""What attackers send: requests inside requests, bodies that grow, clients that drip, ports that are asked for more than they give."""

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from din_extproc.settings.envoy import EnvoySection
from din_extproc.settings.gateway import GatewaySection
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE", "CONNECT", "PURGE")
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
HIDDEN = f"GET /hidden HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {key_of('acme')}\r\n\r\n"
LIMIT_MIB = 4


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="secret-model", decode_rate=5000.0) as running:
        yield running


@pytest.fixture(scope="module")
def registry() -> dict[str, str]:
    return {"address": f"127.0.0.1:{free_port()}", "http_address": f"127.0.0.1:{free_port()}", "node_tokens_file": "node-tokens.yaml"}


@pytest.fixture(scope="module")
def stack(engine, registry) -> Iterator[Stack]:
    config = {
        "aliases": {"m": {"model": "secret-model"}},
        "pools": {"secret-pool": {"model": "secret-model", "engine": "vllm", "nodes": [node("secret-node", engine.address)]}},
        "tenants": [tenant("acme")],
        "envoy": {"body_limit_mib": LIMIT_MIB, "timeouts": {"request_ms": 1500}},
    }
    made = Stack(config, gateway={"registry": registry, "ext_proc": {"address": f"127.0.0.1:{free_port()}"}})
    (made.folder / "node-tokens.yaml").write_text("{}\n")
    with made as running:
        yield running


def head(*lines: str, start: str = f"POST {PATH} HTTP/1.1") -> str:
    return "\r\n".join([start, "host: g", f"authorization: Bearer {key_of('acme')}", "content-type: application/json", *lines, "", ""])


def chunked(text: str) -> str:
    return f"{len(text):x}\r\n{text}\r\n0\r\n\r\n"


# Requests inside requests


@pytest.mark.parametrize(
    "request_text",
    [
        head(f"content-length: {len(BODY)}", "transfer-encoding: chunked") + chunked(BODY) + HIDDEN,
        head("content-length: 5", f"content-length: {len(BODY)}") + BODY + HIDDEN,
        head("transfer-encoding: xchunked") + chunked(BODY) + HIDDEN,
        head("transfer-encoding: chunked, identity") + chunked(BODY) + HIDDEN,
        head("transfer-encoding : chunked") + chunked(BODY) + HIDDEN,
        head(" transfer-encoding: chunked") + chunked(BODY) + HIDDEN,
        head(f"content-length: +{len(BODY)}") + BODY + HIDDEN,
        head(f"content-length: {len(BODY)},{len(BODY)}") + BODY + HIDDEN,
        head("content-length: 0x10") + BODY + HIDDEN,
        head("content-length: -1") + BODY + HIDDEN,
        head("transfer-encoding: chunked") + f"{len(BODY):x};\r\nG\r\n{BODY}\r\n0\r\n\r\n" + HIDDEN,
        head("transfer-encoding: chunked") + f"-{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n" + HIDDEN,
        head("x: a\nb: c", f"content-length: {len(BODY)}") + BODY + HIDDEN,
        head("x: a\rtransfer-encoding: chunked", f"content-length: {len(BODY)}") + BODY + HIDDEN,
        head("transfer-encoding: chunked", start=f"POST {PATH} HTTP/1.0") + chunked(BODY) + HIDDEN,
        head("expect: 100-continue", "content-length: 3", "transfer-encoding: chunked") + chunked(BODY) + HIDDEN,
    ],
    ids=lambda text: text.partition("application/json\r\n")[2][:48],
)
def test_a_request_hidden_in_another_reaches_no_node(stack, engine, request_text):
    engine.forget()
    reply = raw_request(stack.port, request_text.encode(), seconds=1.0)
    paths = [request["path"] for request in engine.seen()[1]]
    assert "/hidden" not in paths
    assert len(paths) <= 1
    assert paths in ([], [PATH])
    if b"HTTP/1.1 200" in reply:
        assert paths == [PATH], reply


@pytest.mark.parametrize("name", ["transfer-encoding", "connection", "upgrade", "te"])
def test_over_http2_the_headers_of_a_connection_do_not_pass(stack, engine, name):
    engine.forget()
    with stack.client(http1=False, http2=True) as client:
        try:
            reply = client.post(PATH, content=BODY, headers={"content-type": "application/json", name: "chunked"})
        except httpx.HTTPError:
            reply = None
    arrived = [
        header
        for request in engine.seen()[1]
        for header, value in request["headers"]
        if value == "chunked" and header != "transfer-encoding"
    ]
    assert arrived == []
    assert reply is None or reply.status_code in {200, 400}


# Bodies that grow


def resident_mib(stack: Stack) -> float:
    return psutil.Process(stack.sidecar.pid).memory_info().rss / (1 << 20)


@pytest.mark.parametrize(
    "bomb",
    [
        gzip.compress(b" " * (200 << 20), 9),
        gzip.compress(gzip.compress(b" " * (200 << 20), 9), 9),
        b"".join(gzip.compress(b" " * (1 << 20), 9) for _ in range(64)),
        gzip.compress(BODY.encode())[:-4] + b"\xff\xff\xff\xff",
    ],
    ids=["large", "nested", "many members", "lying about its length"],
)
def test_a_body_that_grows_is_refused_before_it_has_grown(stack, engine, bomb):
    engine.forget()
    stack.chat(max_tokens=1)
    before = resident_mib(stack)
    with stack.client() as client:
        began = time.monotonic()
        reply = client.post(PATH, content=bomb, headers={"content-type": "application/json", "content-encoding": "gzip"})
        took = time.monotonic() - began
    assert reply.status_code in {400, 413}, reply.text
    assert resident_mib(stack) < before + 8 * LIMIT_MIB
    assert took < 20
    assert len(engine.seen()[1]) == 1


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "deflate", "compress", "zip", "gzip, gzip", "gzip, br", "identity, gzip", "x", "gzip\tx"]
)
def test_a_body_that_is_packed_in_another_way_is_refused_unopened(stack, engine, encoding):
    engine.forget()
    packed = gzip.compress(gzip.compress(b" " * (200 << 20), 9), 9) if "gzip" in encoding else zlib.compress(b" " * (200 << 20), 9)
    before = resident_mib(stack)
    with stack.client() as client:
        reply = client.post(PATH, content=packed, headers={"content-type": "application/json", "content-encoding": encoding})
    assert reply.status_code in {400, 413, 415}, reply.text
    assert resident_mib(stack) < before + 8 * LIMIT_MIB
    assert engine.seen()[1] == []


# Clients that drip


def test_a_body_that_drips_is_given_up_and_holds_nothing(stack, engine):
    engine.forget()
    with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as drip:
        drip.sendall(head("content-length: 1000").encode())
        reply, deadline = b"", time.monotonic() + 25
        drip.settimeout(0.2)
        while not reply and time.monotonic() < deadline:
            try:
                drip.sendall(b" ")
                reply = drip.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
    assert reply.startswith(b"HTTP/1.1 408 "), reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    assert engine.seen()[1] == []
    stack.eventually(lambda: stack.status()["exchanges"]["open"] == 0, "nothing is held")


HELLOS = (b"", b"PRI * HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x")


def test_half_open_connections_keep_nobody_from_any_port(stack, registry):
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings)
    ports = [settings.gateway.ext_proc.address.port, stack.access_log_port, stack.admin_port, stack.port]
    ports += [int(registry[name].rpartition(":")[2]) for name in ("address", "http_address")]
    held = [(socket.create_connection(("127.0.0.1", port)), hello) for port in ports for hello in HELLOS for _ in range(25)]
    try:
        for connection, hello in held:
            connection.sendall(hello)
        assert stack.chat(max_tokens=1).status_code == 200
        assert stack.status()["limits"]["shared"]
        assert httpx.get(f"http://{registry['http_address']}/v1/nodes", timeout=10).status_code in {401, 405}
    finally:
        for connection, _ in held:
            connection.close()


# What strangers learn


@pytest.mark.parametrize("path", [PATH, "/v1/models", "/v1/models/secret-model", "/status", "/metrics", "/nodes", "/v1/nodes", "/"])
def test_without_a_key_nobody_learns_of_models_nodes_or_versions(stack, engine, path):
    engine.forget()
    for method in METHODS:
        start = f"{method} {path} HTTP/1.1"
        request = f"{start}\r\nhost: g\r\nconnection: close\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}"
        reply = raw_request(stack.port, request.encode(), seconds=2.0)
        assert not reply.startswith(b"HTTP/1.1 200"), reply
        body_text = reply.replace(path.encode(), b"").lower()
        for word in (b"secret", b"envoy", b"python", b"aiohttp", b"127.0.0.1", engine.address.encode(), b"0.2.0", b"1.40"):
            assert word not in body_text, reply
    assert engine.seen()[1] == []


def test_a_wrong_key_and_an_unknown_key_get_the_same_answer(stack):
    answers = set()
    for key in ("din_acme_" + "A" * 43, "din_nobody_" + "A" * 43, key_of("acme")[:-1] + "!", "sk-whatever", "x"):
        with stack.client(None) as client:
            reply = client.post(PATH, content=BODY, headers={"authorization": f"Bearer {key}", "content-type": "application/json"})
        error = reply.json()
        answers.add((reply.status_code, error["code"], error["error"]["message"], tuple(sorted(reply.headers.keys()))))
    assert len({answer[:2] for answer in answers}) == 1
    assert next(iter(answers))[:2] == (401, "invalid_api_key")


def test_a_node_can_not_pretend_to_be_another(stack, registry):
    registration = {
        "id": "secret-node",
        "address": "10.0.0.66:8000",
        "model": "secret-model",
        "version": "2025.3.1",
        "dtype": "bf16",
        "engine": "vllm",
    }
    for headers in (
        {},
        {"authorization": "Bearer nonsense"},
        {"authorization": f"Bearer {key_of('acme')}"},
        {"x-din-node-id": "secret-node"},
    ):
        reply = httpx.post(f"http://{registry['http_address']}/v1/nodes", json=registration, headers=headers, timeout=10)
        assert reply.status_code == 401, reply.text
        assert "secret-" not in reply.text
    assert "10.0.0.66" not in json.dumps(stack.status())


def test_what_listens_by_default_listens_on_loopback():
    gateway = GatewaySection()
    assert gateway.ext_proc.address is None
    assert {gateway.access_log.address.host, gateway.admin.address.host, EnvoySection().admin.host} == {"127.0.0.1"}
    assert (gateway.registry, gateway.xds) == (None, None)
    assert Path(gateway.ext_proc.socket).is_absolute()

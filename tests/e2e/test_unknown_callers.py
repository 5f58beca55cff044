"""A gateway with every port open and everything logged: who has no key learns nothing at any of them, and no secret is written anywhere."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest
import redis

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc.admit.keys import ENTROPY_BYTES, make_key, make_node_token
from tests.support.frame_peer import HELLO
from tests.support.servers import EngineSim, RedisServer, free_port
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
TOKEN = make_node_token("gpu-1", bytes([7]) * ENTROPY_BYTES)
WATCHER = make_key("watcher", bytes([8]) * ENTROPY_BYTES)
PASSWORD, AUDIT, COLLECTOR, LATER = (f"{name}-SECRETSECRETSECRETSECRETSECRET" for name in ("redis", "audit", "collector", "later"))
SENT_SECRETS = {name: f"{name}-SAIDINSECRET" for name in ("wrong", "apikey", "cookie", "basic", "query", "prompt", "tool", "token", "body")}
"""What clients and nodes send that nobody else may see, right or wrong."""
SECRETS = [key_of("acme"), TOKEN.text, WATCHER.text, PASSWORD, AUDIT, COLLECTOR, LATER, *SENT_SECRETS.values()]
PORTS = ("ext_proc", "access_log", "xds", "registry", "registry_http", "admin")


class Open(Stack):
    """Every port there is, in the clear, at the lowest level of logging."""

    def __init__(self, engine: EngineSim, server: RedisServer) -> None:
        self.ports = {name: free_port() for name in PORTS}
        self.sections = {
            "pools": {"secret-pool": {"model": "secret-model", "engine": "vllm", "nodes": [node("secret-node", engine.address)]}},
            "aliases": {"m": {"model": "secret-model"}},
            "tenants": [tenant("acme"), tenant("trial", rpm=1)],
            "store": {"url": f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0", "timeout_ms": 1000},
            "audit": {"folder": "audit", "keys": {"k1": {"value": AUDIT}}},
            "telemetry": {"endpoint": f"http://127.0.0.1:{free_port()}", "headers": {"x-collector-key": COLLECTOR}, "flush_s": 0.1},
        }
        gateway = {
            **{name: {"address": f"127.0.0.1:{self.ports[name]}"} for name in ("ext_proc", "access_log", "xds")},
            "registry": {
                "address": f"127.0.0.1:{self.ports['registry']}",
                "http_address": f"127.0.0.1:{self.ports['registry_http']}",
                "node_tokens_file": "tokens.yaml",
            },
            "dashboard": {"keys": [{"id": "watcher", "hash": WATCHER.hash}]},
            "ext_authz": {},
        }
        super().__init__(self.sections, server=server, serve=("--log-level", "debug"), gateway=gateway)
        self.ports["admin"] = self.admin_port
        (self.folder / "tokens.yaml").write_text(f'gpu-1: "{TOKEN.hash}"\n')

    def write(self, config, admin_keys=()) -> None:
        self._gateway["admin"] = {"address": f"127.0.0.1:{self.admin_port}", "keys": list(admin_keys)}
        super().write(config)

    def written(self) -> str:
        """Everything that the gateway has written down or shows."""
        parts = [self.log("sidecar"), self.log("envoy")]
        parts += [file.read_text() for file in (self.folder / "audit").rglob("*") if file.is_file()]
        for page in ("status", "nodes", "tenants", "metrics", "dashboard", "exchanges?trace=" + "0" * 8):
            parts.append(httpx.get(f"{self.admin_url}/{page}", timeout=10).text)
        with redis.Redis(port=self.redis.port, password=PASSWORD) as connection:
            for key in connection.scan_iter("*"):
                read = {b"string": connection.get, b"hash": connection.hgetall, b"set": connection.smembers}
                parts.append(f"{key!r} {read.get(connection.type(key), connection.dump)(key)!r}")
        return "\n".join(parts)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="secret-model", decode_rate=5000.0) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Open]:
    with RedisServer("--requirepass", PASSWORD) as server, Open(engine, server) as running:
        yield running


@pytest.fixture(scope="module")
def silent(stack) -> Iterator[list[tuple[str, float, socket.socket]]]:
    """Connections to every port that begin in every way and go on with nothing, while the other tests run."""
    hellos = {
        "registry_http": (b"", b"POST /v1/nodes HTTP/1.1\r\nhost: g\r\ncontent-length: 900\r\n\r\n{"),
        "admin": (b"", b"GET /status HTTP/1.1\r\nx: "),
    }
    held = []
    for name in PORTS:
        for hello in hellos.get(name, (b"", HELLO[:16], HELLO[:30])):
            connection = socket.create_connection(("127.0.0.1", stack.ports[name]), timeout=5)
            connection.sendall(hello)
            held.append((name, time.monotonic(), connection))
    yield held
    for *_, connection in held:
        connection.close()


# What strangers learn


def test_no_port_reveals_its_software_to_an_unknown_caller(stack, silent):
    shapes = ["GET / HTTP/1.1", "GET /status2 HTTP/1.1", "POST /v1/nodes HTTP/1.1", "DELETE /v1/nodes/gpu-1 HTTP/1.1", "junk"]
    shapes += ["OPTIONS * HTTP/1.1", "TRACE / HTTP/1.1", "GET /../../etc/passwd HTTP/1.1", "GET /dashboard/%2e%2e/%2e%2e/port.py HTTP/1.1"]
    for name, port in {**stack.ports, "listener": stack.port}.items():
        for shape in shapes:
            response = raw_request(port, f"{shape}\r\nhost: g\r\nconnection: close\r\n\r\n".encode(), 0.5).lower()
            assert b" 200 ok" not in response, (name, shape, response)
            for word in (b"aiohttp", b"python", b"grpc-python", b"envoy", b"secret-", b"root:", b"traceback"):
                assert word not in response, (name, shape, response)


@pytest.mark.parametrize("authorization", ["", f"Bearer {key_of('acme')}", "Bearer din_gpu-1_" + "A" * 43, "Basic Z3B1LTE6", "x" * 5000])
def test_the_registry_reveals_nothing_to_an_unknown_caller_and_accepts_nothing(stack, authorization):
    registration = {
        "id": "gpu-1",
        "address": "10.0.0.66:8000",
        "model": "secret-model",
        "version": "2025.3.1",
        "dtype": "bf16",
        "engine": "vllm",
    }
    base, answers = f"http://127.0.0.1:{stack.ports['registry_http']}/v1/nodes", set()
    for node_id in ("gpu-1", "nobody"):
        for method, url in (
            ("POST", base),
            ("GET", base),
            ("POST", f"{base}/{node_id}/heartbeat"),
            ("POST", f"{base}/{node_id}/drain"),
            ("DELETE", f"{base}/{node_id}"),
        ):
            reply = httpx.request(method, url, json={**registration, "id": node_id}, headers={"authorization": authorization}, timeout=10)
            answers.add((reply.status_code, reply.text))
    assert len(answers) == 1, answers
    assert next(iter(answers))[0] == 401
    answers_received = set()
    with grpc.insecure_channel(f"127.0.0.1:{stack.ports['registry']}") as channel:
        for method, request in (
            ("Register", pb.RegisterRequest(node=pb.Node(id="gpu-1"))),
            ("Heartbeat", pb.HeartbeatRequest(node_id="gpu-1")),
            ("Drain", pb.DrainRequest(node_id="gpu-1")),
            ("Deregister", pb.DeregisterRequest(node_id="nobody")),
            ("Watch", pb.WatchRequest()),
        ):
            ask = channel.stream_stream(f"/din.v1.NodeRegistry/{method}", lambda each: each.SerializeToString(), bytes)
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(iter([request]), metadata=[("authorization", authorization)], timeout=10))
            answers_received.add((refused.value.code(), refused.value.details()))
    assert len(answers_received) == 1, answers_received
    assert next(iter(answers_received))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert stack.status()["membership"]["nodes"][0]["node"]["id"] == "secret-node"
    assert "10.0.0.66" not in json.dumps(stack.status())


def test_the_dashboard_s_data_is_for_holders_of_its_keys_only(stack):
    for page in ("data", "events"):
        for headers in ({}, {"authorization": f"Bearer {key_of('acme')}"}, {"authorization": f"Bearer {TOKEN.text}"}):
            reply = httpx.get(f"{stack.admin_url}/dashboard/{page}", headers=headers, timeout=10)
            assert (reply.status_code, "secret-" in reply.text) == (401, False)


def test_with_keys_of_its_own_the_admin_port_gives_an_unknown_caller_only_its_liveness(stack):
    stack.write(stack.sections, admin_keys=[{"id": "watcher", "hash": WATCHER.hash}])
    pages = ("status", "nodes", "tenants", "metrics", "exchanges?trace=" + "0" * 8)
    try:
        stack.eventually(lambda: httpx.get(f"{stack.admin_url}/status", timeout=10).status_code == 401, "keys are wanted")
        for page in pages:
            for headers in ({}, {"authorization": f"Bearer {key_of('acme')}"}, {"authorization": f"Bearer {TOKEN.text}"}):
                reply = httpx.get(f"{stack.admin_url}/{page}", headers=headers, timeout=10)
                assert (reply.status_code, reply.json()["code"]) == (401, "invalid_api_key")
            reply = httpx.get(f"{stack.admin_url}/{page}", headers={"authorization": f"Bearer {WATCHER.text}"}, timeout=10)
            assert reply.status_code == 200
        assert httpx.get(f"{stack.admin_url}/healthz", timeout=10).text == "alive\n"
        command = [sys.executable, "-m", "din_extproc", "nodes", "--config", stack.config_file, "--json"]
        for key, code in ((WATCHER.text, 0), ("", 1)):
            environment = os.environ | {"DIN_ADMIN_KEY": key}
            asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
            assert asked.returncode == code, asked.stderr
        assert "DIN_ADMIN_KEY" in asked.stderr
    finally:
        stack.write(stack.sections)
        stack.eventually(lambda: httpx.get(f"{stack.admin_url}/status", timeout=10).status_code == 200, "none are wanted")


# What is written down


def test_no_secret_is_written_down_or_shown_whatever_goes_wrong(stack, engine):
    body = {"model": "m", "messages": [{"role": "user", "content": SENT_SECRETS["prompt"]}], "max_tokens": 2}
    body |= {"tool_choice": "none"}
    body["tools"] = [{"type": "function", "function": {"name": "f", "description": SENT_SECRETS["tool"], "parameters": {"type": "object"}}}]
    hidden = {
        "x-api-key": SENT_SECRETS["apikey"],
        "cookie": f"session={SENT_SECRETS['cookie']}",
        "proxy-authorization": f"Basic {SENT_SECRETS['basic']}",
    }

    def ask(key: str = key_of("acme"), path: str = PATH, **fields):
        with stack.client(None) as client:
            return client.post(path, json={**body, **fields}, headers={**hidden, "authorization": f"Bearer {key}"})

    response = [
        ask(),
        ask(f"din_acme_{SENT_SECRETS['wrong']}"),
        ask(SENT_SECRETS["wrong"]),
        ask(path=f"{PATH}?api_key={SENT_SECRETS['query']}"),
    ]
    response += [
        ask(path=f"/nowhere?key={SENT_SECRETS['query']}"),
        ask(model="none"),
        ask(max_tokens="many"),
        ask(temperature=[SENT_SECRETS["body"]]),
    ]
    response += [ask(key_of("trial")), ask(key_of("trial"))]
    with stack.client() as client:
        response.append(client.post(PATH, content=b'{"model":"m","messages":"' + SENT_SECRETS["body"].encode()))
    for fault in ("unavailable:count=9", "oom:count=9", "throttle:count=9", "reset:count=9"):
        engine.fail(fault)
        response.append(ask())
    engine.fail("")
    nodes = f"http://127.0.0.1:{stack.ports['registry_http']}/v1/nodes"
    for token in (f"din_gpu-1_{SENT_SECRETS['token']}", TOKEN.text):
        for form in ({"id": "gpu-1"}, {"id": "gpu-1", "address": "nowhere", "model": SENT_SECRETS["body"]}, {"id": "gpu-2"}):
            response.append(httpx.post(nodes, json=form, headers={"authorization": f"Bearer {token}"}, timeout=10))
    httpx.get(f"{stack.admin_url}/dashboard/data", headers={"authorization": f"Bearer {WATCHER.text}"}, timeout=10)
    httpx.get(f"{stack.admin_url}/dashboard/data", headers={"authorization": f"Bearer {SENT_SECRETS['wrong']}"}, timeout=10)
    bad = (
        {"store": {"url": f"redis://:{LATER}@[nowhere"}},
        {"store": {"url": f"redi://:{LATER}@127.0.0.1"}},
        {"audit": {"folder": "audit", "keys": {"k1": {"value": LATER, "file": "x"}}}},
        {"telemetry": {"endpoint": "nonsense", "headers": {"a": LATER}}},
        {"telemetry": {"endpoint": "http://127.0.0.1:1", "headers": [LATER]}},
        {"audit": {"folder": "audit", "keys": {"k1": {"value": [LATER]}}}},
        {"audit": {"folder": "audit", "keys": {"k1": LATER}}},
    )
    for each in bad:
        stack.write({**stack.sections, **each})
        stack.sidecar.send_signal(1)
        stack.eventually(lambda: stack.status()["configuration"]["rejected_successor"] != "", f"refused: {each}")
    stack.write(stack.sections)
    stack.eventually(lambda: stack.status()["configuration"]["rejected_successor"] == "", "the good file is taken again")
    with stack.redis.paused():
        response.append(ask())
    assert {reply.status_code for reply in response} >= {200, 400, 401, 404, 429, 503}
    everything = stack.written() + "".join(reply.text + str(reply.headers) for reply in response)
    found = [secret for secret in SECRETS if secret in everything or secret.rpartition("_")[2] in everything]
    context = [
        everything[max(0, at.start() - 300) : at.end() + 100] for secret in found for at in re.finditer(re.escape(secret), everything)
    ]
    assert found == [], context[:3]


# Who begins and goes on with nothing


def test_who_begins_and_goes_on_with_nothing_is_left_at_every_port(silent):
    for name, since, connection in silent:
        connection.settimeout(max(0.5, since + 40 - time.monotonic()))
        received = b"?"
        while received:
            try:
                received = connection.recv(65536)
            except ConnectionError:
                received = b""
            except TimeoutError:
                break
        assert received == b"", f"{name} still holds a connection that says nothing"

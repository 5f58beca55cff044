"""The gateway while its sidecar is killed, frozen or late: closed by default, open only toward the pool that the operator named."""

import contextlib
import itertools
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Self

import httpx
import pytest

from tests.support.servers import EngineSim, RedisServer, together
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.chaos

PATH = "/v1/chat/completions"
FORGED = {
    "x-din-cluster": "other",
    "x-din-endpoint": "10.0.0.5:22",
    "x-din-tenant": "admin",
    "x-gateway-destination-endpoint": "10.0.0.5:22",
    "x-envoy-original-dst-host": "10.0.0.5:22",
    "x-envoy-retry-on": "5xx",
    "x-envoy-upstream-alt-stat-name": "forged",
    "x-envoy-decorator-operation": "forged",
    "X-DIN-Node-Id": "forged",
    "x-din-degraded-reason": "forged",
    "x-bxagent-degraded": "true",
    "din-kept-x-din-cluster": "other",
    "x-request-id": "forged",
}
PATHS = (PATH, f"{PATH}/", f"/{PATH}", "/v1/models", "/v1/models/m", "/", "/health", "/status", "/metrics", "/v1/nodes")
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST")


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    made = {name: EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6) for name in ("safe", "other")}
    with together(made) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(sims) -> None:
    for sim in sims.values():
        sim.forget()


def config(sims: dict[str, EngineSim], **sections) -> dict:
    return {
        "pools": {name: {"model": "m", "engine": "vllm", "nodes": [node(f"node-{name}", sim.address)]} for name, sim in sims.items()},
        "rules": [{"id": "all", "when": "always", "pool": "other"}],
        "tenants": [tenant("acme"), tenant("single", rpm=1)],
        "envoy": {"timeouts": {"message_ms": 1000}},
        "store": {"timeout_ms": 500},
        **sections,
    }


@pytest.fixture(scope="module")
def closed(sims) -> Iterator[Stack]:
    with Stack(config(sims)) as stack:
        yield stack


@pytest.fixture(scope="module")
def opened(sims) -> Iterator[Stack]:
    with Stack(config(sims, fail_open={"pool": "safe"})) as stack:
        yield stack


@contextlib.contextmanager
def killed(stack: Stack) -> Iterator[None]:
    stack.sidecar.kill()
    stack.sidecar.wait()
    try:
        yield
    finally:
        stack.start_sidecar()


@contextlib.contextmanager
def frozen(stack: Stack) -> Iterator[None]:
    stack.sidecar.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        stack.sidecar.send_signal(signal.SIGCONT)


def seen(sims: dict[str, EngineSim], name: str) -> list[dict]:
    return sims[name].seen()[1]


def timeouts(stack: Stack) -> int:
    return sum(stack.envoy_stats("http.din.ext_proc.message_timeouts").values())


def refused(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.headers["retry-after"], reply.headers["content-type"]) == (503, "1", "application/json")
    body = reply.json()
    assert body["error"]["code"] == "sidecar_unavailable"
    assert body["trace_id"] == reply.headers["x-din-trace-id"]


def test_without_its_sidecar_the_gateway_refuses_everything_and_serves_again_at_once_when_it_is_back(closed, sims):
    assert closed.chat().headers["x-din-node-id"] == "node-other"
    before = timeouts(closed)
    for sim in sims.values():
        sim.forget()
    with killed(closed), closed.client() as client:
        refused(closed.chat(headers=FORGED))
        refused(closed.chat(stream=True))
        for method, path in itertools.product(METHODS, PATHS):
            reply = client.request(method, path, headers=FORGED)
            assert reply.status_code == 503, (method, path)
            if method != "HEAD":
                refused(reply)
            response = (reply.text + str(reply.headers)).lower()
            assert not [word for word in ("forged", "node-", "10.0.0.5", "other", "safe", "127.0.0.1", "ext_proc") if word in response], (
                response
            )
        assert seen(sims, "safe") + seen(sims, "other") == []
    assert closed.chat().status_code == 200, "the very first request after a restart"
    assert timeouts(closed) == before


def test_a_frozen_sidecar_holds_requests_no_longer_than_its_time(closed, sims):
    before = timeouts(closed)
    with frozen(closed):
        refused(closed.chat())
        assert timeouts(closed) == before + 1
        assert seen(sims, "safe") + seen(sims, "other") == []
    closed.eventually(lambda: closed.chat().status_code == 200, "it serves again")
    closed.eventually(lambda: not closed.status()["exchanges"]["open"], "what was asked meanwhile holds no place")
    closed.eventually(lambda: closed.redis_keys(":lease:") == [], "nor in Redis")


@pytest.mark.parametrize("absence", [killed, frozen])
def test_an_open_gateway_serves_from_the_safe_pool_and_says_so(opened, sims, absence):
    healthy = opened.chat()
    assert (healthy.headers["x-din-node-id"], "x-bxagent-degraded" in healthy.headers) == ("node-other", False)
    counted = sum(opened.envoy_stats("failure_mode_allowed").values())
    with absence(opened):
        reply = opened.chat(headers={**FORGED, "x-api-key": key_of("acme"), "x-din-trace-id": "trace-of-a-client"})
        assert reply.status_code == 200, reply.text
        assert (reply.headers["x-din-node-id"], reply.headers["x-bxagent-degraded"]) == ("node-safe", "true")
        assert reply.headers["x-din-degraded-reason"] == "limits_bypassed"
        [request] = seen(sims, "safe")
        names = {name for name, _ in request["headers"]}
        assert not names & ({name.lower() for name in FORGED} - {"x-request-id"} | {"authorization", "x-api-key"})
        assert "forged" not in repr(request) + str(reply.headers)
        assert key_of("acme") not in repr(request)
        with opened.client() as client:
            for path in (f"{PATH}/", f"/{PATH}", "/metrics", "/", "/health", "/v1/nodes", "/v1/audio/speech", "/_seen"):
                refused(client.post(path, json={}, headers=FORGED))
        assert len(seen(sims, "safe")) == 1
        assert sum(opened.envoy_stats("failure_mode_allowed").values()) > counted, "each bypass is counted"
    opened.eventually(lambda: opened.chat().headers.get("x-din-node-id") == "node-other", "decided again")


def test_an_open_gateway_with_a_sidecar_lets_nothing_pass_by(opened, sims):
    replies = [opened.chat(tenant_name="single") for _ in range(2)]
    with opened.client(None) as client:
        replies.append(client.post(PATH, json={"model": "m", "messages": []}))
    assert [reply.status_code for reply in replies] == [200, 429, 401]
    assert not any("x-bxagent-degraded" in reply.headers for reply in replies)
    assert seen(sims, "safe") == []


# A Redis that is far away


class FarRedis:
    """A Redis behind a road that takes its time: each packet arrives so many milliseconds later."""

    def __init__(self, server: RedisServer, late_ms: int) -> None:
        outer = self

        class Road(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", server.port)) as far:
                    back = threading.Thread(target=outer.carry, args=(far, self.request))
                    back.start()
                    outer.carry(self.request, far)
                    back.join()

        self.late_s = late_ms / 1000
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Road)
        self.port = self._server.server_address[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.late_s)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize("timeout_ms", [900, 100])
def test_a_slow_redis_is_waited_for_or_given_up_but_never_until_envoy_gives_up(sims, timeout_ms):
    with RedisServer() as server, FarRedis(server, late_ms=75) as far:  # 150 ms there and back
        store = {"timeout_ms": timeout_ms, "on_error": "local_share"}
        with Stack(config(sims, store=store), server=far) as stack:
            replies = [stack.chat(tenant_name="single") for _ in range(2)]
            assert [reply.status_code for reply in replies] == [200, 429]
            assert timeouts(stack) == 0
            assert stack.status()["limits"]["shared"] == (timeout_ms > 150)
            stack.settled(2)

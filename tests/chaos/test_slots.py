"""Places of requests in flight, through the whole gateway: given back however a client leaves, and whoever dies."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import httpx
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.chaos

PATH = "/v1/chat/completions"
STREAMS = 20
LEASE_MS = 2000


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=20.0, batch_slowdown=0.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(scope="module")
def stack(sim) -> Iterator[Stack]:
    config = {
        "pools": {"pool": {"model": "m", "engine": "vllm", "nodes": [node("sim", sim.address)]}},
        "rules": [{"id": "all", "when": "always", "pool": "pool"}],
        "tenants": [tenant("acme", max_streams=STREAMS), tenant("single", max_streams=1)],
        "store": {"lease_ms": LEASE_MS},
    }
    with Stack(config) as running:
        yield running


def ask(tokens: int, *, stream: bool = True) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "min_tokens": tokens, "stream": stream}


class Leaver:
    """A client that resets its connection on `leave`."""

    def __init__(self, stack: Stack, name: str, *, stream: bool = True) -> None:
        body = json.dumps(ask(2000, stream=stream))
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key_of(name)}\r\ncontent-type: application/json\r\n"
        self.connection = socket.create_connection(("127.0.0.1", stack.port), timeout=10)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    def until(self, text: bytes) -> None:
        got = b""
        while text not in got:
            part = self.connection.recv(65536)
            assert part, got
            got += part

    def leave(self) -> None:
        self.connection.close()


@pytest.mark.parametrize("when", ["after the first token", "before the first byte", "at once"])
def test_fifty_clients_that_leave_lock_nobody_out(stack, when):
    for number in range(50):
        leaver = Leaver(stack, "single", stream=when == "after the first token")
        if when == "after the first token":
            leaver.until(b'"content":"')
        elif when == "before the first byte":
            stack.eventually(lambda: stack.status()["exchanges"]["open"] == 1, "it is under way")
        leaver.leave()
        stack.eventually(lambda: not stack.status()["exchanges"]["open"], f"place {number} is given back")
        if number % 10 == 9:
            stack.eventually(lambda: stack.chat(ask(1, stream=False), tenant_name="single").status_code == 200, "the next one passes")
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no place is taken")
    assert stack.chat(ask(1, stream=False), tenant_name="single").status_code == 200


def asked(stack: Stack) -> int:
    return sum(stack.envoy_stats("http.din.ext_proc.streams_started").values())


def test_a_client_that_leaves_while_its_place_is_being_taken_leaves_none_behind(stack):
    for _ in range(10):
        with stack.redis.paused():
            before = asked(stack)
            leaver = Leaver(stack, "single")
            stack.eventually(lambda before=before: asked(stack) > before, "the sidecar is asked")
            time.sleep(0.02)  # the question to Redis is on its way: which moment of it is hit does not matter
            leaver.leave()
        stack.eventually(lambda: stack.chat(ask(1, stream=False), tenant_name="single").status_code == 200, "the next one passes")
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no place is taken")
    assert stack.chat(ask(1, stream=False), tenant_name="single").status_code == 200


class Clients:
    """As many streams as the tenant may have, all under way inside the block; at its end each is read once more, and left.

    Args:
        stack: The gateway.
        stays: Whether the clients read until their streams end, instead.
    """

    def __init__(self, stack: Stack, *, stays: bool = False) -> None:
        self._stack = stack
        self._stays = stays
        self._begun = threading.Barrier(STREAMS + 1)
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(STREAMS)
        self.clients: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._stack.eventually(lambda: self._stack.chat(ask(1)).status_code == 200, "requests pass again")
        self._stack.eventually(lambda: self._stack.redis_keys(":lease:") == [], "places of an earlier crowd are free")
        self.clients = [self._pool.submit(self._read) for _ in range(STREAMS)]
        self._begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._pool.shutdown()

    def _read(self) -> None:
        with self._stack.client() as client, client.stream("POST", PATH, json=ask(4000)) as reply:
            parts = reply.iter_text()
            assert '"choices"' in next(parts)
            self._begun.wait(30)
            while self._stays or not self._enough.is_set():
                next(parts)
            next(parts)


def test_a_killed_sidecar_cuts_no_stream_and_the_places_come_back_by_themselves(stack):
    with Clients(stack) as group:
        assert stack.chat(ask(1)).json()["error"]["code"] == "concurrency_limit_exceeded"
        stack.sidecar.kill()
        stack.sidecar.wait()
        refused = stack.chat(ask(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sidecar_unavailable")
        stack.start_sidecar()
        stack.eventually(lambda: stack.chat(ask(1)).status_code == 200, "the leases of the dead run out")
    assert [client.exception() for client in group.clients] == [None] * STREAMS
    stack.eventually(
        lambda: stack.status()["counts"]["outcomes"].get("client_cancelled") == STREAMS, "what the dead one admitted is settled"
    )
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no place is taken")


def test_a_lease_is_renewed_while_its_stream_runs(stack):
    with Clients(stack) as group:
        until = time.monotonic() + 2.5 * LEASE_MS / 1000
        while time.monotonic() < until:
            assert stack.chat(ask(1)).status_code == 429, "a place was lost while its stream ran"
    assert [client.exception() for client in group.clients] == [None] * STREAMS


def test_when_envoy_dies_every_place_is_free_at_once(stack, sim):
    sim.forget()
    with Clients(stack, stays=True) as group:
        stack.envoy.kill()
        stack.envoy.wait()
    try:
        assert all(isinstance(client.exception(), httpx.TransportError) for client in group.clients)
        stack.eventually(lambda: not stack.status()["exchanges"]["open"], "the sidecar has seen its streams end")
        stack.eventually(lambda: stack.redis_keys(":lease:") == [], "no place is taken")
        stack.eventually(lambda: sim.seen()[0]["aborted"] == STREAMS, "no node works on")
    finally:
        stack.start_envoy()
    assert stack.chat(ask(1)).status_code == 200

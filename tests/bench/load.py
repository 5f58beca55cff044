"""The load generator: HTTP/1.1 over kept connections, closed loop (a number of connections) or open loop (a rate).

Rule: one JSON line in, one out. A latency is measured from the moment a request was written to the last byte of its answer.
Run: python -m tests.bench.load
"""

import asyncio
import json
import sys
import time
from array import array
from typing import Any

import uvloop
from msgspec import Struct

from tests.bench.harness import pin_self

_TICK_S = 0.001
_GRACE_S = 30.0
_HEAD, _CHUNKS = -1, -2
"""The expected end: of the head, the last chunk, or a number of bytes."""
_LAST_CHUNK = b"0\r\n\r\n"


class Order(Struct, frozen=True, kw_only=True):
    """The order for one run.

    Args:
        port: where to, on loopback.
        request: the whole request, head and body (latin-1).
        seconds: how long new requests are begun.
        connections: at once, in the closed loop.
        rate: requests a second; above 0 it is an open loop, which opens a connection whenever none is free.
    """

    port: int
    request: str
    seconds: float
    connections: int = 16
    rate: float = 0.0


class LoadResult(Struct, frozen=True, kw_only=True):
    """The result of a run. Latencies in milliseconds."""

    requests: int
    failures: int
    """Answers other than 200, and connections that broke."""
    seconds: float
    p50_ms: float
    p99_ms: float
    first_failure: str


class _Lane(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._expected = 0
        self._got = 0
        self._tail = b""
        self._began = 0.0
        self._status = b""
        self._closing = False

    def connection_made(self, transport):
        self._transport = transport
        self._run.ready(self)

    def connection_lost(self, exc):
        if not self._closing:
            self._run.broken(self, f"the connection was closed: {exc}")

    def ask(self) -> None:
        self._got = 0
        self._expected = _HEAD
        self._status = b""
        self._began = time.perf_counter()
        self._transport.write(self._run.request)

    def data_received(self, data):
        self._got += len(data)
        if self._expected == _HEAD:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            self._tail = b""
            self._status = data[9:12]
            at = data.find(b"content-length: ", 0, end)
            self._expected = _CHUNKS if at < 0 else end + 4 + int(data[at + 16 : data.index(b"\r", at)])
        if self._expected == _CHUNKS:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            if self._tail != _LAST_CHUNK:
                return
            self._tail = b""
        elif self._got < self._expected:
            return
        self._run.answered(self, self._status, time.perf_counter() - self._began, data)

    def close(self) -> None:
        self._closing = True
        self._transport.abort()


class _Run:
    """One run in progress."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self.request = order.request.encode("latin-1")
        self._latencies = array("d")
        self._failures = 0
        self._first_failure = ""
        self._lanes: list[_Lane] = []
        self._free: list[_Lane] = []
        self._asked = 0
        self._open = 0
        self._over = False
        self._idle = asyncio.Event()

    async def go(self) -> LoadResult:
        order = self._order
        lanes = order.connections
        self._ends = time.perf_counter() + 3600
        for _ in range(lanes):
            await self._loop.create_connection(lambda: _Lane(self), "127.0.0.1", order.port)
        began = time.perf_counter()
        self._ends = began + order.seconds
        if order.rate:
            self._tick(began)
        else:
            while self._free:
                self._ask(self._free.pop())
        await asyncio.wait_for(self._idle.wait(), order.seconds + _GRACE_S)
        seconds = time.perf_counter() - began
        for lane in self._lanes:
            lane.close()
        found = sorted(self._latencies) or [0.0]
        return LoadResult(
            requests=len(self._latencies),
            failures=self._failures,
            seconds=seconds,
            p50_ms=found[len(found) // 2] * 1e3,
            p99_ms=found[min(len(found) - 1, int(0.99 * len(found)))] * 1e3,
            first_failure=self._first_failure,
        )

    def ready(self, lane: _Lane) -> None:
        self._lanes.append(lane)
        self._free.append(lane)

    def _ask(self, lane: _Lane) -> None:
        self._asked += 1
        self._open += 1
        lane.ask()

    def answered(self, lane: _Lane, status: bytes, seconds: float, data: bytes) -> None:
        self._open -= 1
        if status == b"200":
            self._latencies.append(seconds)
        else:
            self._failed(data[:600].decode("latin-1"))
        if self._order.rate or time.perf_counter() >= self._ends:
            self._free.append(lane)
            self._rest()
        else:
            self._ask(lane)

    def broken(self, lane: _Lane, reason: str) -> None:
        if lane in self._free:
            self._free.remove(lane)
        else:
            self._open -= 1
        self._failed(reason)
        self._rest()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._first_failure = self._first_failure or reason

    def _rest(self) -> None:
        if not self._open and time.perf_counter() >= self._ends:
            self._idle.set()

    def _tick(self, began: float) -> None:
        now = time.perf_counter()
        due = int((min(now, self._ends) - began) * self._order.rate)
        missing = due - self._asked
        while missing > 0 and self._free:
            self._ask(self._free.pop())
            missing -= 1
        for _ in range(missing):  # they ask at the next tick, when they are connected
            self._loop.create_task(self._loop.create_connection(lambda: _Lane(self), "127.0.0.1", self._order.port))
        if now < self._ends:
            self._loop.call_later(_TICK_S, self._tick, began)
        else:
            self._rest()


def http_request(body: bytes, headers: dict[str, str]) -> str:
    """A chat request as an `DialectRequest` takes it."""
    named = {"host": "bench", "content-type": "application/json", **headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n" + body.decode("latin-1")


async def _serve() -> None:
    lines: asyncio.StreamReader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("LISTENING", flush=True)
    while line := await lines.readline():
        given: dict[str, Any] = json.loads(line)
        result = await _Run(Order(**given)).go()
        print(json.dumps({name: getattr(result, name) for name in result.__struct_fields__}), flush=True)


if __name__ == "__main__":
    pin_self("load")
    uvloop.run(_serve())

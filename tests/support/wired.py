"""A rig with the product's HTTP/2 server as sidecar, and a node on a bare socket that can break at any byte.

Rule: `at_rest` detects leftovers of a test at the sidecar and at Envoy.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO

from aiohttp import web

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.verdict import Send
from din_extproc.edge.grpc.ext_proc import ExtProcService
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import AccessLogService, HealthService
from tests.support.fakes import FakeHandlerFactory
from tests.support.rig import Rig, rig
from tests.support.waiting import until

MIB = 1 << 20
CAP = 9 * MIB
PATH = "/v1/chat/completions"


class Wired:
    """A rig with our server: it reverses every body on the way to the node, which echoes it."""

    def __init__(self, parts: Rig) -> None:
        self.parts = parts
        self.logs = []
        self.handler_factory = FakeHandlerFactory(self.decide)
        self.services = [HealthService(), ExtProcService(self.handler_factory), AccessLogService(self._log, linger_s=0.1)]
        self.server = H2Server(self.services, max_body_bytes=CAP)
        self.addresses = [f"unix:{path}" for path in (parts.sidecar.ext_proc, parts.sidecar.access_log)]
        self.port = parts.envoy.port
        self.url = f"http://127.0.0.1:{self.port}{PATH}"
        self.delay_s = 0.0
        parts.nodes[0].behaviour = self.echo

    async def decide(self, _head, body):
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return self.send(body)

    def send(self, body: bytes) -> Send:
        """Return the decision to send to the node."""
        endpoint = self.parts.nodes[0].endpoint
        return Send(cluster="pool", endpoints=(endpoint,), request_headers=(), response_headers=(), metadata={}, body=body[::-1] or None)

    async def echo(self, request):
        body = await request.read()
        return web.Response(body=BytesIO(body), headers={"content-length": str(len(body))})

    def _log(self, data):
        self.logs.extend(StreamAccessLogsMessage.FromString(data).http_logs.log_entry)

    @property
    def open_streams(self):
        return self.services[1].calls

    def forget(self) -> None:
        """Reset the counts."""
        self.handler_factory.flows.clear()
        self.logs.clear()

    async def at_rest(self):
        """Check that every exchange has ended once, that only Envoy's two access log calls are open, and that Envoy is idle."""
        await until(lambda: self.open_streams == 0)
        assert all(flow.ends == 1 for flow in self.handler_factory.flows)
        assert all(connection.grpc.held == 0 for connection in self.server.connections)
        assert all(not connection.grpc.fault for connection in self.server.connections)
        assert self.server.calls <= 2
        await self.gauge_falls("http.[^.]*.downstream_rq_active")
        await self.gauge_falls("cluster.pool.upstream_rq_active")

    async def gauge_falls(self, name: str) -> None:
        """Wait until one of Envoy's gauges is 0."""
        for _ in range(200):
            if not (now := await self.parts.envoy.stat(name)):
                break
            await asyncio.sleep(0.02)
        assert now == 0, name


@asynccontextmanager
async def wired(node: "BareNode | None" = None) -> AsyncIterator[Wired]:
    """Start the rig with an echo node or `node`. A node that breaks off still gets the retry."""
    async with rig(1, sidecar=False, dead=(0,) if node else (), outlier=None) as parts:
        made = Wired(parts)
        await made.server.start(*made.addresses)
        try:
            async with node.listening(parts.nodes[0].port) if node else contextlib.nullcontext():
                yield made
        finally:
            await made.server.stop(1)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection and wait until it is closed."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@dataclass
class Asked:
    """A request whose head has reached the node."""

    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self) -> bytes:
        return await self.reader.readexactly(int(self.headers.get("content-length", 0)))


async def echo(asked: Asked) -> None:
    """Answer with the request's own body."""
    body = await asked.body()
    asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


class BareNode:
    """HTTP/1.1 by hand: `accepted` gets each connection, `behaviour` each request."""

    def __init__(self, behaviour: Callable[[Asked], Awaitable[None]] = echo) -> None:
        self.behaviour = behaviour
        self.accepted: Callable[[asyncio.StreamWriter], None] = lambda _writer: None
        self._open: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        """Accept until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MIB)
        try:
            yield
        finally:
            server.close()
            self.hang_up()
            await until(lambda: not self._open)

    def hang_up(self) -> None:
        """Close every connection."""
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            self.accepted(writer)
            while not writer.is_closing():
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[1:-2]
                await self.behaviour(Asked(dict(line.split(": ", 1) for line in lines), reader, writer))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            """The other side, or the behaviour, has hung up."""
        finally:
            await closed(writer)
            self._open.discard(writer)

"""A real Envoy talks to our own HTTP/2: bodies of every size both ways, hang-ups at every point, and nothing left behind."""

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager
from io import BytesIO

import pytest
from aiohttp import ClientSession, ClientTimeout, web

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.verdict import Send
from din_extproc.edge.h2_server import H2Server
from din_extproc.edge.services import AccessLogService, ExtProcService, HealthService
from tests.fakes import FakeConductor
from tests.rig import rig, until

pytestmark = pytest.mark.e2e

MIB = 1 << 20
CAP = 9 * MIB


class Wired:
    """A rig whose sidecar is our server: it reverses every body on the way to the node, which echoes it."""

    def __init__(self, parts):
        self.parts = parts
        self.logs = []
        self.conductor = FakeConductor(self.decide)
        self.services = [HealthService(), ExtProcService(self.conductor), AccessLogService(self._log, linger_s=0.1)]
        self.server = H2Server(self.services, max_body_bytes=CAP)
        self.addresses = [f"unix:{path}" for path in (parts.sidecar.ext_proc, parts.sidecar.access_log)]
        self.url = f"http://127.0.0.1:{parts.envoy.port}/v1/chat/completions"
        self.delay_s = 0.0
        parts.nodes[0].behaviour = self.echo

    async def decide(self, _head, body):
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        endpoint = self.parts.nodes[0].endpoint
        return Send(cluster="pool", endpoints=(endpoint,), request_headers=(), response_headers=(), metadata={}, body=body[::-1] or None)

    async def echo(self, request):
        body = await request.read()
        return web.Response(body=BytesIO(body), headers={"content-length": str(len(body))})

    def _log(self, data):
        self.logs.extend(StreamAccessLogsMessage.FromString(data).http_logs.log_entry)

    @property
    def open_streams(self):
        return self.services[1].streams

    async def at_rest(self):
        """Every exchange has ended once, and no call but the access log's is open."""
        await until(lambda: self.open_streams == 0)
        assert all(len(flow.ends) == 1 for flow in self.conductor.flows)
        assert all(connection.grpc.held == 0 for connection in self.server.connections)
        assert self.server.calls <= 1


@asynccontextmanager
async def wired():
    async with rig(1, sidecar=False) as parts:
        made = Wired(parts)
        await made.server.start(*made.addresses)
        try:
            yield made
        finally:
            await made.server.stop(1)


SIZES = (0, 1_000, 127_000, 129_000, 3_900_000, 8 * MIB)


async def test_b101_a_body_of_any_size_goes_up_changed_and_comes_back():
    async with wired() as made, ClientSession(timeout=ClientTimeout(60)) as client:
        for size in SIZES:
            body = (bytes(range(256)) * (size // 256 + 1))[:size]
            async with client.post(made.url, data=BytesIO(body)) as answer:
                assert answer.status == 200
                assert await answer.read() == body[::-1]
        await made.at_rest()


async def test_eight_large_bodies_at_once_share_the_connections_windows():
    async with wired() as made, ClientSession(timeout=ClientTimeout(60)) as client:

        async def one(number):
            body = bytes((number,)) * 2 * MIB + b"end"
            async with client.post(made.url, data=BytesIO(body)) as answer:
                assert await answer.read() == body[::-1]

        await asyncio.gather(*map(one, range(8)))
        await made.at_rest()


async def test_2000_requests_leave_no_stream_and_one_log_entry_each():
    async with wired() as made, ClientSession() as client:

        async def lane(number):
            for at in range(100):
                body = b"%d.%d" % (number, at)
                async with client.post(made.url, data=BytesIO(body)) as answer:
                    assert (answer.status, await answer.read()) == (200, body[::-1])

        await asyncio.gather(*map(lane, range(20)))
        await made.at_rest()
        assert len(made.conductor.flows) == 2000
        await until(lambda: len(made.logs) == 2000)
        assert all(not connection.grpc.fault for connection in made.server.connections)


def half_sent(path, *, length=1000, sent=500):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode() + b"x" * sent


HANG_UPS = (
    (half_sent("/v1/chat/completions"), 0.05),  # before its body is complete
    (half_sent("/v1/chat/completions", sent=1000), 0.05),  # while the decision is made
    (half_sent("/v1/chat/completions", sent=1000), 0),  # at once
)


async def hang_up(port, sent, wait_s, how):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    await asyncio.sleep(wait_s)
    if how == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
    else:
        writer.write_eof()
        await asyncio.sleep(0.01)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_clients_that_hang_up_leave_nothing_behind():
    async with wired() as made, ClientSession() as client:
        made.delay_s = 0.3
        for sent, wait_s in HANG_UPS:
            for how in ("reset", "half close"):
                await asyncio.gather(*(hang_up(made.parts.envoy.port, sent, wait_s, how) for _ in range(20)))
        assert made.conductor.flows
        await asyncio.sleep(0.5)
        await made.at_rest()
        made.delay_s = 0.0
        async with client.post(made.url, data=b"after") as answer:
            assert await answer.read() == b"retfa"
        await made.at_rest()


async def test_a_client_that_hangs_up_while_the_node_works_cancels_its_exchange():
    async with wired() as made, ClientSession() as client:
        reached = asyncio.Event()

        async def slow(_request):
            reached.set()
            await asyncio.sleep(30)

        made.parts.nodes[0].behaviour = slow
        asking = asyncio.ensure_future(client.post(made.url, data=b"x"))
        await reached.wait()
        assert made.open_streams == 1
        asking.cancel()
        await made.at_rest()
        assert len(made.conductor.flows) == 1


async def test_a_server_that_drains_finishes_what_is_under_way_and_its_successor_takes_over():
    async with wired() as made, ClientSession() as client:
        made.delay_s = 0.4
        under_way = [asyncio.ensure_future(client.post(made.url, data=b"%d" % number)) for number in range(10)]
        await until(lambda: made.open_streams == 10)
        successor = Wired(made.parts)
        await successor.server.start(*successor.addresses)
        await made.server.stop(20)
        answers = await asyncio.gather(*under_way)
        assert [answer.status for answer in answers] == [200] * 10
        assert len(made.conductor.flows) == 10
        async with client.post(made.url, data=b"new") as answer:
            assert await answer.read() == b"wen"
        assert len(successor.conductor.flows) == 1
        await successor.server.stop(1)

"""An HTTP port of the sidecar and those who drip, hold, crowd or ask what it is made of."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web

from din_extproc.edge.http.port import HttpPort, HttpTimeouts
from tests.support.servers import free_port
from tests.support.waiting import let_pass

pytestmark = pytest.mark.virtual_time
PATIENCE = HttpTimeouts(head_s=0.3, exchange_s=0.6, idle_s=0.5)
LONG = b"x" * (32 << 20)
"""More than any socket holds."""


async def _read(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _long(_: web.Request) -> web.Response:
    return web.Response(body=LONG)


async def _lasting(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse()
    await reply.prepare(request)
    await let_pass(10 * PATIENCE.exchange_s)
    await reply.write(b"late")
    return reply


@contextlib.asynccontextmanager
async def served(most: int = 1000) -> AsyncIterator[int]:
    routes = [web.post("/read", _read), web.get("/read", _read), web.get("/long", _long), web.get("/lasting", _lasting)]
    port = HttpPort(routes, unlimited_paths=frozenset({"/lasting"}), timeouts=PATIENCE, max_connections=most)
    number = free_port()
    await port.start(f"127.0.0.1:{number}")
    try:
        yield number
    finally:
        await port.stop()


async def dropped_after(port: int, hello: bytes, drip: bytes = b"") -> float:
    """Seconds until the port is through with a client that says this, then something now and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def go_on() -> None:
        while True:
            await let_pass(0.05)
            writer.write(drip)

    loop = asyncio.get_running_loop()
    began = loop.time()
    writer.write(hello)
    dripping = asyncio.create_task(go_on())
    try:
        with contextlib.suppress(ConnectionError):
            await reader.read()
    finally:
        dripping.cancel()
        writer.transport.abort()
    return loop.time() - began


@pytest.mark.parametrize(
    ("hello", "drip"),
    [
        (b"", b""),
        (b"GET /read HTTP/1.1\r\nx: ", b"a"),
        (b"POST /read HTTP/1.1\r\nhost: g\r\ncontent-length: 900\r\n\r\n", b"a"),
        (b"POST /read HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    ],
    ids=["silent", "head", "body", "chunks"],
)
async def test_who_drips_is_left_after_its_time(hello, drip):
    async with served() as port:
        assert await dropped_after(port, hello, drip) < PATIENCE.head_s + PATIENCE.exchange_s + PATIENCE.idle_s


async def test_who_asks_again_and_drips_is_left_too():
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /read HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /read HTTP/1.1\r\nx: ")
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()


async def test_who_does_not_read_its_answer_is_left_and_what_takes_long_by_nature_is_not():
    async with served() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /long HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await client.get("/lasting")).text == "late"
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                read = await reader.read()
                while more := await reader.read(1 << 20):
                    read += more
                assert len(read) < len(LONG)
        writer.close()


async def test_however_many_hold_a_place_a_newcomer_finds_one():
    async with served(most=20) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
        assert (await client.get("/read")).status_code == 200
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        assert (await client.get("/read")).status_code == 200
        for _, writer in held:
            writer.close()


async def test_no_response_reveals_the_server_s_software():
    async with served() as port:
        for sent in (
            b"GET /read HTTP/1.1\r\nhost: g\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: g\r\n\r\n",
            b"junk\r\n\r\n",
            b"GET / HTTP/1.1\r\nx: %b\r\n\r\n" % (b"a" * 20_000),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(10):
                response = (await reader.read()).lower()
            assert b"server: din\r\n" in response
            for word in (b"python", b"aiohttp", b"bytes when reading", b"method encountered"):
                assert word not in response
            writer.close()


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_private_methods_of_aiohttp_that_the_port_overrides_keep_their_signatures():
    assert _parameters(web.RequestHandler._handle_request) == ["self", "request", "start_time", "request_handler"]
    assert inspect.iscoroutinefunction(web.RequestHandler._handle_request)
    assert _parameters(web.RequestHandler.handle_error) == ["self", "request", "status", "exc", "message"]
    assert _parameters(web.AppRunner._make_server) == ["self"]
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)


async def test_the_private_state_of_an_aiohttp_server_is_what_the_port_builds_its_handlers_from():
    server = web.Server(_read, access_log=None)
    assert server._loop is asyncio.get_running_loop()
    assert server._kwargs == {"access_log": None}
    assert web.RequestHandler(server, loop=server._loop, keepalive_timeout=1.0, **server._kwargs)._loop is server._loop


async def test_aiohttp_makes_handlers_and_handles_requests_by_the_overridden_methods(monkeypatch):
    called = []

    def observe(owner, name):
        plain = getattr(owner, name)

        async def observed(*args):
            called.append(name)
            return await plain(*args)

        monkeypatch.setattr(owner, name, observed)

    observe(web.AppRunner, "_make_server")
    observe(web.RequestHandler, "_handle_request")
    async with served() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
        assert (await client.get("/read")).status_code == 200
    assert called == ["_make_server", "_handle_request"]

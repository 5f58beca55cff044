"""The doorway of a port with TLS, on the loop of the tests and on the one that the sidecar runs on."""

import asyncio
import contextlib
import socket
import ssl

import pytest
import uvloop

from din_extproc.edge import tls_listener
from din_extproc.edge.tls import ServerFiles, server_context
from din_extproc.edge.tls_listener import TlsListener
from tests.support.certificates import Authority
from tests.support.waiting import until


class Inside(asyncio.Protocol):
    """Says hello."""

    def connection_made(self, transport) -> None:
        transport.write(b"hello")
        transport.close()


async def greeted(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    with contextlib.closing(writer):
        return await reader.read()


async def crowded(context: ssl.SSLContext, trusting: ssl.SSLContext) -> bytes:
    door = TlsListener(Inside, context, most=5)
    port = await door.open("127.0.0.1", 0)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    try:
        assert await greeted(port, trusting) == b"hello"
        for reader, _ in silent[:30]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        greeting = await greeted(port, trusting)
        door.close()
        await until(lambda: refused(port))
        return greeting
    finally:
        for _, writer in silent:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was in the backlog when the port closed
        return False
    writer.transport.abort()
    return False


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_new_connection_is_served_at_once_however_many_handshakes_are_pending(tmp_path, run, monkeypatch):
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 3600.0)
    authority = Authority(tmp_path)
    context = server_context(ServerFiles(**authority.issue("port", "localhost")), ())
    assert run(crowded(context, authority.client())) == b"hello"


async def test_a_port_that_is_taken_is_reported(tmp_path):
    context = server_context(ServerFiles(**Authority(tmp_path).issue("port", "localhost")), ())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="already in use"):
        await TlsListener(Inside, context).open("127.0.0.1", taken.getsockname()[1])

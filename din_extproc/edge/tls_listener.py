"""TLS listener with a limit of concurrent handshakes.

Invariant: at the limit, the oldest pending handshake is aborted for a new connection. A handshake has limited time.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from din_extproc.edge.connection_limiter import compute_max_connections
from din_extproc.edge.tls import HANDSHAKE_S

_BACKLOG = 1024
_PAUSE_S = 0.1
"""Pause after a failed accept, for example without free file descriptors."""


Make = Callable[[], asyncio.BaseProtocol]


async def listen(
    make: Make, host: str, port: int, tls: ssl.SSLContext | None, backlog: int = _BACKLOG
) -> "tuple[asyncio.Server | TlsListener, int]":
    """Listen on a port, with or without TLS. Return the listener and the port.

    Raises:
        OSError: The address is in use or invalid.
    """
    at = host.strip("[]") or None
    if tls is None:
        server = await asyncio.get_running_loop().create_server(make, at, port, backlog=backlog)
        return server, int(server.sockets[0].getsockname()[1])
    listener = TlsListener(make, tls)
    try:
        return listener, await listener.open(at, port, backlog)
    except OSError:
        listener.close()
        raise


class TlsListener:
    """TLS listener of one port.

    Args:
        make: Creates the protocol after the handshake.
        tls: TLS context.
        most: Maximum pending handshakes; None: by the open-file limit.
    """

    def __init__(self, make: Make, tls: ssl.SSLContext, most: int | None = None) -> None:
        self._make = make
        self._tls = tls
        self._most = most or compute_max_connections()
        self._listening: set[asyncio.Task[None]] = set()
        self._greeting: dict[asyncio.Task[None], None] = {}

    async def open(self, host: str | None, port: int, backlog: int = _BACKLOG) -> int:
        """Listen on every address of the host. Return the port.

        Raises:
            OSError: An address is in use or invalid.
        """
        loop, ports = asyncio.get_running_loop(), []
        for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            listening = socket.create_server(address[:2], family=family, backlog=backlog)
            listening.setblocking(False)
            ports.append(int(listening.getsockname()[1]))
            self._listening.add(loop.create_task(self._accept_connections(listening)))
        return ports[0]

    def close(self) -> None:
        """Stop listening; established connections stay open."""
        for task in (*self._listening, *self._greeting):
            task.cancel()
        self._listening.clear()

    async def _accept_connections(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    self._accept(connection)

    def _accept(self, connection: socket.socket) -> None:
        greeting = asyncio.get_running_loop().create_task(self._handshake(connection))
        self._greeting[greeting] = None
        greeting.add_done_callback(self._on_handshake_done)
        if len(self._greeting) > self._most:
            next(iter(self._greeting)).cancel()

    def _on_handshake_done(self, greeting: asyncio.Task[None]) -> None:
        self._greeting.pop(greeting, None)

    async def _handshake(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(self._make, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S)

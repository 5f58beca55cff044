"""gRPC over our own wire: an asyncio server on TCP and Unix sockets that hands calls to services.

Rule: one write per turn of the loop and connection, however many calls have something to say; a method that raises ends its own call only.
"""

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from din_extproc.edge.background import STEPS_PER_ITERATION
from din_extproc.edge.connection_limiter import ConnectionLimiter
from din_extproc.edge.grpc.services import CallHandler, GrpcService, OpenCall
from din_extproc.edge.tls import TlsAddress, names_of, server_context
from din_extproc.edge.tls_listener import TlsListener, listen
from din_extproc.wire.grpc import INTERNAL, OK, UNIMPLEMENTED, CallHead, Cut, Event, GrpcCall, GrpcConnection, Message, Opened, read_head
from din_extproc.wire.header_block import Memo
from din_extproc.wire.limits import WireLimits, limits_for

_TICK_S = 1.0
_HIGH_WATER = 1 << 20
_DEADLINE_GRAIN_S = 0.01
_BACKLOG = 1024
_POLL_S = 0.02
_MOST_WAITING = 256
"""Events that wait for their turn before the client is read no further."""
_GOAWAY_GRACE_S = 2.0
"""Time that a peer has to close the connection after the final GOAWAY, in seconds."""


class H2Server:
    """Services on one or more addresses. They are drained in the order they are given in.

    Args:
        services: what is served.
        max_body_bytes: the largest body that a message must be able to carry.
        limits: what one connection may use, when it is not what `max_body_bytes` calls for.
        most: connections at once; None: what the process's open files allow.
    """

    def __init__(
        self, services: Sequence[GrpcService], *, max_body_bytes: int, limits: WireLimits | None = None, most: int | None = None
    ) -> None:
        self.limits = limits or limits_for(max_body_bytes)
        self.memo = Memo(read_head)
        self.methods: dict[str, OpenCall] = {
            f"/{service.name}/{method}": open_call for service in services for method, open_call in service.methods().items()
        }
        self.connections: set[_ServerProtocol] = set()
        self.connection_limiter = ConnectionLimiter(most)
        self.make_protocol: Callable[[], asyncio.BaseProtocol] = self.connection
        """Makes the protocol of a new connection. A port that serves another protocol beside gRPC replaces it."""
        self._services = services
        self._servers: list[asyncio.Server | TlsListener] = []
        self._sockets: dict[str, tuple[int, int] | None] = {}
        """Unix sockets of ours, by path."""
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def calls(self) -> int:
        """How many calls are open, over all connections."""
        return sum(connection.grpc.calls for connection in self.connections)

    def connection(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new gRPC connection."""
        return _ServerProtocol(self)

    async def start(self, *addresses: str | TlsAddress) -> list[int]:
        """Listen on `host:port` (port 0: a free one) and `unix:/path`. Returns the ports, in order; 1 stands for a Unix socket.

        A socket that is at the path already is replaced. `stop` removes ours, not what a successor has put there meanwhile.

        Raises:
            OSError: an address is taken or is none.
            CertificateUnusable: certificates can't be used.
        """
        ports = [await self._listen(address) for address in addresses]
        self._tick()
        return ports

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, drain the services, and cut off what still runs after `grace_s` seconds."""
        latest = asyncio.get_running_loop().time() + grace_s
        remove_stale_sockets(self._sockets)
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(latest):
                await self._wait_until(lambda connection: connection.grpc.warned)
                for service in self._services:
                    await service.drain()
                await self._wait_until(lambda connection: connection.grpc.over)
                async with asyncio.timeout(_GOAWAY_GRACE_S):
                    await self._wait_until(lambda _: False)
        for connection in list(self.connections):
            connection.abort()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _listen(self, where: str | TlsAddress) -> int:
        loop = asyncio.get_running_loop()
        address = where if isinstance(where, str) else where.address
        tls = None if isinstance(where, str) else server_context(where.files, ("h2",))
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            self._servers.append(await loop.create_unix_server(self.make_protocol, path, backlog=_BACKLOG))
            self._sockets[path] = _get_socket_identity(path)
            return 1
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise OSError(f"can't listen on {address}")
        listening, bound = await listen(self.make_protocol, host, int(port), tls)
        self._servers.append(listening)
        return bound

    async def _wait_until(self, done: Callable[["_ServerProtocol"], bool]) -> None:
        """Wait until every connection is `done` or gone."""
        while not all(done(connection) for connection in self.connections):  # noqa: ASYNC110 - only at the end of a server's life
            await asyncio.sleep(_POLL_S)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(_TICK_S, self._tick)
        now = loop.time()
        for connection in list(self.connections):
            connection.tick(now)


def remove_stale_sockets(sockets: dict[str, tuple[int, int] | None]) -> None:
    """Remove those that are still the ones that were made."""
    for path, seen in sockets.items():
        if seen is not None and _get_socket_identity(path) == seen:
            Path(path).unlink(missing_ok=True)


def _get_socket_identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file at the path; None: there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class H2ServerCall(GrpcCall):
    """One call on its connection, as a `ServerCall` of its handler."""

    __slots__ = ("connection", "handler")

    def __init__(self, connection: "_ServerProtocol", stream_id: int, window: int, head: CallHead, deadline: float | None) -> None:
        super().__init__(stream_id, window, head, deadline)
        self.connection = connection
        self.handler: CallHandler | None = None
        """None: it is not open yet, or over."""

    @property
    def authorization(self) -> str:
        """The call's `authorization` metadata, "" without it."""
        return self.head.authorization

    @property
    def names(self) -> frozenset[str]:
        """The names in the client's certificate; empty without one."""
        return self.connection.names

    @property
    def lost(self) -> bool:
        """Whether the call's connection is gone or about to go."""
        return bool(self.connection.grpc.fault)

    def send(self, message: bytes) -> None:
        """Queue one serialised message."""
        connection = self.connection
        connection.grpc.send(self, message)
        if not connection.flushing:
            connection.flush_soon()

    def fail(self, status: int, detail: str) -> None:
        """End the call with a gRPC status."""
        self.handler = None  # they hold each other
        self.connection.grpc.finish(self, status, detail)
        self.connection.flush_soon()

    def finish(self) -> None:
        """End the call with OK."""
        self.fail(OK, "")


class _ServerProtocol(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: H2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._time: Callable[[], float] = self._loop.time
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self._goaway_sent_at: float | None = None
        self._served = False
        self._busy_at = self._time()
        self.grpc = GrpcConnection(server.memo, server.limits, self._time(), partial(H2ServerCall, self))
        self.flushing = False
        self._events: deque[Event[H2ServerCall]] = deque()
        """Received bytes that wait for their turn."""
        self._going_on = self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections.add(self)
        self.flush_soon()
        self._server.connection_limiter.add(self)

    def data_received(self, data: bytes) -> None:
        self.grpc.receive(data, self._time())
        if not self._going_on:
            self._handle_pending()
            return
        self._events.extend(self.grpc.take_events())
        if len(self._events) > _MOST_WAITING and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _handle_pending(self) -> None:
        # What is said while this is handled leaves at its end. Not one turn later: that would cost the loop a turn of its own.
        self._going_on = False
        scheduled, self.flushing = self.flushing, True
        self._handle()
        if not scheduled:
            self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.grpc.pause()

    def resume_writing(self) -> None:
        self.grpc.resume()
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._server.connections.discard(self)
        self._server.connection_limiter.remove(self)
        self.grpc.lost()
        self._handle(sys.maxsize)
        if self._deadline is not None:
            self._deadline.cancel()

    @property
    def names(self) -> frozenset[str]:
        """Those of the client's certificate."""
        return names_of(self._transport.get_extra_info("peercert"))

    @property
    def idle(self) -> tuple[bool, float] | None:
        """As a `LimitedConnection` of the port."""
        return None if self.grpc.busy else (self._served, self._busy_at)

    def drain(self) -> None:
        """Ask the client to open no more calls; closes by itself when the open ones are done."""
        self.grpc.drain()
        self.flush_soon()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._goaway_sent_at is not None and now - self._goaway_sent_at > _GOAWAY_GRACE_S:
            self._transport.abort()
            return
        self.grpc.tick(now)
        if self.grpc.busy:
            self._busy_at = now
        self.flush_soon()

    def flush_soon(self) -> None:
        """Write what there is at the end of this turn of the loop."""
        if not self.flushing:
            self.flushing = True
            self._loop.call_soon(self._flush)

    def _handle(self, most: int = STEPS_PER_ITERATION) -> None:
        """The next few events. The others follow in the next turn."""
        events = self._events
        events.extend(self.grpc.take_events())
        for _ in range(min(most, len(events))):
            event = events.popleft()
            call = event.call
            if type(event) is Opened:
                self._open(call)
                continue
            handler = call.handler
            if handler is None:
                continue
            try:
                if type(event) is Message:
                    handler.message(event.data)
                elif type(event) is Cut:
                    call.handler = None
                    handler.ended(cancelled=True)
                else:
                    handler.ended(cancelled=False)
            except Exception as error:  # noqa: BLE001 - a top-level guard: the call fails, its neighbours go on
                self._on_handler_error(call, handler, error)
        if events:
            if not self._going_on:
                self._going_on = True
                self._loop.call_soon(self._handle_pending)
        elif self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _open(self, call: H2ServerCall) -> None:
        open_call = self._server.methods.get(call.head.path)
        if open_call is None:
            self.grpc.finish(call, UNIMPLEMENTED, "unknown method")
            return
        self._served, self._busy_at = True, self._time()
        try:
            call.handler = open_call(call)
        except Exception as error:  # noqa: BLE001 - a top-level guard: the call fails, its neighbours go on
            self._on_handler_error(call, None, error)
        if call.deadline is not None and (self._deadline is None or call.deadline < self._deadline.when()):
            self._await_deadline()

    def _on_handler_error(self, call: H2ServerCall, handler: CallHandler | None, error: Exception) -> None:
        """Handle a method that raised: the client learns no more than that, the log has the reason."""
        self._loop.call_exception_handler({"message": f"{call.head.path} failed", "exception": error, "protocol": self})
        call.fail(INTERNAL, "internal error")
        if handler is not None:
            with contextlib.suppress(Exception):
                handler.ended(cancelled=True)

    def _await_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        soonest = self.grpc.next_deadline
        if soonest is not None:
            self._deadline = self._loop.call_at(max(soonest, self._time() + _DEADLINE_GRAIN_S), self._expire)

    def _expire(self) -> None:
        self.grpc.expire(self._time())
        self._await_deadline()
        self.flush_soon()

    def _flush(self) -> None:
        self.flushing = False
        if not self._going_on:
            self._handle()
        transport = self._transport
        data = self.grpc.take()
        if transport.is_closing() or self._goaway_sent_at is not None:
            return
        if data:
            transport.write(data)
        if self.grpc.over:
            # Not a close: with bytes of the peer still unread, the kernel would reset the connection and our last word be lost.
            self._goaway_sent_at = self._time()
            if transport.can_write_eof():
                transport.write_eof()
            else:
                transport.close()  # TLS says goodbye itself
        elif transport.get_write_buffer_size() > self._server.limits.max_unsent_bytes:
            transport.abort()

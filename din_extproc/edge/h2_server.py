"""gRPC over our own wire: an asyncio server on TCP and Unix sockets that hands calls to the methods of a table.

Rule: one write per turn of the loop and connection, however many calls have something to say; a method that raises ends its own call only.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable, Mapping
from typing import cast

from din_extproc.edge.services import Method, Taker
from din_extproc.wire.grpc import INTERNAL, UNIMPLEMENTED, Call, Cut, GrpcConnection, Message, Opened, read_head
from din_extproc.wire.header_block import Memo
from din_extproc.wire.limits import Limits

_TICK_S = 1.0
_HIGH_WATER = 1 << 20
_DEADLINE_GRAIN_S = 0.01
_BACKLOG = 1024
_POLL_S = 0.02
_LAST_BATCH_S = 1.0
"""How long a stopping server still takes what clients of lasting calls (access logs) have buffered."""
_GOODBYE_S = 2.0
"""How long a peer may take to close after our last word."""


class H2Server:
    """Serves a table of methods by path.

    Args:
        methods: see `edge.services.methods`.
        limits: what one connection may use.
    """

    def __init__(self, methods: Mapping[str, Method], *, limits: Limits | None = None) -> None:
        self.methods = methods
        self.limits = limits or Limits()
        self.memo = Memo(read_head)
        self.connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._paths: list[str] = []
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def calls(self) -> int:
        """How many calls are open, over all connections."""
        return sum(connection.grpc.calls for connection in self.connections)

    async def listen(self, address: str) -> str:
        """Accept connections at `host:port` (port 0: a free one) or `unix:/path` (a stale socket there is replaced).

        Returns:
            The address that is listened on, with the real port.

        Raises:
            OSError: it can't be bound.
        """
        loop = asyncio.get_running_loop()
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            _remove_socket(path)
            server = await loop.create_unix_server(lambda: _Connection(self), path, backlog=_BACKLOG)
            self._paths.append(path)
        else:
            host, _, port = address.rpartition(":")
            server = await loop.create_server(lambda: _Connection(self), host.strip("[]"), int(port), backlog=_BACKLOG)
            address = f"{host}:{server.sockets[0].getsockname()[1]}"
        self._servers.append(server)
        if self._ticking is None:
            self._tick()
        return address

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, let open calls end for `grace_s` seconds at most, then close every connection."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + grace_s
        for server in self._servers:
            server.close()
        for path in self._paths:
            _remove_socket(path)
        self._servers.clear()
        self._paths.clear()
        for connection in list(self.connections):
            connection.drain()
        await self._until(lambda connection: connection.at_rest, latest)
        if any(connection.lasting for connection in self.connections):
            await self._until(lambda connection: not connection.lasting, min(latest, loop.time() + _LAST_BATCH_S))
        for connection in list(self.connections):
            connection.end_lasting()
        await self._until(lambda _: False, min(latest, loop.time() + _GOODBYE_S))
        for connection in list(self.connections):
            connection.abort()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _until(self, done: Callable[["_Connection"], bool], latest: float) -> None:
        """Wait until every connection is `done` or gone, or `latest` has come."""
        loop = asyncio.get_running_loop()
        while not all(done(connection) for connection in self.connections) and loop.time() < latest:  # noqa: ASYNC110 - only at the end
            await asyncio.sleep(_POLL_S)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(_TICK_S, self._tick)
        now = loop.time()
        for connection in list(self.connections):
            connection.tick(now)


class _Sink:
    """The sending half of one call (`edge.session.Sink`)."""

    __slots__ = ("call", "connection", "method", "taker")

    def __init__(self, connection: "_Connection", call: Call, method: Method) -> None:
        self.connection = connection
        self.call = call
        self.method = method
        self.taker: Taker | None = None

    def send(self, message: bytes) -> None:
        connection = self.connection
        connection.grpc.send(self.call, message)
        if not connection.flushing:
            connection.flush_soon()

    def fail(self, status: int, detail: str) -> None:
        self.connection.grpc.finish(self.call, status, detail)
        self.connection.flush_soon()


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: H2Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._time: Callable[[], float] = self._loop.time
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self._said_goodbye: float | None = None
        self.lasting: set[_Sink] = set()
        self.grpc = GrpcConnection(server.memo, server.limits, self._time())
        self.flushing = False

    # -- what the loop tells -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections.add(self)
        self.flush_soon()

    def data_received(self, data: bytes) -> None:
        self.grpc.receive(data, self._time())
        self._handle()
        if not self.flushing:
            self.flush_soon()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.grpc.pause()

    def resume_writing(self) -> None:
        self.grpc.resume()
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._server.connections.discard(self)
        self.grpc.lost()
        self._handle()
        if self._deadline is not None:
            self._deadline.cancel()

    # -- what the server asks ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask the client to open no more calls; closes by itself when the open ones are done."""
        self.grpc.drain()
        self.flush_soon()

    @property
    def at_rest(self) -> bool:
        """The client knows that it may open no more calls, and none is open but lasting ones."""
        return self.grpc.warned and self.grpc.calls == len(self.lasting)

    def end_lasting(self) -> None:
        """End the calls that their client would never end."""
        for sink in list(self.lasting):
            self._conclude(sink, cancelled=sink.method.stays_open)
        self.flush_soon()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._said_goodbye is not None and now - self._said_goodbye > _GOODBYE_S:
            self._transport.abort()
            return
        self.grpc.tick(now)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Write what there is at the end of this turn of the loop."""
        if not self.flushing:
            self.flushing = True
            self._loop.call_soon(self._flush)

    # -- calls ---------------------------------------------------------------------------------------------------------------------

    def _handle(self) -> None:
        for event in self.grpc.take_events():
            kind = type(event)
            sink: _Sink | None = event.call.owner
            if kind is Message:
                if sink is not None:
                    self._message(sink, cast("Message", event).data)
            elif kind is Opened:
                self._open(event.call)
            elif sink is not None and (kind is Cut or not sink.method.stays_open):
                self._conclude(sink, cancelled=kind is Cut)

    def _open(self, call: Call) -> None:
        method = self._server.methods.get(call.head.path)
        if method is None:
            self.grpc.finish(call, UNIMPLEMENTED, "unknown method")
            return
        call.owner = sink = _Sink(self, call, method)
        try:
            sink.taker = method.take(sink)
        except Exception as error:  # noqa: BLE001 - a top-level guard: the call fails, its neighbours go on
            self._broken(sink, error)
            return
        if method.lasts:
            self.lasting.add(sink)
        if call.deadline is not None and (self._deadline is None or call.deadline < self._deadline.when()):
            self._await_deadline()

    def _message(self, sink: _Sink, data: bytes) -> None:
        taker = sink.taker
        if taker is None or sink.call.finishing:
            return
        try:
            taker.message(data)
        except Exception as error:  # noqa: BLE001 - a top-level guard: the call fails, its neighbours go on
            self._broken(sink, error)

    def _conclude(self, sink: _Sink, *, cancelled: bool) -> None:
        taker = sink.taker
        if taker is None:
            return
        try:
            taker.ended(cancelled=cancelled)
        except Exception as error:  # noqa: BLE001 - a top-level guard: the call fails, its neighbours go on
            self._broken(sink, error)
            return
        self._let_go(sink)
        self.grpc.finish(sink.call)

    def _broken(self, sink: _Sink, error: Exception) -> None:
        """A method raised: the client is told no more than that, the operator everything."""
        self._loop.call_exception_handler({"message": f"{sink.call.head.path} failed", "exception": error, "protocol": self})
        self.grpc.finish(sink.call, INTERNAL, "internal error")
        taker = sink.taker
        self._let_go(sink)
        if taker is not None:
            with contextlib.suppress(Exception):
                taker.ended(cancelled=True)

    def _let_go(self, sink: _Sink) -> None:
        sink.call.owner = sink.taker = None
        if sink.method.lasts:
            self.lasting.discard(sink)

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
        self._handle()
        transport = self._transport
        if transport.is_closing():
            return
        data = self.grpc.take()
        if data:
            transport.write(data)
        if self.grpc.over and self._said_goodbye is None:
            # Not a close: with bytes of the peer still unread, the kernel would reset the connection and our last word be lost.
            self._said_goodbye = self._time()
            transport.write_eof()
        elif transport.get_write_buffer_size() > self._server.limits.max_unsent_bytes:
            transport.abort()


def _remove_socket(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116 - a path from an address
            os.unlink(path)  # noqa: PTH108 - as above

"""gRPC services over grpcio: the transport that is slow, complete and written by others.

Rule: nothing is decided here. ext_proc messages go to a `Session`, access log messages to a callback, health says what its owner said.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from din_extproc._proto.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from din_extproc.edge.session import Conductor, Session
from din_extproc.wire.limits import MESSAGE_OVERHEAD_BYTES

_STATUSES = {code.value[0]: code for code in grpc.StatusCode}
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_END = object()


class Service(Protocol):
    """What a `GrpcioServer` serves."""

    name: str
    """The full gRPC service name."""

    def methods(self) -> dict[str, Any]:
        """Handlers of grpcio, by method name."""

    async def drain(self) -> None:
        """Return when nothing of it runs any more. Ends what would not end by itself."""


class ExtProcService:
    """`ExternalProcessor`: each stream is a `Session`."""

    name = "envoy.service.ext_proc.v3.ExternalProcessor"

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def methods(self) -> dict[str, Any]:
        """The one method."""
        return {"Process": grpc.stream_stream_rpc_method_handler(self._process)}

    async def drain(self) -> None:
        """Wait for the last stream's end."""
        await self._idle.wait()

    async def _process(self, _requests: Any, context: Any) -> None:
        """Write replies as they come, while another task reads.

        A client that goes away looks, for a moment, like one that has said all: grpcio does not tell them apart in time.
        """
        replies = _Replies()
        session = Session(replies, self._conductor)
        self._streams += 1
        self._idle.clear()
        reader = asyncio.create_task(_read(context, session, replies))
        try:
            while (reply := await replies.next()) is not _END:
                if isinstance(reply, bytes):
                    await context.write(reply)
                else:
                    await context.abort(*reply)
            await reader
            session.ended(cancelled=False)
        finally:
            reader.cancel()
            session.ended(cancelled=True)
            self._streams -= 1
            if not self._streams:
                self._idle.set()


async def _read(context: Any, session: Session, replies: "_Replies") -> None:
    """Hand over each message until the peer has said all."""
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            session.message(message)
    finally:
        replies.end()


class _Replies:
    """The sink of one call: what is to be written, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.next = self._queue.get

    def send(self, message: bytes) -> None:
        self._queue.put_nowait(message)

    def fail(self, status: int, detail: str) -> None:
        self._queue.put_nowait((_STATUSES[status], detail))

    def end(self) -> None:
        self._queue.put_nowait(_END)


class AccessLogService:
    """`AccessLogService`: each serialised `StreamAccessLogsMessage` goes to the callback, which must not raise.

    `linger_s`: how long a drain leaves Envoy time to deliver what it still holds (its `buffer_flush_interval`).
    """

    name = "envoy.service.accesslog.v3.AccessLogService"

    def __init__(self, received: Callable[[bytes], None], *, linger_s: float = 1.0) -> None:
        self._received = received
        self._linger_s = linger_s
        self._readers: set[asyncio.Task[None]] = set()

    def methods(self) -> dict[str, Any]:
        """The one method."""
        return {"StreamAccessLogs": grpc.stream_unary_rpc_method_handler(self._stream)}

    async def drain(self) -> None:
        """Give Envoy time to deliver, then end its streams, which it keeps open for ever."""
        if self._readers:
            await asyncio.sleep(self._linger_s)
        for reader in self._readers:
            reader.cancel()

    async def _stream(self, messages: AsyncIterator[bytes], _context: Any) -> bytes:
        reader = asyncio.create_task(self._read(messages))
        self._readers.add(reader)
        try:
            await asyncio.wait([reader])
        finally:
            reader.cancel()
            self._readers.discard(reader)
        if not reader.cancelled():
            reader.result()
        return StreamAccessLogsResponse().SerializeToString()

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            self._received(message)


class HealthService:
    """`grpc.health.v1`: one status for the whole server, also under each service's own name. Starts as NOT_SERVING."""

    name = "grpc.health.v1.Health"

    def __init__(self, *services: str) -> None:
        self._names = frozenset({"", *services})
        self._serving = False
        self._drained = False
        self._changed = asyncio.Event()

    def switch(self, *, serving: bool) -> None:
        """Say from now on that the server takes work, or that it does not."""
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def methods(self) -> dict[str, Any]:
        """Ask once, or be told."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def drain(self) -> None:
        """NOT_SERVING from now on, and every watch ends."""
        self._drained = True
        self.switch(serving=False)

    def _status(self, request: bytes) -> "HealthCheckResponse.ServingStatus":
        if HealthCheckRequest.FromString(request).service not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._serving else HealthCheckResponse.NOT_SERVING

    async def _check(self, request: bytes, context: Any) -> bytes:
        status = self._status(request)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """The status now and after each change, until the drain."""
        said = None
        while True:
            changed = self._changed
            status = self._status(request)
            if status != said:
                said = status
                yield HealthCheckResponse(status=status).SerializeToString()
            if self._drained:
                return
            await changed.wait()


class GrpcioServer:
    """Services on one or more addresses. They are drained in the order they are given in."""

    def __init__(self, services: Sequence[Service], *, max_body_bytes: int) -> None:
        limit = max_body_bytes + MESSAGE_OVERHEAD_BYTES
        self._services = services
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
                *_KEEPALIVE,
            )
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(each.name, each.methods()) for each in services])

    async def start(self, *addresses: str) -> list[int]:
        """Listen on `host:port` (port 0: a free one) and `unix:/path`. Returns the ports, in order; 1 stands for a Unix socket.

        Raises:
            OSError: an address is taken or is none.
        """
        ports = []
        for address in addresses:
            try:
                ports.append(self._server.add_insecure_port(address))
            except RuntimeError as error:
                raise OSError(f"can't listen on {address}") from error
        await self._server.start()
        return ports

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, drain the services, and cut off what still runs after `grace_s` seconds."""
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for service in self._services:
                    await service.drain()
        await stopping

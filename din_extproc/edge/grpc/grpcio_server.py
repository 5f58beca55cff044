"""gRPC over grpcio: the transport that is slow, complete and written by others. It carries the same services as our own wire.

Rule: nothing is decided here; messages go to a service's handler, and what it answers goes back.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from din_extproc.edge.connection_limiter import compute_max_connections
from din_extproc.edge.grpc.services import GrpcService, OpenCall
from din_extproc.edge.tls import HANDSHAKE_S, ReloadedFiles, ServerFiles, TlsAddress, server_context
from din_extproc.wire.limits import MESSAGE_OVERHEAD_BYTES

_STATUSES = {code.value[0]: code for code in grpc.StatusCode}
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_END = object()
_END_OF_CALL = object()


class GrpcioServer:
    """Services on one or more addresses. They are drained in the order they are given in.

    Args:
        services: what is served.
        max_body_bytes: the largest body that a message must be able to carry.
    """

    def __init__(self, services: Sequence[GrpcService], *, max_body_bytes: int) -> None:
        limit = max_body_bytes + MESSAGE_OVERHEAD_BYTES
        self._services = services
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
                ("grpc.max_allowed_incoming_connections", compute_max_connections()),
                *_KEEPALIVE,
            )
        )
        self._server.add_generic_rpc_handlers(
            [
                # On the wire every kind of method is a stream of messages each way: one handler fits all.
                grpc.method_handlers_generic_handler(
                    service.name,
                    {name: grpc.stream_stream_rpc_method_handler(_make_handler(opener)) for name, opener in service.methods().items()},
                )
                for service in services
            ]
        )

    async def start(self, *addresses: str | TlsAddress) -> list[int]:
        """Listen on `host:port` (port 0: a free one) and `unix:/path`. Returns the ports, in order; 1 stands for a Unix socket.

        Raises:
            OSError: an address is taken or is none.
            CertificateUnusable: certificates can't be used.
        """
        ports = []
        for address in addresses:
            try:
                if isinstance(address, str):
                    ports.append(self._server.add_insecure_port(address))
                else:
                    ports.append(self._server.add_secure_port(address.address, _make_credentials(address.files)))
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


def _make_credentials(files: ServerFiles) -> grpc.ServerCredentials:
    """Like `server_context`: each handshake uses what the files hold then."""

    def make() -> grpc.ServerCertificateConfiguration:
        server_context(files, ())
        pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], None if files.client_ca is None else Path(files.client_ca).read_bytes())

    current = ReloadedFiles(files.files, make)
    return grpc.dynamic_ssl_server_credentials(current.now(), current.now, require_client_authentication=files.client_ca is not None)


def _read_names(peer: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The names in the client's certificate, as grpcio tells them: as `names_of` does."""
    names = [*peer.get("x509_common_name", ()), *peer.get("peer_dns", ())]
    names += [urlsplit(uri).path.rpartition(b"/")[2] for uri in peer.get("peer_uri", ())]
    return frozenset(name.decode() for name in names if name)


def _make_handler(open_call: OpenCall) -> Any:
    """Return the handler that grpcio runs for each call of the method."""

    async def serve(_requests: Any, context: Any) -> None:
        """Write answers as they come, while another task reads.

        A client that goes away looks, for a moment, like one that has said all: grpcio does not tell them apart in time.
        """
        metadata = dict(context.invocation_metadata() or ())
        call = _GrpcioServerCall(str(metadata.get("authorization", "")), _read_names(context.auth_context()))
        handler = open_call(call)

        async def read() -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                handler.message(message)
            call.end_stream()

        reader = asyncio.create_task(read())
        try:
            while (answer := await call.next()) is not _END:
                if isinstance(answer, bytes):
                    await context.write(answer)
                elif answer is _END_OF_CALL:
                    handler.ended(cancelled=False)
                else:
                    await context.abort(*answer)
        finally:
            reader.cancel()
            handler.ended(cancelled=True)

    return serve


class _GrpcioServerCall:
    """The sending half of one call: what is to be written, in order."""

    def __init__(self, authorization: str, names: frozenset[str]) -> None:
        self.authorization = authorization
        self.names = names
        self.lost = True
        """grpcio reports a lost connection and a reset stream alike."""
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.next = self._queue.get

    def send(self, message: bytes) -> None:
        """Queue one message."""
        self._queue.put_nowait(message)

    def fail(self, status: int, detail: str) -> None:
        """End the call with this status."""
        self._queue.put_nowait((_STATUSES[status], detail))

    def end_stream(self) -> None:
        """The client has sent its last message: known when everything before it is written."""
        self._queue.put_nowait(_END_OF_CALL)

    def finish(self) -> None:
        """End the call with OK."""
        self._queue.put_nowait(_END)

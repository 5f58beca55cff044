"""The port for Envoy's access log: Fluentd's forward protocol or gRPC, told apart by a connection's first bytes.

Forward protocol (message mode "Forward"): one MessagePack array `[tag, [[time, record], ...]]` after another, without answers.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import msgpack

from din_extproc.edge.connection_limiter import ConnectionLimiter
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import AccessLogService
from din_extproc.edge.tls import TlsAddress

_log = logging.getLogger(__name__)

_PREFACE = b"PRI"
"""First bytes of every HTTP/2 connection (RFC 9113 section 3.4). No MessagePack array begins with `P`."""
_SILENCE_S = 10.0
"""Time until the first bytes of a connection: Envoy connects when it has data to send."""
_MOST_BYTES = 16 << 20
"""Maximum size of a Fluentd message: twice Envoy's buffer."""
_MESSAGE_BYTES = 1 << 20
"""Maximum size of a gRPC message."""
_LINGER_S = 1.0
"""Time for Envoy to deliver buffered entries at stop: its flush interval."""

Entries = Callable[[str, list[Any]], None]


class AccessLogPort:
    """Receiver of access logs at one address. Callbacks must not raise.

    Args:
        on_message: Called with each serialised `StreamAccessLogsMessage`.
        on_entries: Called with the tag and the entries `[time, record]` of each Fluentd message.
        most: Maximum connections; None: by the open-file limit.
    """

    def __init__(self, on_message: Callable[[bytes], None], on_entries: Entries, most: int | None = None) -> None:
        self._grpc = H2Server([AccessLogService(on_message, linger_s=_LINGER_S)], max_body_bytes=_MESSAGE_BYTES, most=most)
        self._grpc.make_protocol = lambda: _FirstBytes(self)
        self.on_entries = on_entries
        self.limiter = ConnectionLimiter(most)
        self.connections: set[FluentdConnection] = set()

    async def start(self, address: str | TlsAddress) -> int:
        """Listen on `host:port` or `unix:/path`. Return the port.

        Raises:
            OSError: The address is in use or invalid.
            CertificateUnusable: The certificates are unusable.
        """
        [port] = await self._grpc.start(address)
        return port

    async def stop(self) -> None:
        """Stop listening, wait for Envoy to deliver buffered entries, and close the connections."""
        if self.connections:
            await asyncio.sleep(_LINGER_S)
        await self._grpc.stop(2 * _LINGER_S)
        for connection in list(self.connections):
            connection.abort()

    def grpc_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new gRPC connection."""
        return self._grpc.connection()


class _FirstBytes(asyncio.Protocol):
    """Connection before its first bytes."""

    def __init__(self, port: AccessLogPort) -> None:
        self._port = port
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self.idle = (False, self._loop.time())
        self._waiting = self._loop.call_later(_SILENCE_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first bytes."""
        self._transport = cast("asyncio.Transport", transport)
        self._port.limiter.add(self)

    def data_received(self, data: bytes) -> None:
        """Select the protocol by the first bytes."""
        self._waiting.cancel()
        grpc = data[: len(_PREFACE)] == _PREFACE[: len(data)]
        chosen = cast("asyncio.Protocol", self._port.grpc_protocol() if grpc else FluentdConnection(self._port))
        self._port.limiter.remove(self)
        self._transport.set_protocol(chosen)
        chosen.connection_made(self._transport)
        chosen.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Forget the connection."""
        self._waiting.cancel()
        self._port.limiter.remove(self)

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()


class FluentdConnection(asyncio.Protocol):
    """Fluentd connection of one Envoy."""

    def __init__(self, port: AccessLogPort) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MOST_BYTES)
        self._transport: asyncio.Transport
        self._last = self._loop.time()

    @property
    def idle(self) -> tuple[bool, float]:
        """Return the idle state (see `LimitedConnection`)."""
        return True, self._last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._port.connections.add(self)
        self._port.limiter.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass complete messages to the callback."""
        self._last = self._loop.time()
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                self._port.on_entries(*_split_message(message))
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            _log.warning("access log: connection closed: not Fluentd's forward protocol: %s", error or type(error).__name__)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Forget the connection."""
        self._port.connections.discard(self)
        self._port.limiter.remove(self)

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()


def _split_message(message: object) -> tuple[str, list[Any]]:
    """Return tag and entries of one message."""
    match message:
        case [str(tag), list(entries), *_]:
            return tag, entries
    raise ValueError("neither a tag nor a list of entries")

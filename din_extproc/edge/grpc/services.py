"""The interface of a gRPC service for the transports, and the services for the access log and for health.

Rule: a method is a function from a call to the handler of its messages; the handler ends its call itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from google.protobuf.message import DecodeError

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from din_extproc._proto.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

INVALID_ARGUMENT = 3
NOT_FOUND = 5

_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
_NOT_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN).SerializeToString()
_LOGS_TAKEN: bytes = StreamAccessLogsResponse().SerializeToString()


class ServerCall(Protocol):
    """The sending half of one call. Its methods neither block nor raise; after the call's end they do nothing."""

    @property
    def authorization(self) -> str:
        """The call's `authorization` metadata, "" without it."""

    @property
    def names(self) -> frozenset[str]:
        """The names in the client's certificate; empty without one."""

    @property
    def lost(self) -> bool:
        """Whether the call's connection is gone, as far as that is known: True when it may be."""

    def send(self, message: bytes) -> None:
        """Queue one serialised message."""

    def fail(self, status: int, detail: str) -> None:
        """End the call with a gRPC status other than OK."""

    def finish(self) -> None:
        """End the call with OK."""


class CallHandler(Protocol):
    """Handles what one call brings."""

    def message(self, data: bytes) -> None:
        """Handle one whole message."""

    def ended(self, *, cancelled: bool) -> None:
        """The client has sent its last message (False), or the call is gone (True); perhaps first the one, then the other."""


OpenCall = Callable[[ServerCall], CallHandler]
"""Makes the handler of a new call of one method."""


class GrpcService(Protocol):
    """A service that an `H2Server` can serve."""

    name: str
    """The full gRPC service name."""

    def methods(self) -> Mapping[str, OpenCall]:
        """Return what opens the calls, by method name."""

    async def drain(self) -> None:
        """Return when nothing of it runs any more. Ends what would not end by itself."""


class AccessLogService:
    """`AccessLogService`: each serialised `StreamAccessLogsMessage` goes to the callback, which must not raise.

    `linger_s`: how long a drain leaves Envoy time to deliver what it still holds (its `buffer_flush_interval`).
    """

    name = "envoy.service.accesslog.v3.AccessLogService"

    def __init__(self, received: Callable[[bytes], None], *, linger_s: float = 1.0) -> None:
        self._received = received
        self._linger_s = linger_s
        self._streams: set[_AccessLogStream] = set()

    def methods(self) -> Mapping[str, OpenCall]:
        """The one method."""
        return {"StreamAccessLogs": lambda call: _AccessLogStream(call, self._received, self._streams)}

    async def drain(self) -> None:
        """Give Envoy time to deliver, then end its streams, which it keeps open for ever."""
        if self._streams:
            await asyncio.sleep(self._linger_s)
        for stream in list(self._streams):
            stream.ended(cancelled=False)


class _AccessLogStream:
    """One stream of log messages: many in, one empty answer at the end."""

    __slots__ = ("_call", "_streams", "message")

    def __init__(self, call: ServerCall, received: Callable[[bytes], None], streams: set["_AccessLogStream"]) -> None:
        self._call = call
        self._streams = streams
        self.message = received
        streams.add(self)

    def ended(self, *, cancelled: bool) -> None:
        self._streams.discard(self)
        if not cancelled:
            self._call.send(_LOGS_TAKEN)
            self._call.finish()


class HealthService:
    """`grpc.health.v1`: one status for the whole server, also under each service's own name. Starts as NOT_SERVING."""

    name = "grpc.health.v1.Health"

    def __init__(self, *services: str) -> None:
        self._names = frozenset({"", *services})
        self._serving = False
        self._watches: set[_HealthWatchCall] = set()

    def set_serving(self, *, serving: bool) -> None:
        """Say from now on that the server takes work, or that it does not."""
        if serving != self._serving:
            self._serving = serving
            for watch in list(self._watches):
                watch.send_status()

    def methods(self) -> Mapping[str, OpenCall]:
        """Ask once, or be told."""
        return {
            "Check": lambda call: _HealthCheckCall(call, self),
            "Watch": lambda call: _HealthWatchCall(call, self, self._watches),
        }

    async def drain(self) -> None:
        """NOT_SERVING from now on, and every watch ends."""
        self.set_serving(serving=False)
        for watch in list(self._watches):
            watch.close()

    def status(self, request: bytes) -> bytes:
        """The serialised answer to a serialised `HealthCheckRequest`.

        Raises:
            DecodeError: it is none.
        """
        if HealthCheckRequest.FromString(request).service not in self._names:
            return _UNKNOWN
        return _SERVING if self._serving else _NOT_SERVING


class _HealthCheckCall:
    """Asks once."""

    __slots__ = ("_call", "_health")

    def __init__(self, call: ServerCall, health: HealthService) -> None:
        self._call = call
        self._health = health

    def message(self, data: bytes) -> None:
        try:
            status = self._health.status(data)
        except DecodeError:
            self._call.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        if status is _UNKNOWN:
            self._call.fail(NOT_FOUND, "no such service")
        else:
            self._call.send(status)

    def ended(self, *, cancelled: bool) -> None:
        if not cancelled:
            self._call.finish()


class _HealthWatchCall:
    """Sends the status now and after each change, until the client disconnects or the server drains."""

    __slots__ = ("_call", "_health", "_request", "_watches")

    def __init__(self, call: ServerCall, health: HealthService, watches: set["_HealthWatchCall"]) -> None:
        self._call = call
        self._health = health
        self._watches = watches
        self._request = b""

    def message(self, data: bytes) -> None:
        self._request = data
        try:
            self.send_status()
        except DecodeError:
            self._call.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        self._watches.add(self)

    def send_status(self) -> None:
        """Say how it is now. An unknown service is unknown for good."""
        self._call.send(self._health.status(self._request))

    def ended(self, *, cancelled: bool) -> None:
        if cancelled:
            self._watches.discard(self)

    def close(self) -> None:
        """End the call from this side."""
        self._watches.discard(self)
        self._call.finish()

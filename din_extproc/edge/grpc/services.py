"""The services of the sidecar's port, whichever transport carries them: ext_proc, access log and health.

Rule: a method is a function from the sending half of a call to the taker of its messages; the taker ends its call itself.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from google.protobuf.message import DecodeError

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsResponse
from din_extproc._proto.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from din_extproc.edge.grpc.session import INVALID_ARGUMENT, ExtProcSession, HandlerFactory, StreamSink

NOT_FOUND = 5

_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
_NOT_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN).SerializeToString()
_LOGS_TAKEN: bytes = StreamAccessLogsResponse().SerializeToString()


class ServerCall(StreamSink, Protocol):
    """The sending half of one call. Its verbs neither block nor raise; after the call's end they do nothing."""

    @property
    def authorization(self) -> str:
        """What the call's head says of who calls, "" when it says nothing."""

    @property
    def names(self) -> frozenset[str]:
        """The names in the certificate of who calls; empty without one."""

    def finish(self) -> None:
        """End the call with OK."""


class CallHandler(Protocol):
    """Takes what one call brings."""

    def message(self, data: bytes) -> None:
        """One whole message."""

    def ended(self, *, cancelled: bool) -> None:
        """The client has sent its last message (False), or the call is gone (True); perhaps first the one, then the other."""


Take = Callable[[ServerCall], CallHandler]


class GrpcService(Protocol):
    """What an `H2Server` serves."""

    name: str
    """The full gRPC service name."""

    def methods(self) -> Mapping[str, Take]:
        """What takes the calls, by method name."""

    async def drain(self) -> None:
        """Return when nothing of it runs any more. Ends what would not end by itself."""


class ExtProcService:
    """`ExternalProcessor`: each stream is a `ExtProcSession`."""

    name = "envoy.service.ext_proc.v3.ExternalProcessor"

    def __init__(self, conductor: HandlerFactory) -> None:
        self.conductor = conductor
        self.streams = 0
        self.idle = asyncio.Event()

    def methods(self) -> Mapping[str, Take]:
        """The one method."""
        return {"Process": self._process}

    async def drain(self) -> None:
        """Wait for the last stream's end."""
        while self.streams:
            self.idle.clear()
            await self.idle.wait()

    def _process(self, answers: ServerCall) -> CallHandler:
        return _ExtProcStream(answers, self)


class _ExtProcStream(ExtProcSession):
    """A session that is counted, and whose end is the call's end."""

    __slots__ = ("_answers", "_service")

    def __init__(self, answers: ServerCall, service: ExtProcService) -> None:
        super().__init__(answers, service.conductor)
        self._answers: ServerCall | None = answers
        self._service = service
        service.streams += 1

    def ended(self, *, cancelled: bool) -> None:
        answers, self._answers = self._answers, None
        if answers is None:
            return
        service = self._service
        service.streams -= 1
        if not service.streams:
            service.idle.set()
        super().ended(cancelled=cancelled)
        if not cancelled:
            answers.finish()


class AccessLogService:
    """`AccessLogService`: each serialised `StreamAccessLogsMessage` goes to the callback, which must not raise.

    `linger_s`: how long a drain leaves Envoy time to deliver what it still holds (its `buffer_flush_interval`).
    """

    name = "envoy.service.accesslog.v3.AccessLogService"

    def __init__(self, received: Callable[[bytes], None], *, linger_s: float = 1.0) -> None:
        self._received = received
        self._linger_s = linger_s
        self._streams: set[_AccessLogStream] = set()

    def methods(self) -> Mapping[str, Take]:
        """The one method."""
        return {"StreamAccessLogs": lambda answers: _AccessLogStream(answers, self._received, self._streams)}

    async def drain(self) -> None:
        """Give Envoy time to deliver, then end its streams, which it keeps open for ever."""
        if self._streams:
            await asyncio.sleep(self._linger_s)
        for stream in list(self._streams):
            stream.ended(cancelled=False)


class _AccessLogStream:
    """One stream of log messages: many in, one empty answer at the end."""

    __slots__ = ("_answers", "_streams", "message")

    def __init__(self, answers: ServerCall, received: Callable[[bytes], None], streams: set["_AccessLogStream"]) -> None:
        self._answers = answers
        self._streams = streams
        self.message = received
        streams.add(self)

    def ended(self, *, cancelled: bool) -> None:
        self._streams.discard(self)
        if not cancelled:
            self._answers.send(_LOGS_TAKEN)
            self._answers.finish()


class HealthService:
    """`grpc.health.v1`: one status for the whole server, also under each service's own name. Starts as NOT_SERVING."""

    name = "grpc.health.v1.Health"

    def __init__(self, *services: str) -> None:
        self._names = frozenset({"", *services})
        self._serving = False
        self._watches: set[_HealthWatchCall] = set()

    def switch(self, *, serving: bool) -> None:
        """Say from now on that the server takes work, or that it does not."""
        if serving != self._serving:
            self._serving = serving
            for watch in list(self._watches):
                watch.tell()

    def methods(self) -> Mapping[str, Take]:
        """Ask once, or be told."""
        return {
            "Check": lambda answers: _HealthCheckCall(answers, self),
            "Watch": lambda answers: _HealthWatchCall(answers, self, self._watches),
        }

    async def drain(self) -> None:
        """NOT_SERVING from now on, and every watch ends."""
        self.switch(serving=False)
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

    __slots__ = ("_answers", "_health")

    def __init__(self, answers: ServerCall, health: HealthService) -> None:
        self._answers = answers
        self._health = health

    def message(self, data: bytes) -> None:
        try:
            status = self._health.status(data)
        except DecodeError:
            self._answers.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        if status is _UNKNOWN:
            self._answers.fail(NOT_FOUND, "no such service")
        else:
            self._answers.send(status)

    def ended(self, *, cancelled: bool) -> None:
        if not cancelled:
            self._answers.finish()


class _HealthWatchCall:
    """Is told the status now and after each change, until its client goes or the server drains."""

    __slots__ = ("_answers", "_health", "_request", "_watches")

    def __init__(self, answers: ServerCall, health: HealthService, watches: set["_HealthWatchCall"]) -> None:
        self._answers = answers
        self._health = health
        self._watches = watches
        self._request = b""

    def message(self, data: bytes) -> None:
        self._request = data
        try:
            self.tell()
        except DecodeError:
            self._answers.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        self._watches.add(self)

    def tell(self) -> None:
        """Say how it is now. An unknown service is unknown for good."""
        self._answers.send(self._health.status(self._request))

    def ended(self, *, cancelled: bool) -> None:
        if cancelled:
            self._watches.discard(self)

    def close(self) -> None:
        """End the call from this side."""
        self._watches.discard(self)
        self._answers.finish()

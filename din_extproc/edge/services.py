"""What the sidecar's gRPC port serves, whichever transport carries it: the methods by path.

Rule: a method is a function from a sink to the taker of one call's messages; it knows no transport.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from din_extproc._proto.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from din_extproc.edge.session import INVALID_ARGUMENT, Conductor, Session, Sink

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"

NOT_FOUND = 5
_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
_NOT_SERVING: bytes = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN).SerializeToString()


class Taker(Protocol):
    """Takes what one call brings."""

    def message(self, data: bytes) -> None:
        """One whole message."""

    def ended(self, *, cancelled: bool) -> None:
        """The client has sent its last message (False), or the call is gone (True). Called once or more; later calls do nothing."""


class Method(Struct, frozen=True):
    """One gRPC method. After `ended(cancelled=False)` the transport ends the call with OK, unless it `stays_open`."""

    take: Callable[[Sink], Taker]
    lasts: bool = False
    """Its calls are open as long as their client lives: a stopping server does not wait for them, and ends them last."""
    stays_open: bool = False


class Health:
    """Whether this port is fit to be used, for `grpc.health.v1`. Knows the port as a whole ("") and each service by name."""

    def __init__(self, *, serving: bool = True) -> None:
        self._serving = serving
        self._watchers: set[_Watch] = set()
        self.services: frozenset[str] = frozenset()
        """Names of what the port serves besides "", set by whoever puts the table together."""

    @property
    def serving(self) -> bool:
        """What a check is told."""
        return self._serving

    def set(self, *, serving: bool) -> None:
        """Change it, and tell every watcher."""
        if serving != self._serving:
            self._serving = serving
            for watcher in list(self._watchers):
                watcher.tell()

    def answer(self, service: str) -> bytes | None:
        """The serialised `HealthCheckResponse`; None for a service that is not here."""
        if service and service not in self.services:
            return None
        return _SERVING if self._serving else _NOT_SERVING

    def check(self, sink: Sink) -> Taker:
        """The unary method."""
        return _Check(sink, self)

    def watch(self, sink: Sink) -> Taker:
        """The streaming method."""
        return _Watch(sink, self, self._watchers)


class _Check:
    __slots__ = ("_health", "_sink")

    def __init__(self, sink: Sink, health: Health) -> None:
        self._sink = sink
        self._health = health

    def message(self, data: bytes) -> None:
        service = _service(data)
        answer = None if service is None else self._health.answer(service)
        if service is None:
            self._sink.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
        elif answer is None:
            self._sink.fail(NOT_FOUND, "unknown service")
        else:
            self._sink.send(answer)

    def ended(self, *, cancelled: bool) -> None:
        """Nothing is held."""


class _Watch:
    __slots__ = ("_health", "_service", "_sink", "_watchers")

    def __init__(self, sink: Sink, health: Health, watchers: set["_Watch"]) -> None:
        self._sink = sink
        self._health = health
        self._watchers = watchers
        self._service = ""

    def message(self, data: bytes) -> None:
        service = _service(data)
        if service is None:
            self._sink.fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        self._service = service
        self._watchers.add(self)
        self.tell()

    def tell(self) -> None:
        self._sink.send(self._health.answer(self._service) or _UNKNOWN)

    def ended(self, *, cancelled: bool) -> None:
        if cancelled:
            self._watchers.discard(self)


class _AccessLogs:
    __slots__ = ("_sink", "_take")

    def __init__(self, sink: Sink, take: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._take = take

    def message(self, data: bytes) -> None:
        self._take(data)

    def ended(self, *, cancelled: bool) -> None:
        if not cancelled:
            self._sink.send(b"")  # an empty StreamAccessLogsResponse: a client-streaming call has exactly one answer


def methods(conductor: Conductor, health: Health, access_logs: Callable[[bytes], None] | None = None) -> Mapping[str, Method]:
    """The table that a transport serves.

    Args:
        conductor: begins what happens on each ext_proc stream.
        health: told to health checkers.
        access_logs: takes each serialised `StreamAccessLogsMessage`; None: the service is not here.
    """
    table = {
        PROCESS: Method(lambda sink: Session(sink, conductor)),
        CHECK: Method(health.check),
        WATCH: Method(health.watch, lasts=True, stays_open=True),
    }
    if access_logs is not None:
        table[ACCESS_LOGS] = Method(lambda sink: _AccessLogs(sink, access_logs), lasts=True)
    health.services = frozenset(path.split("/")[1] for path in table)
    return table


def _service(request: bytes) -> str | None:
    try:
        service: str = HealthCheckRequest.FromString(request).service
    except DecodeError:
        return None
    return service

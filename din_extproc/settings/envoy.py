"""Settings of the rendered Envoy configuration, so that `din.yaml` is the one place to change them.

Rule: names, units and defaults are those of `control/topology.py`. What Envoy would refuse is refused here, by its name and line.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from din_extproc.control.topology import HealthCheck, Outlier, Retry, SocketAddress, Timeouts
from din_extproc.domain.node import Endpoint
from din_extproc.settings.section import AsTuple, ListenAddress, Section, Text
from din_extproc.settings.tls import EnvoyTlsSection, ListenerTlsSection

_TIMEOUTS, _RETRY, _OUTLIER, _HEALTH = Timeouts(), Retry(), Outlier(), HealthCheck()
_OFF = False
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.*-]*://([A-Za-z0-9.*_-]+|\[[0-9A-Fa-f:.]+\])(:[0-9*]+)?").fullmatch
_PATH = re.compile(r"/[!-~]*").fullmatch

Milliseconds = Annotated[int, Field(ge=1, le=24 * 3_600_000)]
"""Up to a day."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class TimeoutsSection(Section):
    """How long Envoy waits, in milliseconds."""

    message_ms: Milliseconds = _TIMEOUTS.message_ms
    request_ms: Milliseconds = _TIMEOUTS.request_ms
    stream_idle_ms: Milliseconds = _TIMEOUTS.stream_idle_ms
    node_idle_ms: Milliseconds = _TIMEOUTS.node_idle_ms
    connect_ms: Milliseconds = _TIMEOUTS.connect_ms
    total_ms: Annotated[int, Field(ge=0, le=24 * 3_600_000)] = _TIMEOUTS.total_ms

    def timeouts(self) -> Timeouts:
        """For the renderer."""
        return Timeouts(**self.model_dump(), max_message_ms=max(self.message_ms, _TIMEOUTS.max_message_ms))


class RetrySection(Section):
    """Another try on another node."""

    attempts: Annotated[int, Field(ge=0, le=5)] = _RETRY.attempts
    jitter_ms: Milliseconds = _RETRY.jitter_ms
    to_fallback: bool = _RETRY.to_fallback
    statuses: Annotated[tuple[Annotated[int, Field(ge=400, le=599)], ...], AsTuple] = _RETRY.statuses


class OutlierSection(Section):
    """When Envoy ejects a node that it can't connect to, and for how long."""

    consecutive_connect_failures: Count = _OUTLIER.consecutive_connect_failures
    interval_ms: Milliseconds = _OUTLIER.interval_ms
    base_ejection_ms: Milliseconds = _OUTLIER.base_ejection_ms
    max_ejection_percent: Annotated[int, Field(ge=0, le=100)] = _OUTLIER.max_ejection_percent


def _check_path(text: str) -> str:
    if _PATH(text) is None:
        raise ValueError(f"{text!r} is not an absolute path, such as /health")
    return text


class HealthCheckSection(Section):
    """How Envoy asks nodes whether they live."""

    path: Annotated[str, AfterValidator(_check_path)] = _HEALTH.path
    interval_ms: Milliseconds = _HEALTH.interval_ms
    timeout_ms: Milliseconds = _HEALTH.timeout_ms
    unhealthy_after: Count = _HEALTH.unhealthy_after
    healthy_after: Count = _HEALTH.healthy_after

    def health_check(self) -> HealthCheck:
        """For the renderer."""
        return HealthCheck(**self.model_dump())


def off_is_none(value: object) -> object:
    """`false` switches a part off; `true` says too little."""
    if value is _OFF:
        return None
    if value is True:
        raise ValueError("`false`, or a mapping, is expected")
    return value


def _check_origin(text: str) -> str:
    if _ORIGIN(text) is None:
        raise ValueError(f"{text!r} is not an origin, such as https://app.example, https://*.team.example or *")
    return text


def _check_health_path(text: str | None) -> str | None:
    if text is not None and (_check_path(text).startswith("/v1/") or "?" in text):
        raise ValueError(f"{text!r} is a path of the API, or has a query; choose one such as /healthz")
    return text


_ENGINE_HEALTH = "/health"


class CorsSection(Section):
    """Which web pages may call."""

    allow_origins: Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], AsTuple] = ()
    """Exact, with `*` inside, or `*` alone. Empty: none."""


def _check_loopback(address: Endpoint) -> Endpoint:
    if not SocketAddress(address.host, address.port).is_loopback:
        raise ValueError("it can stop Envoy, so it listens on a loopback address such as 127.0.0.1:9901")
    return address


LoopbackAddress = Annotated[ListenAddress, AfterValidator(_check_loopback)]


class EnvoySection(Section):
    """`envoy:`."""

    listener: ListenAddress = Endpoint("0.0.0.0", 10000)
    admin: LoopbackAddress = Endpoint("127.0.0.1", 9901)
    tls: ListenerTlsSection | None = None
    """TLS of the listener. None: plain text."""
    sidecar_tls: EnvoyTlsSection | None = None
    """How Envoy connects to the sidecar's ports that have a `tls`."""
    body_limit_mib: Annotated[int, Field(ge=1, le=1024)] = 32
    timeouts: TimeoutsSection = TimeoutsSection()
    retry: RetrySection = RetrySection()
    outlier: OutlierSection = OutlierSection()
    health_check: Annotated[HealthCheckSection | None, BeforeValidator(off_is_none)] = HealthCheckSection()
    health_path: Annotated[str | None, AfterValidator(_check_health_path), BeforeValidator(off_is_none)] = "/healthz"
    """Load balancers ask the listener here whether it serves, without a key: 200 while a worker answers and Envoy is not draining.
    `/health`, which tools ask of engines, is answered by the worker alone. None: neither."""
    credentials_folder: Text = "credentials"
    """Where the sidecar writes the keys of remote APIs for Envoy (SDS files, mode 0600), relative to the configuration. Both need it."""
    cors: CorsSection = CorsSection()
    access_log_flush_ms: Annotated[int, Field(ge=1, le=10_000)] = 50
    access_log: Literal["fluentd", "grpc"] = "fluentd"
    """How Envoy reports finished exchanges; `fluentd` costs it less CPU. The sidecar takes both at `gateway.access_log`."""

    @property
    def health_paths(self) -> frozenset[str]:
        """Every path at which the worker says that it serves."""
        return frozenset() if self.health_path is None else frozenset({self.health_path, _ENGINE_HEALTH})

    @model_validator(mode="after")
    def _check_paths_apart(self) -> "EnvoySection":
        if self.listener.port == self.admin.port:
            raise ValueError(f"listener and admin can't both have port {self.admin.port}")
        return self

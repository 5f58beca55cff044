"""Wraps Envoy's typed messages the way its extension points want them. Invariant: no decision is made here."""

from datetime import timedelta
from functools import reduce
from typing import Any

import betterproto2
from envoy_data_plane.envoy.config.cluster.v3 import CircuitBreakers, CircuitBreakersThresholds
from envoy_data_plane.envoy.config.core.v3 import Address as EnvoyAddress
from envoy_data_plane.envoy.config.core.v3 import (
    AggregatedConfigSource,
    ApiVersion,
    ConfigSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Pipe,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.core.v3 import SocketAddress as EnvoySocketAddress
from envoy_data_plane.google.protobuf import Any as PackedAny

from din_extproc.control.topology import Address, UnixSocket

_NO_LIMIT = 1 << 20
"""Connections, requests and retries at once: admission is the sidecar's, Envoy's own brake would only surprise."""


def pack_extension(name: str, message: betterproto2.Message) -> TypedExtensionConfig:
    """An extension's name with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=PackedAny.pack(message))


def to_plain(message: betterproto2.Message) -> dict[str, Any]:
    """A message as plain values, with the field names of Envoy's documentation."""
    return message.to_dict(casing=str)  # type: ignore[arg-type] # already snake case: Casing.SNAKE would split `5xx`


def to_duration(value: int) -> timedelta:
    """A protobuf duration."""
    return timedelta(milliseconds=value)


def overwrite_header(name: str, value: str) -> HeaderValueOption:
    """A header that replaces whatever a peer sent under this name, and is left out when its value is empty."""
    return HeaderValueOption(
        header=HeaderValue(key=name, value=value),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def make_ads_source(*, initial_fetch_timeout_ms: int = 0) -> ConfigSource:
    """From the stream of discovery. 0: it is waited for as long as it takes, because there is nothing to serve without it."""
    return ConfigSource(
        ads=AggregatedConfigSource(), resource_api_version=ApiVersion.V3, initial_fetch_timeout=to_duration(initial_fetch_timeout_ms)
    )


def make_address(address: Address) -> EnvoyAddress:
    """Return an address to listen on or to connect to."""
    if isinstance(address, UnixSocket):
        return EnvoyAddress(pipe=Pipe(path=address.path))
    return EnvoyAddress(socket_address=EnvoySocketAddress(address=address.host, port_value=address.port))


def make_unlimited_circuit_breakers() -> CircuitBreakers:
    """Return thresholds that are never reached: admission is the sidecar's."""
    thresholds = CircuitBreakersThresholds(
        max_connections=_NO_LIMIT, max_pending_requests=_NO_LIMIT, max_requests=_NO_LIMIT, max_retries=_NO_LIMIT
    )
    return CircuitBreakers(thresholds=[thresholds])


def renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a plain message whose references to clusters have other names, those in scripts too."""
    if isinstance(value, dict):
        return {key: _rename_in(key, inner, names) for key, inner in value.items()}
    return [renamed(each, names) for each in value] if isinstance(value, list) else value


def _rename_in(key: str, value: Any, names: dict[str, str]) -> Any:
    if key == "cluster_name":
        return names.get(value, value)
    if key == "inline_string":
        return reduce(lambda script, name: script.replace(f'"{name}"', f'"{names[name]}"'), names, value)
    return renamed(value, names)

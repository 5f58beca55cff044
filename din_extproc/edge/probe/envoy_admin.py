"""Client of Envoy's administration interface.

Invariant: each call is one request with a time-out of a few seconds; the caller interprets the response.
"""

import http.client
import re
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import aiohttp
import msgspec

from din_extproc.domain.node import Endpoint, InternalEndpoint

_TIMEOUT_S = 5.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_LISTENERS = r"^listener_manager\.(listener_stopped|total_listeners_active)$"
_DROPPED = re.compile(r"logs_dropped: (\d+)$", re.MULTILINE)


class EnvoyAdminUnreachable(Exception):  # noqa: N818 - it is what the port is
    """Envoy's administration interface did not respond; the message has address and reason."""


class EnvoyAdmin:
    """Administration interface of one Envoy.

    Args:
        address: Its address.
    """

    def __init__(self, address: Endpoint) -> None:
        self._address = address

    def fetch_stats(self, pattern: str) -> dict[str, int]:
        """Return counters and gauges whose names match a regular expression.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        lines = self._fetch("GET", "/stats?" + urlencode({"filter": pattern})).splitlines()
        fields = (line.rpartition(": ") for line in lines)
        return {name: int(value) for name, _, value in fields if value.isdigit()}

    def fetch_server_info(self) -> dict[str, Any]:
        """Return version, state and command line options.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        info: dict[str, Any] = msgspec.json.decode(self._fetch("GET", "/server_info"))
        return info

    def fetch_configuration(self) -> dict[str, Any]:
        """Return the running configuration (`/config_dump`).

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        dump: dict[str, Any] = msgspec.json.decode(self._fetch("GET", "/config_dump"))
        return dump

    def fetch_endpoints(self) -> dict[str, frozenset[str]]:
        """Return the host addresses of every cluster.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        return _parse_endpoints(self._fetch("GET", "/clusters?format=json").encode())

    def fail_health_checks(self) -> None:
        """Fail health checks and close connections after their responses. New connections are still accepted.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        self._fetch("POST", "/healthcheck/fail")

    def close(self) -> None:
        """Close all listeners at once. Open connections and streams continue.

        Envoy's `?graceful` would accept connections during its drain time, ten minutes by default.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        self._fetch("POST", "/drain_listeners")

    def wait_closed(self) -> bool:
        """Return whether all listeners are closed; each thread closes its own shortly after `close`.

        Raises:
            EnvoyAdminUnreachable: Envoy did not respond.
        """
        counts = self.fetch_stats(_LISTENERS)
        return counts.get("listener_manager.listener_stopped", 0) >= counts.get("listener_manager.total_listeners_active", 0)

    def _fetch(self, method: str, path: str) -> str:
        try:
            with urlopen(Request(f"http://{self._address}{path}", method=method), timeout=_TIMEOUT_S) as reply:
                return str(reply.read().decode())
        except (URLError, OSError, http.client.HTTPException) as error:
            raise EnvoyAdminUnreachable(
                f"Envoy's administration at {self._address} does not answer: {getattr(error, 'reason', error)}"
            ) from error


async def fetch_endpoints_once(admin: Endpoint) -> dict[str, frozenset[str]] | None:
    """Return the addresses of every cluster's hosts; None: this Envoy does not answer."""
    url = f"http://{admin}/clusters?format=json"
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as reply:
            return _parse_endpoints(await reply.read())
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return None


class _Socket(msgspec.Struct):
    address: str = ""
    port_value: int = 0


class _Internal(msgspec.Struct):
    server_listener_name: str = ""


class _Address(msgspec.Struct):
    socket_address: _Socket | None = None
    envoy_internal_address: _Internal | None = None

    def __str__(self) -> str:
        if self.envoy_internal_address is not None:
            return str(InternalEndpoint(self.envoy_internal_address.server_listener_name, 0))
        return "" if self.socket_address is None else str(Endpoint(self.socket_address.address, self.socket_address.port_value))


class _Host(msgspec.Struct):
    address: _Address


class _Cluster(msgspec.Struct):
    name: str
    host_statuses: tuple[_Host, ...] = ()


class _Clusters(msgspec.Struct):
    cluster_statuses: tuple[_Cluster, ...] = ()


def _parse_endpoints(body: bytes) -> dict[str, frozenset[str]]:
    found = msgspec.json.decode(body, type=_Clusters).cluster_statuses
    return {each.name: frozenset(filter(None, (str(host.address) for host in each.host_statuses))) for each in found}


class DroppedLogs:
    """Number of access log entries dropped by the local Envoy. Unreachable: the last value stays."""

    def __init__(self, admin: Endpoint) -> None:
        self._url = f"http://{admin}/stats?filter=logs_dropped|entries_lost"
        self._latest = 0
        self.total = 0

    async def count_new(self) -> None:
        """Update the number."""
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(self._url) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return
        now = sum(int(count) for count in _DROPPED.findall(text))
        self.total += now - self._latest if now >= self._latest else now
        self._latest = now

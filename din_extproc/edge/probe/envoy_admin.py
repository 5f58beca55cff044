"""What a running Envoy says and does at its own administration port.

Rule: one question, one answer, a few seconds at most; whoever asks decides what an answer means.
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

_PATIENCE_S = 5.0
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_LISTENERS = r"^listener_manager\.(listener_stopped|total_listeners_active)$"
_DROPPED = re.compile(r"logs_dropped: (\d+)$", re.MULTILINE)


class EnvoyAdminUnreachable(Exception):  # noqa: N818 - it is what the port is
    """Envoy's administration does not answer; the message says where and why."""


class EnvoyAdmin:
    """One Envoy's administration port.

    Args:
        address: Where it listens.
    """

    def __init__(self, address: Endpoint) -> None:
        self._address = address

    def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names match this regular expression.

        Raises:
            Silent: nobody answers.
        """
        lines = self._said("GET", "/stats?" + urlencode({"filter": pattern})).splitlines()
        told = (line.rpartition(": ") for line in lines)
        return {name: int(value) for name, _, value in told if value.isdigit()}

    def server_info(self) -> dict[str, Any]:
        """Version, state, and what it was started with.

        Raises:
            Silent: nobody answers.
        """
        info: dict[str, Any] = msgspec.json.decode(self._said("GET", "/server_info"))
        return info

    def configuration(self) -> dict[str, Any]:
        """Everything that it runs with, as its `/config_dump` says.

        Raises:
            Silent: nobody answers.
        """
        dump: dict[str, Any] = msgspec.json.decode(self._said("GET", "/config_dump"))
        return dump

    def endpoints(self) -> dict[str, frozenset[str]]:
        """The addresses of every cluster's hosts.

        Raises:
            Silent: nobody answers.
        """
        return _endpoints(self._said("GET", "/clusters?format=json").encode())

    def say_goodbye(self) -> None:
        """Health checks fail from now on, and each answer asks its connection to close. New connections are still taken.

        Raises:
            Silent: nobody answers.
        """
        self._said("POST", "/healthcheck/fail")

    def close(self) -> None:
        """Take no more connections: the ports close at once. What is open stays so, streams as long as they last.

        Envoy's `?graceful` would take new ones until its drain time is over, ten minutes by default.

        Raises:
            Silent: nobody answers.
        """
        self._said("POST", "/drain_listeners")

    def closed(self) -> bool:
        """Whether no listener takes connections any more: each thread closes its own, a moment after `close`.

        Raises:
            Silent: nobody answers.
        """
        counts = self.stats(_LISTENERS)
        return counts.get("listener_manager.listener_stopped", 0) >= counts.get("listener_manager.total_listeners_active", 0)

    def _said(self, method: str, path: str) -> str:
        try:
            with urlopen(Request(f"http://{self._address}{path}", method=method), timeout=_PATIENCE_S) as reply:
                return str(reply.read().decode())
        except (URLError, OSError, http.client.HTTPException) as error:
            raise EnvoyAdminUnreachable(
                f"Envoy's administration at {self._address} does not answer: {getattr(error, 'reason', error)}"
            ) from error


async def ask_endpoints(admin: Endpoint) -> dict[str, frozenset[str]] | None:
    """Return the addresses of every cluster's hosts; None: this Envoy does not answer."""
    url = f"http://{admin}/clusters?format=json"
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as reply:
            return _endpoints(await reply.read())
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


def _endpoints(body: bytes) -> dict[str, frozenset[str]]:
    found = msgspec.json.decode(body, type=_Clusters).cluster_statuses
    return {each.name: frozenset(filter(None, (str(host.address) for host in each.host_statuses))) for each in found}


class DroppedLogs:
    """How many access-log entries the Envoy beside this sidecar has dropped, which it alone knows. Silence changes nothing."""

    def __init__(self, admin: Endpoint) -> None:
        self._url = f"http://{admin}/stats?filter=logs_dropped|entries_lost"
        self._latest = 0
        self.total = 0

    async def ask(self) -> None:
        """Once more."""
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(self._url) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return
        now = sum(int(count) for count in _DROPPED.findall(text))
        self.total += now - self._latest if now >= self._latest else now
        self._latest = now

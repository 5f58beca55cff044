"""Client of the registry's HTTP API, used by agents: register, heartbeat, drain, deregister.

Invariant: replicas share one table, so any replica serves a call; the one that responded last is tried first.
"""

from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from din_extproc.domain.membership import Heartbeat, Registration
from din_extproc.edge.registry.forms import BeatForm, LeaveForm, NodeForm
from din_extproc.edge.tls import ClientFiles, ReloadedFiles, client_context

_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_UNKNOWN = 404
_SERVER_ERROR = 500
_OK = range(200, 300)
_LONGEST_REASON = 500


class RegistryUnreachable(Exception):  # noqa: N818 - it says what the registry is
    """No replica responded; the message is the error of the last one."""


class RegistrationRefused(Struct, frozen=True):
    """The registry rejected the call."""

    status: int
    reason: str

    @property
    def unknown(self) -> bool:
        """Return whether the registration is unknown or has expired."""
        return self.status == _UNKNOWN


class RegistrationLease(Struct, frozen=True):
    """A valid registration."""

    lease: str
    warnings: tuple[str, ...] = ()


class HeartbeatAck(Struct, frozen=True):
    """Accepted heartbeat."""

    drain: bool = False
    """The registry requests that the node drains."""


Answer = TypeVar("Answer", RegistrationLease, HeartbeatAck)


class RegistryClient:
    """Registry client of one node.

    Args:
        session: HTTP session.
        addresses: Base URLs of the replicas, without a trailing slash.
        token: Token of the node; "" if the registry requires none.
        tls: CA and client certificate. None: the system's CAs.

    Raises:
        CertificateUnusable: The certificates are unusable.
    """

    def __init__(self, session: aiohttp.ClientSession, addresses: Sequence[str], token: str, tls: ClientFiles | None = None) -> None:
        self._session = session
        self._addresses = list(addresses)
        self._server_name = None if tls is None else tls.server_name
        self._tls = None if tls is None else ReloadedFiles(tls.files, lambda: client_context(tls))
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def register(self, registration: Registration) -> RegistrationLease | RegistrationRefused:
        """Register the node.

        Raises:
            RegistryUnreachable: No replica responded. The other methods raise it too.
        """
        reply = await self._request("POST", "/v1/nodes", NodeForm.of(registration))
        return reply if isinstance(reply, RegistrationRefused) else _decode_reply(reply, RegistrationLease)

    async def heartbeat(self, node_id: str, lease: str, beat: Heartbeat) -> HeartbeatAck | RegistrationRefused:
        """Send a heartbeat."""
        form = BeatForm(lease=lease, **msgspec.structs.asdict(beat))
        reply = await self._request("POST", f"/v1/nodes/{node_id}/heartbeat", form)
        return reply if isinstance(reply, RegistrationRefused) else _decode_reply(reply, HeartbeatAck)

    async def drain(self, node_id: str, lease: str, reason: str) -> RegistrationRefused | None:
        """Drain the node."""
        reply = await self._request("POST", f"/v1/nodes/{node_id}/drain", LeaveForm(reason, lease))
        return reply if isinstance(reply, RegistrationRefused) else None

    async def deregister(self, node_id: str, lease: str, reason: str) -> RegistrationRefused | None:
        """Deregister the node."""
        reply = await self._request("DELETE", f"/v1/nodes/{node_id}", LeaveForm(reason, lease))
        return reply if isinstance(reply, RegistrationRefused) else None

    async def _request(self, method: str, path: str, content: object) -> bytes | RegistrationRefused:
        """Return the body of a successful response, or the rejection. Skip replicas that fail."""
        data, problem = msgspec.json.encode(content), ""
        headers = {**self._headers, "content-type": "application/json"}
        tls = True if self._tls is None else self._tls.now()
        for address in list(self._addresses):
            try:
                async with self._session.request(
                    method,
                    address + path,
                    data=data,
                    headers=headers,
                    timeout=_TIMEOUT,
                    allow_redirects=False,
                    ssl=tls,
                    server_hostname=self._server_name,
                ) as reply:
                    body = await reply.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{address}: {error or type(error).__name__}"
            else:
                if reply.status in _OK:
                    return body
                if reply.status < _SERVER_ERROR:
                    return RegistrationRefused(reply.status, _read_reason(body))
                problem = f"{address}: {reply.status} {_read_reason(body)}"
            self._addresses.append(self._addresses.pop(0))
        raise RegistryUnreachable(problem)


class _RegistryProblem(Struct):
    """Reason in an error body, under any of these names."""

    detail: str = ""


def _read_reason(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_RegistryProblem).detail[:_LONGEST_REASON]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:_LONGEST_REASON].decode("utf-8", "replace").strip()


def _decode_reply(body: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RegistryUnreachable(f"the response is not a registry's; check the registry's address: {error}") from error

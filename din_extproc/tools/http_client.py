"""Requests as any client of the gateway sends them, with what came back and when. For the commands that look at a deployment from outside.

Rule: whatever happens to a request, an `OutsideResponse` says so; only the caller judges it.
"""

import time
from collections.abc import Mapping
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from msgspec import Struct

_LONGEST_BODY = 1 << 20
_KEPT_S = 2.0
"""Connections to a gateway that rest longer are not used again: a request that meets the end of one is lost."""


class OutsideResponse(Struct, frozen=True):
    """What became of one request."""

    status: int
    """0: no answer came."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """At most a mebibyte of it."""
    failure: str = ""
    """Why no answer came, or why it broke off."""
    head_s: float = 0.0
    """From the sending to the answer's head, in seconds."""
    total_s: float = 0.0
    """To the answer's end."""
    began_at: float = 0.0
    """When it was sent: seconds since the epoch, by this machine's clock."""
    arrivals: tuple[tuple[float, int], ...] = ()
    """When how much of the body was here: seconds after the sending, bytes."""

    @property
    def good(self) -> bool:
        """The whole answer came, and it is one."""
        return not self.failure and self.status in range(200, 300)

    @property
    def trouble(self) -> str:
        """What is the matter with one that is not good."""
        return self.failure or f"{self.status}: {self.body[:200].decode(errors='replace')}"


class OutsideClient:
    """One client of one gateway, or of a node behind it. An async context manager.

    Args:
        url: The gateway's, without a path.
        key: The API key; "" for a node, which must not see one.
        timeout_s: For a whole answer.
        tls: How an `https` gateway is trusted; None: as the machine trusts.
    """

    def __init__(self, url: str, key: str, timeout_s: float, tls: SSLContext | None = None) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._timeout = ClientTimeout(total=timeout_s)
        self._tls: SSLContext | bool = True if tls is None else tls
        self._session: ClientSession

    async def __aenter__(self) -> Self:
        # Engines end kept connections after so many requests or seconds, each as it likes: nodes get a connection for each request.
        kept: dict[str, Any] = {"keepalive_timeout": _KEPT_S} if self._key else {"force_close": True}
        self._session = ClientSession(timeout=self._timeout, connector=TCPConnector(ssl=self._tls, limit=0, **kept))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> OutsideResponse:
        """Send one request and read its answer to the end."""
        began_at, began = time.time(), time.perf_counter()
        sent = {**({"authorization": f"Bearer {self._key}"} if self._key else {}), **headers}
        status, came, parts, head_s, failure = 0, {}, bytearray(), 0.0, ""
        arrivals: list[tuple[float, int]] = []
        try:
            async with self._session.request(method, self._url + path, headers=sent, data=body or None) as answer:
                head_s = time.perf_counter() - began
                status, came = answer.status, {name.lower(): value for name, value in answer.headers.items()}
                async for piece in answer.content.iter_any():
                    parts += piece[: _LONGEST_BODY - len(parts)]
                    arrivals.append((time.perf_counter() - began, len(parts)))
        except (TimeoutError, ClientError, OSError) as error:
            failure = str(error) or type(error).__name__
        return OutsideResponse(
            status=status,
            headers=came,
            body=bytes(parts),
            failure=failure,
            head_s=head_s,
            total_s=time.perf_counter() - began,
            began_at=began_at,
            arrivals=tuple(arrivals),
        )

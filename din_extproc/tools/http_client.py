"""An HTTP client that records answers and their timings, for commands that measure a deployment from outside.

Rule: every outcome of a request is an `OutsideResponse`; the caller judges it.
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
"""Idle seconds after which a connection is not used again, because the server may be closing it."""


class OutsideResponse(Struct, frozen=True):
    """The outcome of one request."""

    status: int
    """The HTTP status; 0: no answer."""
    headers: Mapping[str, str]
    """Response headers, names in lower case."""
    body: bytes
    """The first mebibyte of the body."""
    failure: str = ""
    """Why there is no complete answer; "" otherwise."""
    head_s: float = 0.0
    """Seconds from sending to the response headers."""
    total_s: float = 0.0
    """Seconds to the end of the answer."""
    began_at: float = 0.0
    """When the request was sent: seconds since the epoch, this machine's clock."""
    arrivals: tuple[tuple[float, int], ...] = ()
    """Body bytes received so far, with seconds after sending."""

    @property
    def good(self) -> bool:
        """Whether the answer is complete and successful."""
        return not self.failure and self.status in range(200, 300)

    @property
    def trouble(self) -> str:
        """Return the error of an answer that is not successful."""
        return self.failure or f"{self.status}: {self.body[:200].decode(errors='replace')}"


class OutsideClient:
    """A client of one gateway or node. An async context manager.

    Args:
        url: The URL without a path.
        key: The API key; "" for a node, which must not get one.
        timeout_s: Time limit of a complete answer.
        tls: How an `https` server is trusted; None: by the machine's trust store.
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

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> OutsideResponse:
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

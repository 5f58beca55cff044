"""HTTP server with routes, time-outs and TLS for the registry, the admin pages and the agent's health.

Invariant: every error is a problem document (RFC 9457), including errors outside of handlers. A connection has limited time for its
request and for reading the response, so slow clients hold no connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import web
from msgspec import Struct

from din_extproc.edge.connection_limiter import ConnectionLimiter
from din_extproc.edge.tls import TlsAddress, server_context
from din_extproc.edge.tls_listener import TlsListener, listen

_log = logging.getLogger(__name__)

_CODES = {400: "invalid_request", 404: "path_not_found", 405: "method_not_allowed", 413: "request_too_large", 500: "internal_error"}
"""Error codes of responses that no handler has produced."""
_SERVER_ERROR = 500
_SERVER = "din"
_BACKLOG = 256


class HttpTimeouts(Struct, frozen=True):
    """Time limits of a connection in seconds."""

    head_s: float = 10.0
    """Time until the head of the first request is complete."""
    exchange_s: float = 30.0
    """Time from the head of a request to the end of its response, including the request body."""
    idle_s: float = 75.0
    """Time from a response to the end of the next head; longer than the longest interval between heartbeats."""


class HttpProblem(Struct, frozen=True, kw_only=True):
    """Problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str

    def response(self, allow: str | None = None) -> web.Response:
        """Return the HTTP response."""
        headers = {} if allow is None else {"allow": allow}
        body = msgspec.json.encode(self) + b"\n"
        return web.Response(body=body, status=self.status, content_type="application/problem+json", headers=headers)


def refuse_form(section: str) -> web.Response:
    """Return the 401 response for a request without a key of this section."""
    detail = f"`authorization: Bearer` with a key of {section} is expected"
    answer = HttpProblem(
        type="urn:din-extproc:http:invalid_api_key", title=detail, status=401, detail=detail, code="invalid_api_key"
    ).response()
    answer.headers["www-authenticate"] = "Bearer"
    return answer


class HttpPort:
    """HTTP server on one port.

    Args:
        routes: Routes of the server.
        max_body_bytes: Maximum bytes of a request body.
        unlimited_paths: Paths without a time limit; their handlers deal with slow readers.
        timeouts: Time limits of a connection.
        max_connections: Maximum connections; None: by the process's limit of open files.
    """

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        *,
        max_body_bytes: int = 1024,
        unlimited_paths: frozenset[str] = frozenset(),
        timeouts: HttpTimeouts | None = None,
        max_connections: int | None = None,
    ) -> None:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_explain_errors])
        app.router.add_routes(routes)
        app.on_response_prepare.append(_remove_server_header)
        self._runner = _Runner(app, unlimited_paths, timeouts or HttpTimeouts(), ConnectionLimiter(max_connections))
        self._listening: asyncio.Server | TlsListener | None = None

    async def start(self, where: str | TlsAddress) -> None:
        """Serve at `host:port`.

        Raises:
            OSError: The address is in use.
            CertificateUnusable: The certificates are unusable.
        """
        await self._runner.setup()
        address, tls = (where, None) if isinstance(where, str) else (where.address, server_context(where.files, ("http/1.1",)))
        host, _, port = address.rpartition(":")
        self._listening, _ = await listen(cast("web.Server", self._runner.server), host, int(port), tls, _BACKLOG)

    async def stop(self) -> None:
        """Stop the server."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


@web.middleware
async def _explain_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Convert plain-text errors of aiohttp to problem documents."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _build_problem(error.status, error.reason).response(error.headers.get("allow"))


async def _remove_server_header(_request: web.Request, response: web.StreamResponse) -> None:
    """Replace the `server` header, which discloses software and versions."""
    response.headers["server"] = _SERVER


def _build_problem(status: int, detail: str) -> HttpProblem:
    title, code = HTTPStatus(status).phrase, _CODES.get(status, "invalid_request")
    return HttpProblem(type=f"urn:din-extproc:http:{code}", title=title, status=status, detail=detail, code=code)


class _Handler(web.RequestHandler):
    """Connection handler. It enforces time limits and responds to malformed HTTP and oversized heads."""

    __slots__ = ("_has_requests", "_idle_since", "_port", "_waiting_for_head")

    def __init__(self, port: "_Server", **options: Any) -> None:
        super().__init__(port, keepalive_timeout=port.timeouts.idle_s, **options)
        self._port = port
        self._has_requests = False
        self._idle_since: float | None = self._loop.time()
        self._waiting_for_head: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> tuple[bool, float] | None:
        """Return the idle state (see `LimitedConnection`)."""
        return None if self._idle_since is None else (self._has_requests, self._idle_since)

    def abort(self) -> None:
        """Close the connection at once and discard unsent data."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._waiting_for_head = self._loop.call_later(self._port.timeouts.head_s, self._abort_without_head)
        self._port.connection_limiter.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._waiting_for_head is not None:
            self._waiting_for_head.cancel()
        self._port.connection_limiter.remove(self)
        super().connection_lost(exc)

    def _abort_without_head(self) -> None:
        if not self._has_requests:
            self.abort()

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        self._has_requests, self._idle_since = True, None
        seconds = None if request.path in self._port.unlimited_paths else self._port.timeouts.exchange_s
        try:
            async with asyncio.timeout(seconds):
                return await super()._handle_request(request, start_time, request_handler)
        except TimeoutError as error:
            self.abort()
            raise ConnectionResetError("the exchange took too long") from error
        finally:
            self._idle_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = _SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature
    ) -> web.StreamResponse:
        if status >= _SERVER_ERROR:
            _log.error("%s %s failed", request.method, request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        detail = "the log says why" if status >= _SERVER_ERROR else "this is no HTTP/1.1 request, or its head is too large"
        response = _build_problem(status, detail).response()
        response.headers["server"] = _SERVER
        response.force_close()
        return response


class _Server(web.Server):
    """Server that creates a `_Handler` per connection."""

    def __init__(
        self, server: web.Server, unlimited_paths: frozenset[str], timeouts: HttpTimeouts, connection_limiter: ConnectionLimiter
    ) -> None:
        super().__init__(server.request_handler, request_factory=server.request_factory, access_log=None)
        self.unlimited_paths = unlimited_paths
        self.timeouts = timeouts
        self.connection_limiter = connection_limiter

    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Application runner that uses `_Server`."""

    def __init__(
        self, app: web.Application, unlimited_paths: frozenset[str], timeouts: HttpTimeouts, connection_limiter: ConnectionLimiter
    ) -> None:
        super().__init__(app, access_log=None)
        self._unlimited_paths = unlimited_paths
        self._timeouts = timeouts
        self._connection_limiter = connection_limiter

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._unlimited_paths, self._timeouts, self._connection_limiter)

"""An HTTP port of ours: routes, start and stop, TLS, alike for the registry, the admin pages and the agent's health.

Rule: whatever is refused is refused as a problem document (RFC 9457), also what no handler ever sees. A connection is given time for its
request and for taking the answer, no more: nothing that drips holds a place.
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
"""What a refusal is called that no handler has made."""
_SERVER_ERROR = 500
_SERVER = "din"
_BACKLOG = 256


class HttpTimeouts(Struct, frozen=True):
    """How long a connection may take, in seconds."""

    head_s: float = 10.0
    """For the head of its first request."""
    exchange_s: float = 30.0
    """From a request's head to the end of its answer: the rest of the request comes, and the answer is taken."""
    idle_s: float = 75.0
    """Between an answer and the end of the next head: longer than the longest pause between two heartbeats."""


class HttpProblem(Struct, frozen=True, kw_only=True):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str

    def response(self, allow: str | None = None) -> web.Response:
        """As it is sent."""
        headers = {} if allow is None else {"allow": allow}
        body = msgspec.json.encode(self) + b"\n"
        return web.Response(body=body, status=self.status, content_type="application/problem+json", headers=headers)


def refused(section: str) -> web.Response:
    """What is said to who has no key of this section."""
    detail = f"`authorization: Bearer` with a key of {section} is expected"
    answer = HttpProblem(
        type="urn:din-extproc:http:invalid_api_key", title=detail, status=401, detail=detail, code="invalid_api_key"
    ).response()
    answer.headers["www-authenticate"] = "Bearer"
    return answer


class HttpPort:
    """One port.

    Args:
        routes: What is answered there.
        longest_body: Bytes of a request's body.
        lasting: Paths whose answers take as long as they like; they see to slow readers themselves.
        patience: With connections.
        most: Connections at once; None: what the process's open files allow.
    """

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        *,
        longest_body: int = 1024,
        lasting: frozenset[str] = frozenset(),
        patience: HttpTimeouts | None = None,
        most: int | None = None,
    ) -> None:
        app = web.Application(client_max_size=longest_body, middlewares=[_explained])
        app.router.add_routes(routes)
        app.on_response_prepare.append(_signed)
        self._runner = _Runner(app, lasting, patience or HttpTimeouts(), ConnectionLimiter(most))
        self._listening: asyncio.Server | TlsListener | None = None

    async def start(self, where: str | TlsAddress) -> None:
        """Serve at `host:port`.

        Raises:
            OSError: the address is taken.
            Unusable: certificates can't be used.
        """
        await self._runner.setup()
        address, tls = (where, None) if isinstance(where, str) else (where.address, server_context(where.files, ("http/1.1",)))
        host, _, port = address.rpartition(":")
        self._listening, _ = await listen(cast("web.Server", self._runner.server), host, int(port), tls, _BACKLOG)

    async def stop(self) -> None:
        """Serve no longer."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


@web.middleware
async def _explained(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """The framework's own refusals are texts: here they get our form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(error.status, error.reason).response(error.headers.get("allow"))


async def _signed(_request: web.Request, response: web.StreamResponse) -> None:
    """Nobody is told what this is written in, and in which version."""
    response.headers["server"] = _SERVER


def _refusal(status: int, detail: str) -> HttpProblem:
    title, code = HTTPStatus(status).phrase, _CODES.get(status, "invalid_request")
    return HttpProblem(type=f"urn:din-extproc:http:{code}", title=title, status=status, detail=detail, code=code)


class _Handler(web.RequestHandler):
    """One connection. What is no HTTP, or has heads too large, is answered here; who takes too long is left here."""

    __slots__ = ("_asked", "_idle_since", "_port", "_waiting_for_head")

    def __init__(self, port: "_Server", **options: Any) -> None:
        super().__init__(port, keepalive_timeout=port.patience.idle_s, **options)
        self._port = port
        self._asked = False
        self._idle_since: float | None = self._loop.time()
        self._waiting_for_head: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> tuple[bool, float] | None:
        """As a `LimitedConnection` of the port."""
        return None if self._idle_since is None else (self._asked, self._idle_since)

    def abort(self) -> None:
        """Close now, whatever was not taken yet."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._waiting_for_head = self._loop.call_later(self._port.patience.head_s, self._no_head)
        self._port.crowd.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._waiting_for_head is not None:
            self._waiting_for_head.cancel()
        self._port.crowd.leave(self)
        super().connection_lost(exc)

    def _no_head(self) -> None:
        if not self._asked:
            self.abort()

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        self._asked, self._idle_since = True, None
        seconds = None if request.path in self._port.lasting else self._port.patience.exchange_s
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
        response = _refusal(status, detail).response()
        response.headers["server"] = _SERVER
        response.force_close()
        return response


class _Server(web.Server):
    """Makes the connections' handlers."""

    def __init__(self, made: web.Server, lasting: frozenset[str], patience: HttpTimeouts, crowd: ConnectionLimiter) -> None:
        super().__init__(made.request_handler, request_factory=made.request_factory, access_log=None)
        self.lasting = lasting
        self.patience = patience
        self.crowd = crowd

    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Runs an application with our handlers."""

    def __init__(self, app: web.Application, lasting: frozenset[str], patience: HttpTimeouts, crowd: ConnectionLimiter) -> None:
        super().__init__(app, access_log=None)
        self._lasting = lasting
        self._patience = patience
        self._crowd = crowd

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._lasting, self._patience, self._crowd)

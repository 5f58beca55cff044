"""An HTTP port of ours: routes, start and stop, TLS, alike for the registry, the admin pages and the agent's health.

Rule: whatever is refused is refused as a problem document (RFC 9457), also what no handler ever sees.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

import msgspec
from aiohttp import web
from msgspec import Struct

from din_extproc.edge.tls import Secured, server_context

_log = logging.getLogger(__name__)

_CODES = {400: "invalid_request", 404: "path_not_found", 405: "method_not_allowed", 413: "request_too_large", 500: "internal_error"}
"""What a refusal is called that no handler has made."""
_SERVER_ERROR = 500


class Problem(Struct, frozen=True, kw_only=True):
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


class HttpPort:
    """One port.

    Args:
        routes: What is answered there.
        longest_body: Bytes of a request's body.
    """

    def __init__(self, routes: Sequence[web.RouteDef], *, longest_body: int = 1024) -> None:
        app = web.Application(client_max_size=longest_body, middlewares=[_explained])
        app.router.add_routes(routes)
        self._runner = _Runner(app)

    async def start(self, where: str | Secured) -> None:
        """Serve at `host:port`.

        Raises:
            OSError: the address is taken.
            Unusable: certificates can't be used.
        """
        await self._runner.setup()
        address, tls = (where, None) if isinstance(where, str) else (where.address, server_context(where.files, ("http/1.1",)))
        host, _, port = address.rpartition(":")
        await web.TCPSite(self._runner, host.strip("[]"), int(port), ssl_context=tls).start()

    async def stop(self) -> None:
        """Serve no longer."""
        await self._runner.cleanup()


@web.middleware
async def _explained(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """The framework's own refusals are texts: here they get our form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(error.status, error.reason).response(error.headers.get("allow"))


def _refusal(status: int, detail: str) -> Problem:
    title, code = HTTPStatus(status).phrase, _CODES.get(status, "invalid_request")
    return Problem(type=f"urn:din-extproc:http:{code}", title=title, status=status, detail=detail, code=code)


class _Handler(web.RequestHandler):
    """One connection. What is no HTTP, or has heads too large, is answered here."""

    def handle_error(
        self, request: web.BaseRequest, status: int = _SERVER_ERROR, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= _SERVER_ERROR:
            _log.error("%s %s failed", request.method, request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        detail = "the log says why" if status >= _SERVER_ERROR else " ".join((message or "").split())
        response = _refusal(status, detail).response()
        response.force_close()
        return response


class _Server(web.Server):
    """Makes the connections' handlers."""

    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Runs an application with our handlers."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, access_log=None)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made.request_handler, request_factory=made.request_factory, access_log=None)

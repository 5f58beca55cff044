"""Dashboard at the admin port: a static page, and its data for holders of a key, as one document or as a stream of events.

Invariant: it is read-only. Data is collected once per interval for all viewers; a slow viewer misses updates and delays no other.
"""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from aiohttp import web

from din_extproc.edge.http.port import HttpProblem, refuse_form
from din_extproc.observe.dashboard_data import DashboardData, diff_dashboards

REFRESH_INTERVAL_S = 2.0
_VIEWERS = 16
_READ_S = 10.0
"""Time after which a viewer that does not read an event is disconnected."""
EVENTS = "/dashboard/events"
_FOLDER = files("din_extproc.edge.http").joinpath("pages")
_FILES = {
    "/dashboard": ("index.html", "text/html"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
}
_SAFE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_encode = msgspec.json.encode


class DashboardPages:
    """`GET /dashboard`, its files, `/dashboard/data` and `/dashboard/events`.

    Args:
        owner: Returns the owner of the key in an `authorization` header; None: no valid key.
        collect_data: Collects the data.
    """

    def __init__(self, owner: Callable[[str], str | None], collect_data: Callable[[], Awaitable[DashboardData]]) -> None:
        self.owner = owner
        self._collect_data = collect_data
        self._viewers = 0
        self._closing = asyncio.Event()
        self._latest: DashboardData | None = None
        self._made_at = -REFRESH_INTERVAL_S
        self._making = asyncio.Lock()

    @property
    def routes(self) -> list[web.RouteDef]:
        """Return the routes for the admin port."""
        pages = [web.get(path, self._serve_file) for path in _FILES]
        return [*pages, web.get("/dashboard/data", self._serve_data), web.get(EVENTS, self._stream_events)]

    def close(self) -> None:
        """End all event streams."""
        self._closing.set()

    @staticmethod
    async def _serve_file(request: web.Request) -> web.Response:
        name, media = _FILES[request.path]
        return web.Response(body=_FOLDER.joinpath(name).read_bytes(), content_type=media, charset="utf-8", headers=_SAFE)

    async def _serve_data(self, request: web.Request) -> web.Response:
        if self.owner(request.headers.get("authorization", "")) is None:
            return refuse_form("gateway.dashboard")
        return web.Response(body=_encode(await self._get_data()), content_type="application/json", headers=_SAFE)

    async def _stream_events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: `data` with all data, then `change` every two seconds."""
        if self.owner(request.headers.get("authorization", "")) is None:
            return refuse_form("gateway.dashboard")
        if self._viewers >= _VIEWERS:
            return _make_problem("too_many_viewers", 503, f"{_VIEWERS} watch already")
        reply = web.StreamResponse(headers={**_SAFE, "content-type": "text/event-stream"})
        self._viewers += 1
        try:
            await reply.prepare(request)
            before = await self._get_data()
            await _format_event(reply, b"event: board\ndata: %b\n\n" % _encode(before))
            while not await self._wait_closed(REFRESH_INTERVAL_S):
                data = await self._get_data()
                await _format_event(reply, b"event: change\ndata: %b\n\n" % _encode(diff_dashboards(before, data)))
                before = data
            await reply.write_eof()
        except (ConnectionError, TimeoutError):  # the viewer disconnected or does not read
            if request.transport is not None:
                request.transport.abort()
            return reply
        finally:
            self._viewers -= 1
        return reply

    async def _wait_closed(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _get_data(self) -> DashboardData:
        """Return the data of the current interval, shared by all viewers."""
        loop = asyncio.get_running_loop()
        async with self._making:
            if self._latest is None or loop.time() - self._made_at >= REFRESH_INTERVAL_S / 2:
                self._latest = await self._collect_data()
                self._made_at = loop.time()
            return self._latest


async def _format_event(reply: web.StreamResponse, event: bytes) -> None:
    async with asyncio.timeout(_READ_S):
        await reply.write(event)


def _make_problem(code: str, status: int, detail: str) -> web.Response:
    return HttpProblem(type=f"urn:din-extproc:http:{code}", title=detail, status=status, detail=detail, code=code).response()

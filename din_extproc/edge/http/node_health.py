"""The agent's own HTTP interface: `GET /health`, with the real queue depth, never a bare 200."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from din_extproc.edge.http.port import HttpPort

Health = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]


def health_port(health: Health) -> HttpPort:
    """Serves `/health`.

    Args:
        health: Whether requests are welcome, and what is shown.
    """

    async def show(_: web.Request) -> web.Response:
        welcome, shown = await health()
        return web.Response(body=msgspec.json.encode(shown), status=200 if welcome else 503, content_type="application/json")

    return HttpPort([web.get("/health", show)])

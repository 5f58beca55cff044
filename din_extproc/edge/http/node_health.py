"""HTTP interface of the agent: `GET /health` with the current queue depth in the body."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from din_extproc.edge.http.port import HttpPort

Health = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]


def health_port(health: Health) -> HttpPort:
    """Create the port that serves `/health`.

    Args:
        health: Returns whether the node accepts requests, and the body.
    """

    async def show(_: web.Request) -> web.Response:
        welcome, report = await health()
        return web.Response(body=msgspec.json.encode(report), status=200 if welcome else 503, content_type="application/json")

    return HttpPort([web.get("/health", show)])

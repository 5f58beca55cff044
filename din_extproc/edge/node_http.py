"""The agent's own HTTP interface: `GET /health`, with the real queue depth (R16), never a bare 200."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

Health = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]


class NodeHttp:
    """Serves `/health`.

    Args:
        health: Whether requests are welcome, and what is shown.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        app = web.Application()
        app.router.add_get("/health", self._show)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> None:
        """Serve.

        Raises:
            OSError: the address is taken.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Serve no longer."""
        await self._runner.cleanup()

    async def _show(self, _: web.Request) -> web.Response:
        welcome, shown = await self._health()
        return web.Response(body=msgspec.json.encode(shown), status=200 if welcome else 503, content_type="application/json")

"""The admin port: is it alive, is it ready and why not, what is it doing. Read-only, without secrets.

Rule: liveness never depends on Redis or nodes; readiness says each reason it has.
"""

from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

Status = Callable[[], Mapping[str, object]]
Reasons = Callable[[], list[str]]


class AdminServer:
    """`GET /healthz`, `/readyz`, `/status` and `/nodes`.

    Args:
        status: What `/status` shows, as plain values.
        reasons: Why the process is not ready; empty when it is.
        nodes: What `/nodes` shows, likewise.
    """

    def __init__(self, status: Status, reasons: Reasons, nodes: Status) -> None:
        self._status = status
        self._reasons = reasons
        self._nodes = nodes
        app = web.Application()
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/status", self._show)
        app.router.add_get("/nodes", self._show_nodes)
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

    @staticmethod
    async def _alive(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _ready(self, _: web.Request) -> web.Response:
        reasons = self._reasons()
        return web.Response(text="ready\n" if not reasons else "".join(f"{reason}\n" for reason in reasons), status=503 if reasons else 200)

    async def _show(self, _: web.Request) -> web.Response:
        return _json(self._status())

    async def _show_nodes(self, _: web.Request) -> web.Response:
        return _json(self._nodes())


def _json(shown: Mapping[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.format(msgspec.json.encode(shown), indent=2), content_type="application/json")

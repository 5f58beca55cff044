"""The admin port: is it alive, is it ready and why not, what is it doing. Read-only, without secrets.

Rule: liveness never depends on Redis or nodes; readiness says each reason it has. Who has no key, where one is wanted, is told nothing but
whether it lives and is ready.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec
from aiohttp import web

from din_extproc.domain.availability import ModelAvailability
from din_extproc.domain.timing import GatewayTimes
from din_extproc.edge.http.dashboard import EVENTS, DashboardPages
from din_extproc.edge.http.node_orders import NodeOrders
from din_extproc.edge.http.paced import paced
from din_extproc.edge.http.port import HttpPort, HttpProblem, refused
from din_extproc.observe.exposition import CONTENT_TYPE

Status = Callable[[], Mapping[str, object]]
Reasons = Callable[[], list[str]]
Tenants = Callable[[str], Awaitable[Mapping[str, object]]]
Times = Callable[[str], Sequence[GatewayTimes]]
Availability = Callable[[str], Sequence[ModelAvailability] | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SHOWN = 80
_SHORTEST_TRACE = 8
"""As short as a client's trace id may be: whoever asks knows the ids, nobody leafs through them."""


class AdminPages:
    """`GET /healthz`, `/readyz`, `/status`, `/nodes`, `/availability`, `/tenants`, `/exchanges` and `/metrics`, and orders for nodes.

    Args:
        status: What `/status` shows, as plain values.
        reasons: Why the process is not ready; empty when it is.
        nodes: What `/nodes` shows, likewise.
        availability: What `/availability` shows: of every model ("") or of one; None: there is no such model.
        tenants: What `/tenants` shows, of all tenants ("") or of one.
        metrics: What `/metrics` shows, slice by slice: others go first between two of them.
        times: What `/exchanges?trace=` shows: the latest exchanges whose trace id begins so.
        orders: Takes orders for nodes.
        opens: Whether an `authorization` header opens more than life and readiness.
        dashboard: Its pages, if there is one.
    """

    def __init__(
        self,
        status: Status,
        reasons: Reasons,
        nodes: Status,
        availability: Availability,
        tenants: Tenants,
        metrics: Callable[[], Iterator[bytes]],
        times: Times,
        orders: NodeOrders,
        opens: Callable[[str], bool],
        dashboard: DashboardPages | None = None,
    ) -> None:
        self._status = status
        self._reasons = reasons
        self._nodes = nodes
        self._availability = availability
        self._tenants = tenants
        self._metrics = metrics
        self._times = times
        self._opens = opens
        self.port = HttpPort(
            [
                web.get("/healthz", self._alive),
                web.get("/readyz", self._ready),
                web.get("/status", self._guarded(self._show)),
                web.get("/nodes", self._guarded(self._show_nodes)),
                web.get("/availability", self._guarded(self._show_availability)),
                *orders.routes,
                web.get("/tenants", self._guarded(self._show_tenants)),
                web.get("/exchanges", self._guarded(self._show_exchanges)),
                web.get("/metrics", self._guarded(self._show_metrics)),
                *(() if dashboard is None else dashboard.routes),
            ],
            lasting=frozenset({EVENTS}),
        )

    def _guarded(self, show: Handler) -> Handler:
        async def shown(request: web.Request) -> web.StreamResponse:
            return await show(request) if self._may_look(request) else refused("gateway.admin.keys")

        return shown

    def _may_look(self, request: web.Request) -> bool:
        return self._opens(request.headers.get("authorization", ""))

    @staticmethod
    async def _alive(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _ready(self, request: web.Request) -> web.Response:
        reasons = self._reasons()
        if reasons and not self._may_look(request):
            reasons = ["not ready"]
        return web.Response(text="ready\n" if not reasons else "".join(f"{reason}\n" for reason in reasons), status=503 if reasons else 200)

    async def _show(self, _: web.Request) -> web.Response:
        return _json(self._status())

    async def _show_nodes(self, _: web.Request) -> web.Response:
        return _json(self._nodes())

    async def _show_availability(self, request: web.Request) -> web.Response:
        """503 when the model that was asked for, or any model, has no node that takes requests."""
        found = self._availability(request.query.get("model", ""))
        if found is None:
            detail = f"no pool serves a model {request.query['model'][:_SHOWN]!a}"
            problem = HttpProblem(
                type="urn:din-extproc:http:model_not_found", title="No such model", status=404, detail=detail, code="model_not_found"
            )
            return problem.response()
        served = all(model.share > 0 for model in found)
        return _json({"models": found}, 200 if served else 503)

    async def _show_tenants(self, request: web.Request) -> web.Response:
        return _json(await self._tenants(request.query.get("tenant", "")))

    async def _show_exchanges(self, request: web.Request) -> web.Response:
        trace = request.query.get("trace", "")
        if len(trace) < _SHORTEST_TRACE:
            detail = f"`trace` is the beginning of a trace id, {_SHORTEST_TRACE} characters or more"
            return HttpProblem(
                type="urn:din-extproc:http:trace_missing", title="Which exchanges?", status=400, detail=detail, code="trace_missing"
            ).response()
        return _json({"exchanges": self._times(trace)})

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await reply.prepare(request)
        async for piece in paced(self._metrics()):
            await reply.write(piece)
        await reply.write_eof()
        return reply


def _json(shown: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.format(msgspec.json.encode(shown), indent=2), status=status, content_type="application/json")

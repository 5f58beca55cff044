"""Pages of the admin port: liveness, readiness with its reasons, and status. They hold no secrets; only orders change anything.

Invariant: liveness never depends on Redis or nodes; readiness lists every reason. Without a key, where keys are configured, only
liveness and readiness are available.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from din_extproc.domain.availability import ModelAvailability
from din_extproc.domain.timing import GatewayTimes
from din_extproc.edge.http.budget_orders import BudgetOrders
from din_extproc.edge.http.dashboard import EVENTS, DashboardPages
from din_extproc.edge.http.node_orders import NodeOrders
from din_extproc.edge.http.port import HttpPort, HttpProblem, refuse_form
from din_extproc.edge.http.slices import pace_slices
from din_extproc.observe.exposition import CONTENT_TYPE

Status = Callable[[], Mapping[str, object]]
Reasons = Callable[[], list[str]]
Tenants = Callable[[str], Awaitable[Mapping[str, object]]]
Times = Callable[[str], Sequence[GatewayTimes]]
Availability = Callable[[str], Sequence[ModelAvailability] | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MAX_QUOTED = 80
_SHORTEST_TRACE = 8
"""Minimum length of a trace id prefix, the shortest trace id of a client: exchanges can be looked up, not enumerated."""


class AdminPages:
    """`GET /healthz`, `/readyz`, `/status`, `/nodes`, `/availability`, `/tenants`, `/budgets`, `/exchanges` and `/metrics`, and orders.

    Args:
        status: Returns the data of `/status` as plain values.
        reasons: Returns why the process is not ready; empty when it is.
        nodes: Returns the data of `/nodes` as plain values.
        availability: Returns the data of `/availability` for every model ("") or one; None: unknown model.
        tenants: Returns the data of `/tenants` for all tenants ("") or one.
        budgets: Returns the data of `/budgets` likewise.
        metrics: Yields the text of `/metrics` in slices; other work runs between two slices.
        times: Returns the latest exchanges by a prefix of their trace id, for `/exchanges?trace=`.
        orders: Handles orders for nodes.
        budget_orders: Handles orders for budgets.
        opens: Returns whether an `authorization` header grants access beyond liveness and readiness.
        dashboard: Pages of the dashboard; None: disabled.
        exposed: Whether the port listens on more than a loopback address.
    """

    def __init__(
        self,
        status: Status,
        reasons: Reasons,
        nodes: Status,
        availability: Availability,
        tenants: Tenants,
        budgets: Tenants,
        metrics: Callable[[], Iterator[bytes]],
        times: Times,
        orders: NodeOrders,
        budget_orders: BudgetOrders,
        opens: Callable[[str], bool],
        dashboard: DashboardPages | None = None,
        *,
        exposed: bool = False,
    ) -> None:
        self._status = status
        self._reasons = reasons
        self._nodes = nodes
        self._availability = availability
        self._tenants = tenants
        self._budgets = budgets
        self._metrics = metrics
        self._times = times
        self._opens = opens
        self._exposed = exposed
        self.port = HttpPort(
            [
                web.get("/healthz", self._alive),
                web.get("/readyz", self._ready),
                web.get("/status", self._guarded(self._show)),
                web.get("/nodes", self._guarded(self._show_nodes)),
                web.get("/availability", self._guarded(self._show_availability)),
                *orders.routes,
                web.get("/budgets", self._guarded(self._show_budgets)),
                *budget_orders.routes,
                web.get("/tenants", self._guarded(self._show_tenants)),
                web.get("/exchanges", self._guarded(self._show_exchanges)),
                web.get("/metrics", self._guarded(self._show_metrics)),
                *(() if dashboard is None else dashboard.routes),
            ],
            unlimited_paths=frozenset({EVENTS}),
        )

    def _guarded(self, show: Handler) -> Handler:
        async def respond(request: web.Request) -> web.StreamResponse:
            if not self._may_look(request):
                return refuse_form("gateway.admin.keys")
            return await show(request) if self._is_meant(request) else _misdirected()

        return respond

    def _may_look(self, request: web.Request) -> bool:
        return self._opens(request.headers.get("authorization", ""))

    def _is_meant(self, request: web.Request) -> bool:
        """Return whether keys are required, or the `host` header can't come from a rebound DNS name."""
        return not self._opens("") or is_own_name(request.headers.get("host", ""), exposed=self._exposed)

    @staticmethod
    async def _alive(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _ready(self, request: web.Request) -> web.Response:
        reasons = self._reasons()
        if reasons and not (self._may_look(request) and self._is_meant(request)):
            reasons = ["not ready"]
        return web.Response(text="ready\n" if not reasons else "".join(f"{reason}\n" for reason in reasons), status=503 if reasons else 200)

    async def _show(self, _: web.Request) -> web.Response:
        return _json_response(self._status())

    async def _show_nodes(self, _: web.Request) -> web.Response:
        return _json_response(self._nodes())

    async def _show_availability(self, request: web.Request) -> web.Response:
        """Respond with 503 when the requested model, or any model, has no available node."""
        found = self._availability(request.query.get("model", ""))
        if found is None:
            detail = f"no pool serves a model {request.query['model'][:_MAX_QUOTED]!a}"
            problem = HttpProblem(
                type="urn:din-extproc:http:model_not_found", title="No such model", status=404, detail=detail, code="model_not_found"
            )
            return problem.response()
        served = all(model.share > 0 for model in found)
        return _json_response({"models": found}, 200 if served else 503)

    async def _show_tenants(self, request: web.Request) -> web.Response:
        return _json_response(await self._tenants(request.query.get("tenant", "")))

    async def _show_budgets(self, request: web.Request) -> web.Response:
        return _json_response(await self._budgets(request.query.get("tenant", "")))

    async def _show_exchanges(self, request: web.Request) -> web.Response:
        trace = request.query.get("trace", "")
        if len(trace) < _SHORTEST_TRACE:
            detail = f"`trace` is the beginning of a trace id, {_SHORTEST_TRACE} characters or more"
            return HttpProblem(
                type="urn:din-extproc:http:trace_missing", title="Which exchanges?", status=400, detail=detail, code="trace_missing"
            ).response()
        return _json_response({"exchanges": self._times(trace)})

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await reply.prepare(request)
        async for piece in pace_slices(self._metrics()):
            await reply.write(piece)
        await reply.write_eof()
        return reply


def is_own_name(host: str, *, exposed: bool) -> bool:
    """Return whether no web page can have this `host` (DNS rebinding): a loopback name; on an exposed port, any address or dotless name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback or exposed
    except ValueError:
        return exposed and bool(name) and "." not in name


def _misdirected() -> web.Response:
    detail = (
        "without a key these pages are shown under this machine's own names only, such as localhost: ask there, or set gateway.admin.keys"
    )
    code = "misdirected_request"
    return HttpProblem(type=f"urn:din-extproc:http:{code}", title="Not under this name", status=421, detail=detail, code=code).response()


def _json_response(content: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.format(msgspec.json.encode(content), indent=2), status=status, content_type="application/json")

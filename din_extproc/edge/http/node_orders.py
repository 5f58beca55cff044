"""Operators' orders at the admin port: `POST /nodes/{id}/drain`, `undrain`, `quarantine` and `release`.

Invariant: an order requires a key with `operate: true`, on loopback as well.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec
from aiohttp import web
from msgspec import Struct

from din_extproc.edge.http.port import HttpProblem, refuse_form

LONGEST_REASON = 200


class NodeOrder(StrEnum):
    """Kinds of orders."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    QUARANTINE = "quarantine"
    RELEASE = "release"


class OrderForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Request body of an order."""

    reason: str = ""


class OrderReply(Struct, frozen=True):
    """Response body of an order."""

    node: str
    order: str
    problem: str = ""
    """Step that could not be completed; "" for none."""


Give = Callable[[NodeOrder, str, str, str], Awaitable[str | None]]
"""Carries out an order for a node id, with the operator's key id and reason. Returns the incomplete step; None: unknown node."""


class NodeOrders:
    """Route and handler of orders.

    Args:
        operator: Returns the id of the key in an `authorization` header if it may give orders.
        give: Carries an order out.
    """

    def __init__(self, operator: Callable[[str], str | None], give: Give) -> None:
        self._operator = operator
        self._give = give
        self.routes = [web.post("/nodes/{id}/{order}", self._take)]

    async def _take(self, request: web.Request) -> web.Response:
        operator = self._operator(request.headers.get("authorization", ""))
        if operator is None:
            return refuse_form("gateway.admin.keys that has `operate: true`")
        node_id, name = request.match_info["id"], request.match_info["order"]
        try:
            order, form = NodeOrder(name), msgspec.json.decode(await request.read() or b"{}", type=OrderForm)
        except ValueError as error:
            return _problem(400, "invalid_request", f"drain, undrain, quarantine or release is expected, with {{reason}}: {error}")
        if len(form.reason) > LONGEST_REASON or not form.reason.isprintable():
            return _problem(400, "invalid_request", f"reason is longer than {LONGEST_REASON} characters, or not printable")
        missing = await self._give(order, node_id, operator, form.reason)
        if missing is None:
            return _problem(404, "node_not_found", f"no node is called {node_id[:LONGEST_REASON]!a}; `din-extproc nodes` lists them")
        return web.Response(body=msgspec.json.encode(OrderReply(node_id, order.value, missing)), content_type="application/json")


def _problem(status: int, code: str, detail: str) -> web.Response:
    kind = f"urn:din-extproc:http:{code}"
    return HttpProblem(type=kind, title="The order was not carried out", status=status, detail=detail, code=code).response()

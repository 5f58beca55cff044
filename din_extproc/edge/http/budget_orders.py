"""Operators' orders for budgets at the admin port: `POST /budgets` adds to what may be spent in the current period.

Invariant: an order requires a key with `operate: true`, on loopback as well.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from msgspec import Struct

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.budget_status import BudgetStatus
from din_extproc.edge.http.node_orders import LONGEST_REASON
from din_extproc.edge.http.port import HttpProblem, refuse_form

_MOST = 2**53


class BudgetForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Request body of an order."""

    budget: str
    """The counter's name, as `GET /budgets` shows it."""
    tenant: str = ""
    """The tenant of the counter, where several tenants have one of this name."""
    tokens: int = 0
    cost: int = 0
    """In 10**-9 of the currency."""
    reset: bool = False
    """Whether the amount spent is added to the limit, too."""
    reason: str = ""


class BudgetOrders:
    """Route and handler of orders.

    Args:
        operator: Returns the id of the key in an `authorization` header if it may give orders.
        give: Carries an order out; None: there is no such counter.
    """

    def __init__(self, operator: Callable[[str], str | None], give: Callable[[BudgetForm, str], Awaitable[BudgetStatus | None]]) -> None:
        self._operator = operator
        self._give = give
        self.routes = [web.post("/budgets", self._take)]

    async def _take(self, request: web.Request) -> web.Response:
        operator = self._operator(request.headers.get("authorization", ""))
        if operator is None:
            return refuse_form("gateway.admin.keys that has `operate: true`")
        try:
            form = msgspec.json.decode(await request.read(), type=BudgetForm)
        except ValueError as error:
            return _problem(400, "invalid_request", f"{{budget, tokens, cost, reset, reason}} is expected: {error}")
        if not (0 <= form.tokens < _MOST and 0 <= form.cost < _MOST) or not (form.tokens or form.cost or form.reset):
            return _problem(400, "invalid_request", "tokens or cost to add are expected, or `reset`")
        if len(form.reason) > LONGEST_REASON or not form.reason.isprintable():
            return _problem(400, "invalid_request", f"reason is longer than {LONGEST_REASON} characters, or not printable")
        try:
            row = await self._give(form, operator)
        except LimitsUnavailable as error:
            return _problem(503, "limits_unavailable", f"redis: {error}")
        if row is None:
            name = f"{form.budget[:LONGEST_REASON]!a}"
            return _problem(404, "budget_not_found", f"no budget is called {name}; `din-extproc budgets` lists them")
        return web.Response(body=msgspec.json.encode(row), content_type="application/json")


def _problem(status: int, code: str, detail: str) -> web.Response:
    kind = f"urn:din-extproc:http:{code}"
    return HttpProblem(type=kind, title="The order was not carried out", status=status, detail=detail, code=code).response()

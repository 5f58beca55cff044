"""The role of `budgets`: how the budgets of a running sidecar stand, as a table, and orders for them.

Rule: the admin port is the only source.
"""

from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table

from din_extproc.domain.budget_status import AmountStatus, BudgetStatus
from din_extproc.edge.http.budget_orders import BudgetForm
from din_extproc.roles.operate.nodes import fetch_page
from din_extproc.settings.settings import Settings


def fetch_budgets(settings: Settings, tenant: str) -> dict[str, Any]:
    """Return the page `/budgets`. Raises as `fetch_page` does."""
    return fetch_page(settings, f"budgets?tenant={quote(tenant)}" if tenant else "budgets")


def give_budget_order(settings: Settings, form: BudgetForm) -> BudgetStatus:
    """Add to a budget and return how it stands. Raises as `fetch_page` does."""
    return msgspec.convert(fetch_page(settings, "budgets", msgspec.json.encode(form)), BudgetStatus)


def show_budgets(settings: Settings, tenant: str) -> None:
    """Print the table. Raises as `fetch_page` does."""
    rows = msgspec.convert(fetch_budgets(settings, tenant)["budgets"], list[BudgetStatus])
    table = Table()
    for name in ("budget", "tenant", "period", "tokens", "money", "used", "until"):
        table.add_column(name, justify="right" if name in {"tokens", "money", "used"} else "left")
    for row in rows:
        colour = "red" if row.exceeded else ""
        used = f"{row.used:.1%}"
        table.add_row(
            row.budget + ("" if row.hard else " (soft)"),
            row.tenant or "all",
            row.period,
            _of(row.tokens),
            _of(row.money) + (f" {row.currency}" if row.money else ""),
            f"[{colour}]{used}[/]" if colour else used,
            row.ends.isoformat(timespec="minutes"),
        )
    Console().print(table)


def _of(amount: AmountStatus | None) -> str:
    return "-" if amount is None else f"{amount.spent} / {amount.limit}"

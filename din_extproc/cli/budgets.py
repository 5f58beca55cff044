"""The commands of `budgets`: how they stand, and orders for them."""

from decimal import InvalidOperation
from typing import Annotated

import typer

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail_on, load_settings, print_json

budgets_app = typer.Typer(help="List budgets; add to them.")
Reason = Annotated[str, typer.Option(help="Why; it is recorded.")]
BudgetName = Annotated[str, typer.Argument(metavar="BUDGET", help="The counter's name, as the list shows it.")]
Tenant = Annotated[str, typer.Option(help="The tenant of the counter.")]


@budgets_app.callback(invoke_without_command=True)
def budgets(
    context: typer.Context,
    config: Config = DEFAULT_CONFIG,
    tenant: Tenant = "",
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """List budgets with what is spent in the current period.

    It asks the running sidecar.
    """
    from din_extproc.roles.operate import budgets as role  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415

    if context.invoked_subcommand is not None:
        return
    with fail_on(SidecarUnreachable):
        if json:
            print_json(role.fetch_budgets(load_settings(config), tenant))
        else:
            role.show_budgets(load_settings(config), tenant)


@budgets_app.command("top-up")
def budgets_top_up(
    budget: BudgetName,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to add.")] = 0,
    money: Annotated[str, typer.Option(help="Money to add, in the currency of `prices`.")] = "0",
    tenant: Tenant = "",
    reason: Reason = "",
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Add to what may be spent in the current period.

    The addition ends with the period. DIN_ADMIN_KEY holds a key with `operate: true`.
    """
    from din_extproc.domain.price import UNITS, parse_money  # noqa: PLC0415 - the other commands start without it

    try:
        cost = parse_money(money, UNITS)
    except (InvalidOperation, ValueError):
        raise typer.BadParameter(f"{money!r} is not an amount, such as 12.50", param_hint="--money") from None
    if not tokens and not cost:
        raise typer.BadParameter("give --tokens or --money")
    _order(config, budget, tenant=tenant, tokens=tokens, cost=cost, reset=False, reason=reason)


@budgets_app.command("reset")
def budgets_reset(budget: BudgetName, tenant: Tenant = "", reason: Reason = "", config: Config = DEFAULT_CONFIG) -> None:
    """Make the whole budget available again for the rest of the period.

    What was spent stays in the accounts and is added to the limit. DIN_ADMIN_KEY holds a key with `operate: true`.
    """
    _order(config, budget, tenant=tenant, tokens=0, cost=0, reset=True, reason=reason)


def _order(config: Config, budget: str, *, tenant: str, tokens: int, cost: int, reset: bool, reason: str) -> None:
    """Give an order and print how the budget stands."""
    from din_extproc.edge.http.budget_orders import BudgetForm  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate import budgets as role  # noqa: PLC0415
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415

    form = BudgetForm(budget=budget, tenant=tenant, tokens=tokens, cost=cost, reset=reset, reason=reason)
    with fail_on(SidecarUnreachable):
        row = role.give_budget_order(load_settings(config), form)
    typer.echo(f"{row.budget}: {row.used:.1%} is spent, until {row.ends.isoformat(timespec='minutes')}")

"""Commands that look at or change a running deployment: `nodes`, `tenants`, `usage`, `drain`, `doctor`, `audit ...`."""

import csv
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from din_extproc.cli.options import (
    DAY_S,
    DEFAULT_CONFIG,
    Config,
    Json,
    Watch,
    WatchInterval,
    fail,
    fail_on,
    finish,
    load_settings,
    number,
    print_json,
)
from din_extproc.cli.progress import show_progress

Tenant = Annotated[str, typer.Option(help="Show only this tenant.")]

audit_app = typer.Typer(no_args_is_help=True, help="Verify audit logs.")


nodes_app = typer.Typer(help="List nodes; drain or quarantine them.")
Reason = Annotated[str, typer.Option(help="Why; it is shown beside the node and recorded.")]
NodeId = Annotated[str, typer.Argument(metavar="ID", help="The node's id.")]


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    config: Config = DEFAULT_CONFIG,
    watch: Watch = False,  # noqa: FBT002 - a flag
    every_s: WatchInterval = 1.0,
    json: Json = False,  # noqa: FBT002
) -> None:
    """List nodes with state, trust, load and reasons.

    It asks the running sidecar.
    """
    from din_extproc.roles.operate import nodes as role  # noqa: PLC0415 - the other commands start without it

    if context.invoked_subcommand is not None:
        return
    settings = load_settings(config)
    with fail_on(role.SidecarUnreachable), suppress(KeyboardInterrupt):
        if json:
            print_json(role.fetch_page(settings))
        elif watch:
            role.watch_table(settings, every_s)
        else:
            role.fetch_table(settings)


@nodes_app.command("drain")
def nodes_drain(node_id: NodeId, reason: Reason = "", config: Config = DEFAULT_CONFIG) -> None:
    """Send a node no new requests.

    Those that it is working on go on. It holds in every replica, also after a restart of the node, until `nodes undrain`.
    DIN_ADMIN_KEY holds a key with `operate: true`.
    """
    _order(config, node_id, "drain", reason)


@nodes_app.command("undrain")
def nodes_undrain(node_id: NodeId, reason: Reason = "", config: Config = DEFAULT_CONFIG) -> None:
    """Send a drained node requests again."""
    _order(config, node_id, "undrain", reason)


@nodes_app.command("quarantine")
def nodes_quarantine(node_id: NodeId, reason: Reason = "", config: Config = DEFAULT_CONFIG) -> None:
    """Keep an untrusted node out of the network.

    It holds until `nodes release`.
    """
    _order(config, node_id, "quarantine", reason)


@nodes_app.command("release")
def nodes_release(node_id: NodeId, reason: Reason = "", config: Config = DEFAULT_CONFIG) -> None:
    """Lift a node's quarantine.

    It does not matter whether an operator or the registry imposed it.
    """
    _order(config, node_id, "release", reason)


def _order(config: Path, node_id: str, order: str, reason: str) -> None:
    """Give an order and print what became of it."""
    from din_extproc.roles.operate import nodes as role  # noqa: PLC0415 - the other commands start without it

    with fail_on(role.SidecarUnreachable):
        answer = role.give_order(load_settings(config), node_id, order, reason)
    typer.echo(f"{node_id}: {order} is in force")
    if answer.get("problem"):
        typer.echo(f"warning: {answer['problem']}", err=True)


def tenants(
    config: Config = DEFAULT_CONFIG,
    tenant: Tenant = "",
    watch: Watch = False,  # noqa: FBT002 - a flag
    every_s: WatchInterval = 1.0,
    json: Json = False,  # noqa: FBT002
) -> None:
    """List tenants with limits, current load and usage today.

    It asks the running sidecar.
    """
    from din_extproc.roles.operate import tenants as role  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415
    from din_extproc.roles.operate.unknown_tenant import UnknownTenant  # noqa: PLC0415

    settings = load_settings(config)
    with fail_on(SidecarUnreachable, UnknownTenant), suppress(KeyboardInterrupt):
        if json:
            print_json(role.fetch_tenants(settings, tenant))
        elif watch:
            role.watch_table(settings, tenant, every_s)
        else:
            role.fetch_table(settings, tenant)


def usage(
    first: Annotated[
        datetime | None, typer.Option("--from", formats=["%Y-%m-%d"], help="The first day (UTC). [default: 30 days ago]")
    ] = None,
    last: Annotated[datetime | None, typer.Option("--to", formats=["%Y-%m-%d"], help="The last day (UTC). [default: today]")] = None,
    tenant: Tenant = "",
    by: Annotated[str, typer.Option(help="Columns to group by, separated by commas: day, tenant, key, identity, model, rule.")] = (
        "day,tenant,model"
    ),
    form: Annotated[Literal["csv", "json"], typer.Option("--format", help="The output format.")] = "csv",
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Export usage and cost for charge-back.

    It reads Redis, whether or not the sidecar is running.
    """
    from din_extproc.admit.ledger import LimitsUnavailable  # noqa: PLC0415 - the other commands start without it
    from din_extproc.observe.usage_book import DIMENSIONS  # noqa: PLC0415
    from din_extproc.roles.operate.unknown_tenant import UnknownTenant  # noqa: PLC0415
    from din_extproc.roles.serve.usage import USAGE_COLUMNS, fetch_usage_rows  # noqa: PLC0415

    today = datetime.now(UTC)
    begin, end = (first or today - timedelta(days=30)).date(), (last or today).date()
    if begin > end:
        raise typer.BadParameter(f"{begin} is later than the last day, {end}", param_hint="--from")
    groups = [name.strip() for name in by.split(",")]
    if not set(groups) <= set(DIMENSIONS) or len(set(groups)) < len(groups):
        raise typer.BadParameter(f"{by!r}: each of {', '.join(DIMENSIONS)} at most once", param_hint="--by")
    try:
        with fail_on(UnknownTenant):
            rows = fetch_usage_rows(load_settings(config), begin, end, tenant, groups)
    except LimitsUnavailable as error:
        fail(f"redis: {error}")
    if form == "json":
        print_json(rows)
    else:
        writer = csv.DictWriter(sys.stdout, (*groups, *USAGE_COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def drain(
    config: Config = DEFAULT_CONFIG,
    at_least_s: Annotated[
        float, number("Seconds for which Envoy still accepts connections, until load balancers have noticed.", most=DAY_S)
    ] = 5.0,
    at_most_s: Annotated[float, number("Seconds after which draining ends even if requests are in flight.", most=DAY_S)] = 60.0,
) -> None:
    """Drain this machine's Envoy before it is stopped.

    Envoy refuses new connections, and the command waits until the open requests have ended. Exit code 1: some have not.
    """
    from din_extproc.edge.probe.envoy_admin import EnvoyAdminUnreachable  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate.drain import drain as drain_envoy  # noqa: PLC0415

    with fail_on(EnvoyAdminUnreachable):
        left = drain_envoy(load_settings(config).envoy.admin, at_least_s, at_most_s)
    if left:
        fail(f"{left} requests are still in flight after {at_most_s:g} s")


def doctor(
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Diagnose Redis, Envoy and the sidecar.

    It prints a verdict and a remedy per finding. Exit code 1: something fails.
    """
    from din_extproc.roles.operate.doctor import examine, report_lines  # noqa: PLC0415 - the other commands start without it

    findings = examine(load_settings(config))
    finish(findings, report_lines(findings), json=json, ok=not any(each.verdict == "fail" for each in findings))


@audit_app.command("verify")
def audit_verify(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders with logs of one or more replicas. [default: that of the configuration]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The configuration that names the keys and the folder.", envvar="DIN_CONFIG")
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help="A key as ID=FILE; repeatable.")] = None,
    since: Annotated[int, typer.Option("--from", min=1, help="The first segment to verify; earlier ones may be archived.")] = 1,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Verify that nothing in the logs was changed, removed or moved.

    Exit code 1: something was; it is named.
    """
    from din_extproc.roles.operate.audit import AuditUnreadable, verify_logs  # noqa: PLC0415 - the other commands start without it

    with fail_on(AuditUnreadable):
        source = config or (None if key else DEFAULT_CONFIG)
        with show_progress("verifying") as progress:
            proved = verify_logs(tuple(folders or ()), source, tuple(key or ()), since, os.environ, progress=progress)
    finish(proved, [proved.text], json=json, ok=proved.whole)

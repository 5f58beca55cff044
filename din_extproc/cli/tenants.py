"""The commands `tenants` and `usage`: what tenants use now, and what they have used by day.

Rule: as in `app.py`: parse, call a role, print.
"""

import csv
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import typer

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail, print_json, settings_of

Tenant = Annotated[str, typer.Option(help="Only this one.")]


def tenants(
    config: Config = DEFAULT_CONFIG,
    tenant: Tenant = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,  # noqa: FBT002
    every_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """What tenants use of their limits at this moment, and have used today."""
    from din_extproc.roles.operate import tenants as role  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415
    from din_extproc.roles.operate.unknown_tenant import UnknownTenant  # noqa: PLC0415

    settings = settings_of(config)
    try:
        if json:
            print_json(role.asked(settings, tenant))
        elif watch:
            role.watch(settings, tenant, every_s)
        else:
            role.show(settings, tenant)
    except (SidecarUnreachable, UnknownTenant) as error:
        fail(str(error))
    except KeyboardInterrupt:
        return


def usage(
    first: Annotated[
        datetime | None, typer.Option("--from", formats=["%Y-%m-%d"], help="The first day (UTC). [default: 30 days ago]")
    ] = None,
    last: Annotated[datetime | None, typer.Option("--to", formats=["%Y-%m-%d"], help="The last day. [default: today]")] = None,
    tenant: Tenant = "",
    form: Annotated[Literal["csv", "json"], typer.Option("--format", help="How it is written.")] = "csv",
    config: Config = DEFAULT_CONFIG,
) -> None:
    """What tenants have used, per day and model, for charge-back: read from Redis, be the sidecar running or not."""
    from din_extproc.admit.ledger import LimitsUnavailable  # noqa: PLC0415 - the other commands start without it
    from din_extproc.edge.redis.usage import COLUMNS  # noqa: PLC0415
    from din_extproc.roles.operate.unknown_tenant import UnknownTenant  # noqa: PLC0415
    from din_extproc.roles.serve.usage import used  # noqa: PLC0415

    today = datetime.now(UTC)
    begin, end = (first or today - timedelta(days=30)).date(), (last or today).date()
    if begin > end:
        raise typer.BadParameter(f"{begin} is later than the last day, {end}", param_hint="--from")
    try:
        rows = used(settings_of(config), begin, end, tenant)
    except LimitsUnavailable as error:
        fail(f"redis: {error}")
    except UnknownTenant as error:
        fail(str(error))
    if form == "json":
        print_json(rows)
    else:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

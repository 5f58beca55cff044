"""The tenants' current load and usage today: the page of the admin port, and the table of `tenants`.

Rule: the page has a limited number of tenants: those that used most today, or the one that is asked for.
"""

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.live import Live
from rich.table import Table

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.tenant import Budget, Tenant
from din_extproc.edge.redis.ledger import Names, Runner
from din_extproc.edge.redis.live_counters import BudgetUsage, LiveCounters
from din_extproc.edge.redis.usage import UsageStore
from din_extproc.observe.usage_book import UsageTotals, day_of
from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_page
from din_extproc.roles.operate.unknown_tenant import UnknownTenant, unknown_tenant_message
from din_extproc.settings.settings import Settings

_MOST = 200
_TODAY = ("requests", "refused", "would_refuse", "prompt_tokens", "completion_tokens")


class TenantsPage:
    """Builds the page `/tenants`.

    Args:
        settings: The configuration at the start.
        link: Runs Redis commands.
    """

    def __init__(self, settings: Settings, link: Runner) -> None:
        self._live = LiveCounters(link, Names(settings.network, settings.store.one_slot))
        self._usage = UsageStore(link, settings.network)

    async def build(self, settings: Settings, tenant: str, waiting: Mapping[str, int]) -> dict[str, Any]:
        """Build the page. `tenant`: the only one to include; "": those that used most today. `waiting`: queued requests by tenant."""
        named = settings.find_tenant(tenant) if tenant else None
        chosen = list(settings.tenants) if not tenant else [] if named is None else [named]
        try:
            today = _by_tenant(await self._usage.day(day_of(time.time()).isoformat()))
            chosen = sorted(chosen, key=lambda each: -_tokens(today.get(each.id)))[:_MOST]
            standings = await self._live.standings([(each.id, Budget("tenant", each.limits)) for each in chosen])
        except LimitsUnavailable:
            today, standings = {}, []
        known = dict(zip((each.id for each in chosen), standings, strict=False))
        rows = [_row(each, known.get(each.id), today.get(each.id), waiting) for each in chosen[:_MOST]]
        return {"network": settings.network, "stale": not known and bool(rows), "count": len(settings.tenants), "tenants": rows}


def _by_tenant(day: Mapping[Any, UsageTotals]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for line, used in day.items():
        own = sums.setdefault(line.tenant, dict.fromkeys(_TODAY, 0))
        for name in _TODAY:
            own[name] += getattr(used, name)
    return sums


def _tokens(today: Mapping[str, int] | None) -> int:
    return 0 if today is None else today["prompt_tokens"] + today["completion_tokens"]


def _row(tenant: Tenant, live: BudgetUsage | None, today: Mapping[str, int] | None, waiting: Mapping[str, int]) -> dict[str, Any]:
    limits = tenant.limits
    return {
        "tenant": tenant.id,
        "priority": tenant.priority.value,
        "enforced": tenant.enforce,
        "requests": None if live is None else live.requests,
        "rpm": limits.rpm,
        "tokens": None if live is None else live.tokens,
        "tpm": limits.tpm,
        "streams": None if live is None else live.streams,
        "max_streams": limits.max_streams,
        "waiting": waiting.get(tenant.id, 0),
        "today": dict.fromkeys(_TODAY, 0) if today is None else dict(today),
    }


def show(settings: Settings, tenant: str) -> None:
    """Print the table once. Raises as `fetch_tenants` does."""
    Console().print(_table(fetch_tenants(settings, tenant)))


def watch(settings: Settings, tenant: str, every_s: float) -> None:
    """Refresh the table until Ctrl-C."""
    with Live(_table(fetch_tenants(settings, tenant)), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                live.update(_table(fetch_tenants(settings, tenant)), refresh=True)
            except (SidecarUnreachable, UnknownTenant) as error:
                live.update(f"[red]{error}[/red]", refresh=True)


def fetch_tenants(settings: Settings, tenant: str) -> dict[str, Any]:
    """Return the page `/tenants`."""
    shown = fetch_page(settings, f"tenants?tenant={quote(tenant)}" if tenant else "tenants")
    if tenant and not shown["tenants"]:
        raise UnknownTenant(unknown_tenant_message(settings, tenant))
    return shown


def _table(shown: dict[str, Any]) -> Table:
    rows = shown["tenants"]
    more = f" (the {len(rows)} that used most today)" if len(rows) < shown["count"] else ""
    title = f"tenants{' of ' + shown['network'] if shown['network'] else ''}: {shown['count']}{more}"
    table = Table(title=title + (" - redis can't be reached" if shown["stale"] else ""), title_justify="left", title_style="bold")
    for name in ("tenant", "priority", "requests / min", "tokens / min", "streams", "waiting", "today", "refused", "tokens today"):
        table.add_column(name, justify="left" if name in {"tenant", "priority"} else "right")
    for row in rows:
        today = row["today"]
        refused = f"{today['refused']}" + ("" if row["enforced"] else f" (shadow: {today['would_refuse']})")
        table.add_row(
            row["tenant"],
            row["priority"],
            _of(row["requests"], row["rpm"]),
            _of(row["tokens"], row["tpm"]),
            _of(row["streams"], row["max_streams"]),
            str(row["waiting"]),
            str(today["requests"]),
            refused,
            f"{_tokens(today):,}",
        )
    return table


def _of(number: int | None, limit: int | None) -> str:
    shown = "-" if number is None else f"{number:,}"
    if limit is None:
        return shown
    colour = "red" if number is not None and number >= limit else ""
    text = f"{shown} / {limit:,}"
    return f"[{colour}]{text}[/]" if colour else text

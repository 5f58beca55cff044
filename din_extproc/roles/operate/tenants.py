"""The tenants' current load and usage today: the page of the admin port, and the table of `tenants`.

Rule: the page has a limited number of tenants: those that used most today, or the one that is asked for.
"""

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.price import UNITS
from din_extproc.domain.tenant import Budget, Tenant
from din_extproc.edge.redis.calls import Names
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.live_counters import BudgetUsage, LiveCounters
from din_extproc.edge.redis.usage import UsageStore
from din_extproc.observe.usage_book import UsageTotals, format_day
from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_page
from din_extproc.roles.operate.unknown_tenant import UnknownTenant, unknown_tenant_message
from din_extproc.settings.settings import Settings

_MOST = 200
_COLUMNS = {
    "tenant": 0,
    "priority": 120,
    "requests / min": 0,
    "tokens / min": 0,
    "streams": 0,
    "waiting": 120,
    "today": 140,
    "refused": 80,
    "tokens today": 100,
    "cost today": 160,
}
"""The columns in order, each with the terminal width from which on it is shown."""
_TODAY = ("requests", "refused", "would_refuse", "prompt_tokens", "completion_tokens", "cost", "saved")


class TenantsPage:
    """Builds the page `/tenants`.

    Args:
        settings: The configuration at the start.
        link: Runs Redis commands.
    """

    def __init__(self, settings: Settings, link: Runner) -> None:
        self._live = LiveCounters(link, Names(settings.network, settings.store.one_slot))
        self._usage = UsageStore(link, settings.network)

    async def build_page(self, settings: Settings, tenant: str, waiting: Mapping[str, int]) -> dict[str, Any]:
        """Build the page. `tenant`: the only one to include; "": those that used most today. `waiting`: queued requests by tenant."""
        named = settings.find_tenant(tenant) if tenant else None
        chosen = list(settings.tenants) if not tenant else [] if named is None else [named]
        try:
            today = _sum_by_tenant(await self._usage.read_day(format_day(time.time()).isoformat()))
            chosen = sorted(chosen, key=lambda each: -_sum_tokens(today.get(each.id)))[:_MOST]
            usages = await self._live.read_usage([(each.id, Budget("tenant", each.limits)) for each in chosen])
        except LimitsUnavailable:
            today, usages = {}, []
        known = dict(zip((each.id for each in chosen), usages, strict=False))
        rows = [_make_row(each, known.get(each.id), today.get(each.id), waiting, settings.prices.currency) for each in chosen[:_MOST]]
        return {"network": settings.network, "stale": not known and bool(rows), "count": len(settings.tenants), "tenants": rows}


def _sum_by_tenant(day: Mapping[Any, UsageTotals]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for line, used in day.items():
        own = sums.setdefault(line.tenant, dict.fromkeys(_TODAY, 0))
        for name in _TODAY:
            own[name] += getattr(used, name)
    return sums


def _sum_tokens(today: Mapping[str, int] | None) -> int:
    return 0 if today is None else today["prompt_tokens"] + today["completion_tokens"]


def _make_row(
    tenant: Tenant, live: BudgetUsage | None, today: Mapping[str, int] | None, waiting: Mapping[str, int], currency: str
) -> dict[str, Any]:
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
        "cost": _describe_cost(today, currency),
    }


def _describe_cost(today: Mapping[str, int] | None, currency: str) -> str:
    """Return what a tenant has spent today and what smaller models saved; "" without prices."""
    if not currency:
        return ""
    cost, saved = (0, 0) if today is None else (today["cost"], today["saved"])
    return f"{cost / UNITS:.2f} {currency}" + (f" ({saved / UNITS:.2f} saved)" if saved else "")


def fetch_table(settings: Settings, tenant: str) -> None:
    """Print the table once. Raises as `fetch_tenants` does."""
    console = Console()
    console.print(_table(fetch_tenants(settings, tenant), console.width))


def watch_table(settings: Settings, tenant: str, every_s: float) -> None:
    """Refresh the table until Ctrl-C."""
    console = Console()
    with Live(_table(fetch_tenants(settings, tenant), console.width), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                live.update(_table(fetch_tenants(settings, tenant), console.width), refresh=True)
            except (SidecarUnreachable, UnknownTenant) as error:
                live.update(f"[red]{error}[/red]", refresh=True)


def fetch_tenants(settings: Settings, tenant: str) -> dict[str, Any]:
    """Return the page `/tenants`."""
    page = fetch_page(settings, f"tenants?tenant={quote(tenant)}" if tenant else "tenants")
    if tenant and not page["tenants"]:
        raise UnknownTenant(unknown_tenant_message(settings, tenant))
    return page


def _table(page: dict[str, Any], width: int) -> Table:
    """Build the table for a terminal width: numbers stay whole, long names are folded."""
    rows = page["tenants"]
    more = f" (the {len(rows)} that used most today)" if len(rows) < page["count"] else ""
    title = f"tenants{' of ' + page['network'] if page['network'] else ''}: {page['count']}{more}"
    table = Table(title=title + (" - redis can't be reached" if page["stale"] else ""), title_justify="left", title_style="bold")
    names = [name for name, fits in _COLUMNS.items() if width >= fits]
    for name in names:
        left = name in {"tenant", "priority"}
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in rows:
        today = row["today"]
        refused = f"{today['refused']}" + ("" if row["enforced"] else f" (shadow: {today['would_refuse']})")
        cells = {
            "tenant": escape(row["tenant"]),
            "priority": row["priority"],
            "requests / min": _of(row["requests"], row["rpm"]),
            "tokens / min": _of(row["tokens"], row["tpm"]),
            "streams": _of(row["streams"], row["max_streams"]),
            "waiting": str(row["waiting"]),
            "today": _brief(today["requests"]),
            "refused": refused,
            "tokens today": _brief(_sum_tokens(today)),
            "cost today": row["cost"],
        }
        table.add_row(*(cells[name] for name in names))
    return table


def _of(number: int | None, limit: int | None) -> str:
    used = "-" if number is None else _brief(number)
    if limit is None:
        return used
    colour = "red" if number is not None and number >= limit else ""
    text = f"{used} / {_brief(limit)}"
    return f"[{colour}]{text}[/]" if colour else text


def _brief(number: int) -> str:
    """A number in at most six characters: `99,999`, `123k`, `12.3M`, `4.56G`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= max(size, 10**5):
            return f"{number // 10**3}k" if unit == "k" else f"{number / size:.3g}{unit}"
    return f"{number:,}"

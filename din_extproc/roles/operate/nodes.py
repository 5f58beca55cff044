"""The role of `nodes`: the nodes of a running sidecar, as a table.

Rule: the admin port is the only source.
"""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from din_extproc.domain.health import EXCLUDED, BreakerState
from din_extproc.domain.node import Endpoint
from din_extproc.edge.registry.forms import HealthForm, MemberForm
from din_extproc.edge.tls import CertificateUnusable, pinned_context
from din_extproc.settings.gateway import as_reached
from din_extproc.settings.settings import Settings

_TIMEOUT_S = 3.0
_KEY = "DIN_ADMIN_KEY"
_COLOURS = {
    "ready": "green",
    "recovering": "yellow",
    "ejected": "red",
    "loading": "yellow",
    "draining": "yellow",
    "quarantined": "red",
    "dead": "red",
}
_NUMBERS = frozenset({"trust", "ttft", "waiting", "running", "kv", "heard"})
_COLUMNS = {
    "node": 0,
    "state": 0,
    "trust": 0,
    "breaker": 100,
    "ttft": 140,
    "pools": 0,
    "model": 160,
    "address": 120,
    "waiting": 100,
    "running": 80,
    "kv": 140,
    "heard": 140,
    "why": 0,
}
"""The columns in order, each with the terminal width from which on it is shown."""


class SidecarUnreachable(Exception):  # noqa: N818 - it says what the sidecar is
    """The sidecar's admin port did not answer; the message says where and why."""


def fetch_page(settings: Settings, page: str = "nodes", order: bytes | None = None) -> dict[str, Any]:
    """Return a page of the admin port; with a body, its answer to an order.

    Raises:
        SidecarUnreachable: the port does not answer, or answers with an error.
    """
    section = settings.gateway.admin
    reached = as_reached(section.address)
    key = os.environ.get(_KEY, "")
    url = f"{'http' if section.tls is None else 'https'}://{Endpoint(reached.host, reached.port)}/{page}"
    try:
        tls = None if section.tls is None else pinned_context(section.tls.files(settings.folder))
        request = urllib.request.Request(url, order, headers={"authorization": f"Bearer {key}"} if key else {})  # noqa: S310 - the scheme is fixed above
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=tls) as reply:  # noqa: S310 - likewise
            return msgspec.json.decode(reply.read(), type=dict[str, Any])
    except urllib.error.HTTPError as error:
        needs = "a key of gateway.admin.keys" if order is None else "a key of gateway.admin.keys that has `operate: true`"
        hint = f"; set {_KEY} in the environment to {needs}" if error.code == HTTPStatus.UNAUTHORIZED else _read_detail(error)
        raise SidecarUnreachable(f"{url}: {error.reason}{hint}") from error
    except (OSError, CertificateUnusable, msgspec.DecodeError) as error:
        raise SidecarUnreachable(f"{url}: {getattr(error, 'reason', error)}") from error


def _read_detail(error: urllib.error.HTTPError) -> str:
    """Return the admin port's reason for a refusal."""
    try:
        return f": {msgspec.json.decode(error.read())['detail']}"
    except (OSError, msgspec.DecodeError, LookupError, TypeError):
        return ""


def give_order(settings: Settings, node_id: str, order: str, reason: str) -> dict[str, Any]:
    """Order a node to be drained, undrained, quarantined or released. Raises as `fetch_page` does."""
    return fetch_page(settings, f"nodes/{quote(node_id, safe='')}/{order}", msgspec.json.encode({"reason": reason}))


def fetch_rows(settings: Settings) -> tuple[MemberForm, ...]:
    """Return every node that the sidecar knows. Raises as `fetch_page` does."""
    return msgspec.convert(fetch_page(settings)["nodes"], tuple[MemberForm, ...])


def fetch_table(settings: Settings) -> None:
    """Print the table once. Raises as `fetch_page` does."""
    console = Console()
    console.print(_build_table(fetch_page(settings), console.width))


def watch_table(settings: Settings, every_s: float) -> None:
    """Refresh the table until Ctrl-C."""
    console = Console()
    with Live(_build_table(fetch_page(settings), console.width), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                live.update(_build_table(fetch_page(settings), console.width), refresh=True)
            except SidecarUnreachable as error:
                live.update(f"[red]{error}[/red]", refresh=True)


def _build_table(page: dict[str, Any], width: int) -> Table:
    """Build the table for a terminal width: long reasons are folded, never cut."""
    nodes = page["nodes"]
    states = ", ".join(f"{count} {state}" for state, count in _count_states(nodes)) or "none"
    title = f"nodes{' of ' + page['network'] if page['network'] else ''}: {states}"
    table = Table(title=title + (" - stale: redis can't be reached" if page["stale"] else ""), title_justify="left", title_style="bold")
    names = [name for name, fits in _COLUMNS.items() if width >= fits]
    for name in names:
        right = name in _NUMBERS
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right or name == "state")
    for row in nodes:
        cells = _format_cells(row)
        table.add_row(*(cells[name] for name in names))
    return table


def _format_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one node by column."""
    node, beat = row["node"], row["beat"] or {}
    health = None if row.get("health") is None else msgspec.convert(row["health"], HealthForm)
    usage, age = beat.get("kv_cache_usage"), row["beat_age_s"]
    return {
        "node": escape(node["id"]),
        "state": f"[{_COLOURS[_format_state(row)]}]{_format_state(row)}[/]",
        "trust": f"{row['trust']:.2f}",
        "breaker": _format_breaker(health),
        "ttft": "-" if health is None or health.ttft_ms is None else f"{health.ttft_ms:.0f} ms",
        "pools": ", ".join(row["pools"]) or "-",
        "model": escape(f"{node['model']} {node['version']} {node['dtype']}"),
        "address": escape(node["address"]),
        "waiting": _format_number(beat.get("waiting")),
        "running": _format_number(beat.get("running")),
        "kv": "-" if usage is None else f"{usage:.0%}",
        "heard": "-" if age is None else f"{age:.1f} s",
        "why": escape((health.summary if health is not None else "") or (row["reasons"][-1] if row["reasons"] else "")),
    }


def _count_states(nodes: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    for state in _COLOURS:
        count = sum(_format_state(row) == state for row in nodes)
        if count:
            yield state, count


def _format_state(row: dict[str, Any]) -> str:
    """The state in effect: a ready node whose breaker lets nothing pass is ejected, one that gets a part of its requests recovers."""
    breaker = (row.get("health") or {"state": "closed"})["state"]
    if row["state"] != "ready" or breaker == "closed":
        return str(row["state"])
    return "ejected" if breaker in EXCLUDED else "recovering"


def _format_breaker(health: HealthForm | None) -> str:
    if health is None:
        return "closed"
    colour = "green" if health.state is BreakerState.CLOSED else "red" if health.state is BreakerState.OPEN else "yellow"
    share = "" if health.state is BreakerState.CLOSED or health.share == 0.0 else f" {health.share:.0%}"
    return f"[{colour}]{health.state.value}{share}[/]"


def _format_number(number: int | None) -> str:
    return "-" if number is None else str(number)

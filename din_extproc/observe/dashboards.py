"""Grafana's dashboards: what clients see, what tenants use, how nodes do, how the gateway does.

Rule: a panel is a title, a unit and its questions; where it stands follows from its order.
"""

from typing import Any

from msgspec import Struct

from din_extproc.observe import instruments as of
from din_extproc.observe.instruments import label
from din_extproc.observe.queries import failures, mean, quantile, rate, share, total

_DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3
_SCHEMA = 39


class Panel(Struct, frozen=True):
    """One graph."""

    title: str
    unit: str
    """Grafana's: `s`, `reqps`, `short`, `percentunit`."""
    queries: tuple[tuple[str, str], ...]
    """Legends (labels in `{{ }}`) and questions."""


def _each(attribute: str) -> str:
    return "{{" + label(attribute) + "}}"


def _quantiles(title: str, instrument: of.Instrument, *by: str) -> Panel:
    legend = " ".join(_each(attribute) for attribute in by)
    return Panel(title, "s", tuple((f"P{round(at * 100)} {legend}".strip(), quantile(at, instrument, *by)) for at in (0.5, 0.95, 0.99)))


_TRAFFIC = (
    Panel("Requests by outcome", "reqps", ((_each(of.OUTCOME), rate(of.REQUESTS, of.OUTCOME)),)),
    Panel("Failed at nodes", "percentunit", (("failed", failures()),)),
    Panel("Refusals by code", "reqps", ((_each(of.CODE), rate(of.REFUSALS, of.CODE)),)),
    _quantiles("Time to first token", of.TIME_TO_FIRST_TOKEN, of.MODEL),
    _quantiles("Time per output token", of.TIME_PER_OUTPUT_TOKEN, of.MODEL),
    _quantiles("Whole exchange", of.REQUEST_DURATION, of.MODEL),
    _quantiles("From the whole request to the node", of.TO_NODE, of.MODEL),
    Panel("Waiting for limits", "short", (("waiting", total(of.WAITING)),)),
    Panel("Limits in shadow mode would refuse", "reqps", ((_each(of.LIMIT), rate(of.WOULD_REFUSE, of.LIMIT)),)),
    Panel("Answered by a fallback", "reqps", ((_each(of.RULE), rate(of.DEGRADED, of.RULE)),)),
    Panel("Left the site", "reqps", ((_each(of.POOL), rate(of.LEFT_SITE, of.POOL)),)),
    Panel("Tokens that left the site", "short", ((_each(of.POOL), rate(of.LEFT_SITE_TOKENS, of.POOL)),)),
    Panel("Attempts after the first", "reqps", ((_each(of.POOL), rate(of.RETRIES, of.POOL)),)),
    Panel("Answers outside the commonest dtype", "percentunit", ((_each(of.MODEL), total(of.MIXED_DTYPE, of.MODEL)),)),
)
_TENANTS = (
    Panel("Requests", "reqps", ((_each(of.TENANT), rate(of.REQUESTS, of.TENANT)),)),
    Panel("Tokens", "short", ((f"{_each(of.TENANT)} {_each(of.TOKEN_TYPE)}", rate(of.TOKENS, of.TENANT, of.TOKEN_TYPE)),)),
    Panel("Refused", "reqps", ((_each(of.TENANT), rate(of.REQUESTS, of.TENANT, **{label(of.OUTCOME): "refused"})),)),
    Panel("Requests by identity", "reqps", ((_each(of.IDENTITY), rate(of.IDENTITIES, of.IDENTITY)),)),
    _quantiles("Time to first token", of.TIME_TO_FIRST_TOKEN, of.TENANT),
    Panel("Reserved for each token used", "short", ((
        _each(of.TENANT),
        share(rate(of.RESERVED, of.TENANT), rate(of.TOKENS, of.TENANT, **{label(of.TOKEN_TYPE): "input|output"})),
    ),)),
    Panel("Error of the prompt estimate", "percentunit", ((_each(of.MODEL), mean(of.ESTIMATE_ERROR, of.MODEL)),)),
    Panel("Mean tokens of an exchange", "short", ((
        f"{_each(of.TENANT)} {_each(of.TOKEN_TYPE)}", mean(of.TOKEN_USAGE, of.TENANT, of.TOKEN_TYPE),
    ),)),
    Panel("Cached prompt tokens", "percentunit", ((_each(of.TENANT), share(
        rate(of.TOKENS, of.TENANT, **{label(of.TOKEN_TYPE): "cached"}), rate(of.TOKENS, of.TENANT, **{label(of.TOKEN_TYPE): "input"}),
    )),)),
    Panel("Budgets", "percentunit", (
        (f"{_each(of.BUDGET)} {_each(of.TENANT)}", f"max by ({label(of.BUDGET)}, {label(of.TENANT)}) ({of.BUDGET_USED.prometheus})"),
    )),
    Panel("Budget warnings", "short", ((f"{_each(of.BUDGET)} {_each(of.LEVEL)} %", rate(of.BUDGET_ALERTS, of.BUDGET, of.LEVEL)),)),
    Panel("Cost per hour", "short", ((_each(of.TENANT), f"3600 * {rate(of.COST, of.TENANT)}"),)),
    Panel("Saved per hour by smaller models", "short", ((_each(of.TENANT), f"3600 * {rate(of.SAVED, of.TENANT)}"),)),
)  # fmt: skip
_NODES = (
    Panel("Nodes by state", "short", ((_each(of.STATE), f"max by ({label(of.STATE)}) ({of.NODES.prometheus})"),)),
    Panel("Requests by node", "reqps", ((_each(of.NODE), rate(of.NODE_REQUESTS, of.NODE)),)),
    Panel("Tokens made by node", "short", ((_each(of.NODE), rate(of.NODE_TOKENS, of.NODE, **{label(of.TOKEN_TYPE): "output"})),)),
    Panel("Time to first token, P95", "s", ((_each(of.NODE), quantile(0.95, of.NODE_FIRST_TOKEN, of.NODE)),)),
    Panel("Whole answer, P95", "s", ((_each(of.NODE), quantile(0.95, of.NODE_DURATION, of.NODE)),)),
    Panel("Failed by node", "reqps", ((_each(of.NODE), rate(of.NODE_REQUESTS, of.NODE, **{label(of.OUTCOME): "upstream_.*"})),)),
    Panel("In line", "short", ((_each(of.NODE), f"max by ({label(of.NODE)}) ({of.NODE_WAITING.prometheus})"),)),
    Panel("Running", "short", ((_each(of.NODE), f"max by ({label(of.NODE)}) ({of.NODE_RUNNING.prometheus})"),)),
    Panel("KV cache", "percentunit", ((_each(of.NODE), f"max by ({label(of.NODE)}) ({of.NODE_KV.prometheus})"),)),
    Panel("Trust", "percentunit", ((_each(of.NODE), f"min by ({label(of.NODE)}) ({of.NODE_TRUST.prometheus})"),)),
    Panel("Not heard of for", "s", ((_each(of.NODE), f"min by ({label(of.NODE)}) ({of.NODE_SILENCE.prometheus})"),)),
    Panel("Breakers by state", "short", ((_each(of.STATE), f"max by ({label(of.STATE)}) ({of.BREAKERS.prometheus})"),)),
    Panel("Share of its requests", "percentunit", (
        (_each(of.NODE), f"min by ({label(of.NODE)}) ({of.NODE_SHARE.prometheus})"),
        (f"pool {_each(of.POOL)}", f"min by ({label(of.POOL)}) ({of.POOL_SHARE.prometheus})"),
    )),
    Panel("First token of the last probe", "s", ((_each(of.NODE), f"max by ({label(of.NODE)}) ({of.NODE_PROBE.prometheus})"),)),
    Panel("Tokens in flight", "short", ((_each(of.NODE), total(of.NODE_TAKEN, of.NODE)),)),
    Panel("Broken events", "short", ((_each(of.NODE), rate(of.BAD_EVENTS, of.NODE)),)),
    Panel("Double checks", "short", ((_each(of.AGREEMENT), rate(of.DOUBLE_CHECKS, of.AGREEMENT)),)),
)  # fmt: skip
_GATEWAY = (
    _quantiles("Decision", of.DECISION),
    Panel("Decisions", "reqps", ((_each(of.VERDICT), rate(of.DECISIONS, of.VERDICT)),)),
    Panel("In flight", "short", (("open", total(of.OPEN)), ("not settled", total(of.UNSETTLED)))),
    Panel("Route cache", "percentunit", (("hits", share(rate(of.CACHE_HITS), f"{rate(of.CACHE_HITS)} + {rate(of.CACHE_MISSES)}")),)),
    Panel("Ready, Redis, shared limits, configuration", "short", (
        ("ready", total(of.READY)), ("redis", total(of.REDIS_UP)), ("limits shared", total(of.LIMITS_SHARED)),
        ("configuration sound", total(of.CONFIG_SOUND)), ("workers of all sidecars", f"max({of.REPLICAS.prometheus})"),
    )),
    Panel("Faults and lost accounts", "short", (
        ("faults", rate(of.FAULTS)), ("settlements given up", rate(of.GIVEN_UP)), ("settlements unknown", rate(of.UNKNOWN)),
        ("access logs dropped", rate(of.LOGS_DROPPED)), ("access logs unreadable", rate(of.LOGS_UNREADABLE)),
    )),
    Panel("Workers", "short", (("wanted", total(of.WORKERS)), ("started again", rate(of.WORKER_RESTARTS)))),
    Panel("Envoys", "short", (("told", total(of.XDS_ENVOYS)), (f"refused {_each(of.XDS_TYPE)}", total(of.XDS_REFUSED, of.XDS_TYPE)))),
    Panel("Audit log", "short", (
        ("records", rate(of.AUDIT_RECORDS)), ("waiting", total(of.AUDIT_WAITING)), ("dropped", rate(of.AUDIT_DROPPED)),
    )),
    Panel("Spans", "short", (("exported", rate(of.SPANS)), ("dropped", rate(of.SPANS_DROPPED)))),
    Panel("Measurements without room for their labels", "short", (("folded", rate(of.SERIES_FOLDED)),)),
    Panel("Sensitive data in prompts", "short", ((_each(of.SENSITIVE_KIND), rate(of.SENSITIVE, of.SENSITIVE_KIND)),)),
    Panel("Node table", "short", (("stale", total(of.TABLE_STALE)),)),
    Panel("Discovery that fails, and endpoints refused", "short", (
        (_each(of.POOL), total(of.DISCOVERY_FAILING, of.POOL)), (f"refused {_each(of.POOL)}", total(of.DISCOVERY_REFUSED, of.POOL)),
    )),
)  # fmt: skip


def build_dashboards() -> dict[str, dict[str, Any]]:
    """Every dashboard by the name of its file."""
    rows = {"traffic": _TRAFFIC, "tenants": _TENANTS, "nodes": _NODES, "gateway": _GATEWAY}
    return {f"din-{name}.json": _dashboard(name, panels) for name, panels in rows.items()}


def _dashboard(name: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": f"din-{name}",
        "title": f"din-extproc: {name}",
        "tags": ["din-extproc"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": [_panel(at, panel) for at, panel in enumerate(panels)],
    }


def _panel(at: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(at, _PER_ROW)
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(panel.queries)
    ]
    return {
        "id": at + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }

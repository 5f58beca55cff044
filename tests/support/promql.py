"""As much of PromQL as is needed to find the metrics of a query."""

import json
import re

import yaml

from din_extproc.observe.instruments import Instrument

_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_KEYWORDS = {
    *("sum", "max", "min", "avg", "count", "by", "without", "rate", "increase", "histogram_quantile", "abs"),
    *("and", "or", "unless", "on", "ignoring", "group_left", "group_right", "bool", "offset"),
}


def sample_names(instrument: Instrument) -> tuple[str, ...]:
    """Return the names of the instrument's samples on the metrics page."""
    name = instrument.prometheus
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if instrument.bounds else (name,)


def metrics_of(query: str) -> set[str]:
    """Return the names of metrics in the query."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring) \([^)]*\)", "", bare)
    return {word for word in _WORD.findall(bare) if word not in _KEYWORDS}


def queries_in(name: str, text: str) -> dict[str, str]:
    """Return the queries of a dashboard (`.json`) or a rules file by their place."""
    if name.endswith(".json"):
        panels = json.loads(text)["panels"]
        return {f"{name} {panel['title']} {target['refId']}": target["expr"] for panel in panels for target in panel["targets"]}
    return {rule["alert"]: rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}

"""The role `render monitoring`: Grafana's dashboards and Prometheus' alert rules, made from the metrics themselves.

Rule: what is written is what the code says; the files in `deploy/` are these.
"""

from pathlib import Path

import msgspec
import yaml

from din_extproc.observe.alerts import rules
from din_extproc.observe.dashboards import dashboards

_RULES = "prometheus/rules/din-extproc.yml"


def monitoring() -> dict[str, str]:
    """Every file's text by its path below the folder."""
    files = {f"grafana/{name}": _json(content) for name, content in dashboards().items()}
    return {**files, _RULES: yaml.safe_dump(rules(), sort_keys=False, width=140)}


def write(folder: Path) -> list[Path]:
    """Write them. Returns what was written.

    Raises:
        OSError: a file can't be written.
    """
    written = []
    for name, text in monitoring().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def _json(content: object) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"

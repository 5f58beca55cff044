"""promtool on the generated files: the rules, every query of rules and dashboards, and the page of a running sidecar.

Rule: it runs where the tool is installed; the gate does not need it.
Run: python -m tests.support.promtool PROMTOOL [http://127.0.0.1:9090]
"""

import subprocess
import sys
import urllib.request
from pathlib import Path

from din_extproc.roles.configure.monitoring import monitoring_files
from tests.support.promql import queries_in

_RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
_GRAFANAS = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}
"""Variables that Grafana replaces."""


def main(promtool: str, url: str = "") -> int:
    """Print all objections. Return 0 if there are none."""
    objections = [*_rules(promtool), *_queries(promtool), *(_page(promtool, url) if url else ())]
    print("\n".join(objections) or "no objections")
    return 1 if objections else 0


def _rules(promtool: str) -> list[str]:
    rules = sorted(map(str, _RULES.glob("*.yml")))
    print(f"{len(rules)} files of rules")
    return _asked([promtool, "check", "rules", "--lint=all", "--lint-fatal", *rules])


def _queries(promtool: str) -> list[str]:
    queries = [query for name, text in monitoring_files().items() for query in queries_in(name, text).values()]
    print(f"{len(queries)} queries")
    objections = []
    for query in queries:
        for variable, value in _GRAFANAS.items():
            query = query.replace(variable, value)  # noqa: PLW2901 - the same query, as Grafana sends it
        objections += _asked([promtool, "--experimental", "promql", "format", query])
    return objections


def _page(promtool: str, url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        page = reply.read()
    print(f"{page.count(b'# TYPE ')} metrics")
    return _asked([promtool, "check", "metrics"], page)


def _asked(command: list[str], given: bytes = b"") -> list[str]:
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    output = (done.stdout + done.stderr).decode(errors="replace").strip()
    return [f"{' '.join(command[1:])}: {output}"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

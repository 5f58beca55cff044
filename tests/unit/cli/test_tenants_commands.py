"""`tenants`, `explain` and `keys` report an unknown tenant alike; `usage` rejects an impossible range of days."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.roles.serve.usage import _list_days

DIN = """
version: 1
keys_file: keys.yaml
gateway: {{ admin: {{ address: "127.0.0.1:{port}" }} }}
pools:
  p:
    model: m
    engine: vllm
    nodes: [{{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }}]
tenants: [{{ id: acme, models: ["*"] }}, {{ id: finance, models: ["*"] }}]
"""


class Page(BaseHTTPRequestHandler):
    """The admin port of a sidecar that knows `acme` and `finance`."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query).get("tenant", [""])[0]
        rows = [{"tenant": known} for known in ("acme", "finance") if asked in {"", known}]
        body = json.dumps({"network": "", "stale": False, "count": 2, "tenants": rows}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        file = tmp_path_factory.mktemp("tenants") / "din.yaml"
        file.write_text(DIN.format(port=server.server_port))
        yield str(file)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", [["tenants", "--json"], ["tenants"], ["tenants", "--watch"], ["explain", "-"], ["keys", "new"]])
@pytest.mark.parametrize(
    ("name", "hint"), [("acmee", "did you mean 'acme'?"), ("nope", "there are: acme, finance"), ("a b&c", "there are: acme, finance")]
)
def test_an_unknown_tenant_is_reported_alike_by_every_command(config, command, name, hint):
    result = CliRunner().invoke(app, [*command, "--tenant", name, "-c", config], input='{"model": "m"}')
    assert (result.exit_code, result.stderr) == (1, f"error: no tenant is called {name!r}; {hint}\n"), result.output


def test_a_tenant_that_there_is_is_shown_alone(config):
    result = CliRunner().invoke(app, ["tenants", "--json", "--tenant", "acme", "-c", config])
    assert [row["tenant"] for row in json.loads(result.output)["tenants"]] == ["acme"]


@pytest.mark.parametrize("days", [["--from", "2026-02-02", "--to", "2026-02-01"], ["--to", "2020-01-01"], ["--from", "9999-12-31"]])
def test_a_first_day_after_the_last_one_is_a_wrong_call(config, days):
    result = CliRunner().invoke(app, ["usage", *days, "-c", config])
    assert (result.exit_code, "--from" in result.output) == (2, True), result.output


def test_no_day_is_asked_for_that_no_usage_can_be_of():
    today = datetime.now(UTC).date()
    days = list(_list_days(date.min, date.max))
    assert len(days) == 403
    assert today - timedelta(days=400) in days
    assert today in days
    assert list(_list_days(date.min, date.min)) == []
    assert list(_list_days(today, today)) == [today]

"""`keys`: its output can be used as it is, and impossible values are wrong calls."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings

CONFIG = """
version: 1
pools:
  p:
    model: m
    engine: vllm
    nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }]
tenants:
- id: a
  models: ["*"]
  keys:
"""


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["keys", *arguments])


def test_a_key_for_din_yaml_has_its_end_in_the_printed_line(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    line = invoke("new", "k1", "--expires-days", "2").output.splitlines()[-1]
    file = tmp_path / "din.yaml"
    file.write_text(CONFIG + line + "\n")
    settings = load(file, {})
    assert isinstance(settings, Settings), settings
    [(_, [key])] = settings.keys
    assert key.id == "k1"
    assert before <= key.expires - timedelta(days=2) <= datetime.now(UTC)


def test_a_key_for_machines_has_its_end_and_one_for_ever_has_none():
    made = json.loads(invoke("new", "k1", "--expires-days", "1", "--json").output)
    assert datetime.fromisoformat(made["expires"]) > datetime.now(UTC) + timedelta(hours=23)
    assert json.loads(invoke("new", "k1", "--json").output)["expires"] is None
    assert "expires" not in invoke("new", "k1").output


@pytest.mark.parametrize("value", ["inf", "nan", "1e9", "1e12", "-1"])
@pytest.mark.parametrize("command", [["new", "k1", "--expires-days"], ["rotate", "k1", "--overlap-hours"]])
def test_an_end_that_no_calendar_has_is_a_wrong_call(command, value):
    result = invoke(*command, value)
    assert (result.exit_code, command[-1] in result.output) == (2, True), result.output

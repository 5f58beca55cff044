"""The table of nodes on terminals of any width, and the commands that make keys."""

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.roles.operate.nodes import _build_table
from din_extproc.tools.engine_model.faults import KINDS

NODE = {"id": "gpu-07", "address": "10.0.0.7:8000", "model": "qwen2.5-14b-instruct", "version": "2025.3.1", "dtype": "bf16"}
WHY = "loading: the engine lists [another], not qwen2.5-14b-instruct"
ROW = {
    "node": NODE,
    "state": "loading",
    "trust": 1.0,
    "reasons": ["drained", WHY],
    "beat": {"waiting": 3, "running": 12, "kv_cache_usage": 0.5},
    "beat_age_s": 1.2,
    "pools": ["cluster-fast-throughput-14b"],
}


def render(width: int) -> list[str]:
    output = StringIO()
    Console(width=width, file=output).print(_build_table({"network": "", "stale": False, "nodes": [ROW]}, width))
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_every_width_shows_who_how_and_why_in_full(width):
    lines = render(width)
    assert max(map(len, lines)) <= width
    columns = zip(*(line.strip("│┃").split("│") for line in lines if line.startswith("│")), strict=True)
    texts = ["".join(part.strip() for part in column).replace(" ", "") for column in columns]
    for expected in ("gpu-07", "loading", WHY.replace(" ", "")):
        assert any(expected in text for text in texts), (expected, texts)
    assert ("10.0.0.7:8000" in "".join(texts)) is (width >= 120)


@pytest.mark.parametrize("command", [["keys", "new", "a b"], ["keys", "node", "-"]])
def test_a_name_that_no_key_can_have_is_a_wrong_call(command):
    result = CliRunner().invoke(app, [*command[:-1], "--", command[-1]])
    assert result.exit_code == 2, result.output


def test_the_modelled_engine_says_which_faults_it_knows():
    help_text = "".join(CliRunner().invoke(app, ["engine-sim", "--help"], env={"COLUMNS": "200"}).output.split())
    assert all(kind in help_text for kind in KINDS)

"""`--help` shows every command in one of four groups, with one line each in a terminal of 80 columns."""

import pytest
import typer
from typer.testing import CliRunner

from din_extproc.cli.app import app

COMMANDS = typer.main.get_command(app).commands


def help_lines(*command: str) -> list[str]:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    return [line.strip("│ ") for line in result.output.splitlines()]


def test_help_groups_the_commands():
    groups = {"Run": [], "Configure": [], "Plan": [], "Operate": []}
    for line in help_lines():
        title, name = line.strip("╭─╮ "), line.split(" ")[0]
        if title in groups:
            group = groups[title]
        elif name in COMMANDS:
            group.append(name)
    assert groups == {
        "Run": ["serve", "node", "envoy", "demo", "engine-sim"],
        "Configure": ["check", "render", "keys"],
        "Plan": ["explain", "replay", "simulate", "verify", "bench"],
        "Operate": ["tenants", "usage", "drain", "doctor", "budgets", "nodes", "audit"],
    }


@pytest.mark.parametrize("group", [(), *((name,) for name, command in COMMANDS.items() if hasattr(command, "commands"))])
def test_each_command_has_one_full_line_of_help(group):
    commands = COMMANDS[group[0]].commands if group else COMMANDS
    lines = {line.split(" ")[0]: line for line in help_lines(*group) if line.split(" ")[0] in commands}
    assert lines.keys() == commands.keys()
    assert all(line.endswith(".") for line in lines.values()), lines

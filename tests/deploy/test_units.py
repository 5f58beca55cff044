"""The systemd units: systemd's own check where it is installed, and what it does not know of our commands everywhere."""

import configparser
import shlex
import shutil
import subprocess

import pytest
import typer
from typer.core import TyperGroup

from din_extproc.cli.app import app
from tests.deploy.shipped import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/din/bin/din-extproc"


class Lines(dict):
    """A key that is given again keeps both values."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def read(unit) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, dict_type=Lines, interpolation=None, empty_lines_in_values=False)
    parser.optionxform = str
    parser.read(unit)
    return parser


def commands(unit) -> list[list[str]]:
    service = read(unit)["Service"]
    lines = [line for name, value in service.items() if name.startswith("Exec") for line in value.splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_each_command_is_one_that_the_program_takes(unit, tmp_path):
    rendered = tmp_path / "envoy.yaml"
    rendered.touch()
    ours = [
        [str(rendered) if word.endswith("/envoy.yaml") else word for word in words[1:]] for words in commands(unit) if words[0] == PROGRAM
    ]
    assert ours
    for arguments in ours:
        command = typer.main.get_command(app)
        while isinstance(command, TyperGroup):
            command = command.commands[arguments.pop(0)]
        command.make_context(unit.stem, arguments)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_no_unit_runs_as_root_or_keeps_rights(unit):
    service = read(unit)["Service"]
    assert service["User"] == "din"
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] in {"", "CAP_NET_BIND_SERVICE"}


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.stem != "din-node"], ids=lambda unit: unit.stem)
def test_systemd_waits_longer_than_the_drain(unit):
    service = read(unit)["Service"]
    [drain] = [float(words[words.index("--drain-s") + 1]) for words in commands(unit) if "--drain-s" in words]
    assert int(service["TimeoutStopSec"]) > drain + 10
    assert service["KillMode"] == "mixed"


def test_systemd_has_no_complaint_but_that_the_program_is_not_installed():
    program = shutil.which("systemd-analyze")
    output = (
        ""
        if program is None
        else subprocess.run([program, "verify", "--man=no", *UNITS], capture_output=True, text=True, check=False, timeout=60).stderr
    )
    assert [line for line in output.splitlines() if ".service" in line and "not executable" not in line] == []

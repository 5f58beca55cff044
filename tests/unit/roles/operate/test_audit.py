"""`din-extproc audit verify` over the logs of several replicas, each in a folder of its own."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from din_extproc.cli.app import app
from tests.support.audit_logs import KEY, log_files, write


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    (tmp_path / "k1.key").write_bytes(KEY.secret)
    made = [tmp_path / name for name in ("gw-1", "gw-2", "gw-3")]
    for folder in made:
        folder.mkdir()
        write(folder, 20, replica=folder.name, rotate_bytes=2_000)
    return made


def proved(folders: list[Path], *options: str) -> Result:
    return CliRunner().invoke(app, ["audit", "verify", *map(str, folders), "--key", f"k1={folders[0].parent / 'k1.key'}", *options])


def test_the_logs_of_all_replicas_are_proved_at_once(folders):
    done = proved(folders)
    assert done.exit_code == 0, done.output
    assert all(f"gw-{at}" in done.stdout for at in (1, 2, 3))
    assert done.stdout.splitlines()[-1].startswith("whole")


def test_what_was_changed_in_one_of_them_is_named_with_file_and_line(folders):
    path = next(path for path in log_files(folders[1]) if path.suffix == ".jsonl")
    path.write_bytes(path.read_bytes().replace(b'"tenant":"acme"', b'"tenant":"evil"', 1))
    done = proved(folders, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert not report["whole"]
    (finding,) = report["findings"]
    assert (finding["file"], finding["line"]) == (path.name, 2)
    assert [each["replica"] for each in report["replicas"]] == ["gw-1", "gw-2", "gw-3"]

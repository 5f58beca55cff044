"""What `check` says about broken files, word for word. `make golden` rewrites the expectations."""

import os
from pathlib import Path

import pytest

from din_extproc.settings.check import check

BROKEN = Path(__file__).parent / "check" / "broken"
ENV = {"WORKERS": "many", "REDIS_URL": "http://user:hunter2@10.0.0.1/nine", "LISTENER": "internal-name:10000"}
REWRITE = os.environ.get("DIN_REWRITE_GOLDENS") == "1"


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_broken_file_is_reported_with_everything_that_is_wrong_with_it(path, monkeypatch):
    monkeypatch.chdir(BROKEN)
    checked = check(Path(path.name), ENV)
    golden = BROKEN.parent / f"{path.stem}.txt"
    if REWRITE:
        golden.write_text(checked.text + "\n")
    assert not checked.sound
    assert checked.text + "\n" == golden.read_text()


def test_no_report_holds_a_secret():
    reports = [path.read_text() for path in BROKEN.parent.glob("*.txt")]
    assert reports
    for secret in ("hunter2", "plain-secret-text", "internal-name"):
        assert [report for report in reports if secret in report] == []

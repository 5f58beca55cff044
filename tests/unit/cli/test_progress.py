"""Progress bars appear for long work on a terminal, and never elsewhere."""

import io

import pytest

from din_extproc.cli import progress
from din_extproc.domain.progress import part_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "quick_s", "drawn"), [(True, 0.0, True), (True, 3600.0, False), (False, 0.0, False)])
def test_a_bar_is_drawn_for_long_work_on_a_terminal_only(monkeypatch, terminal, quick_s, drawn):
    output = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_QUICK_S", quick_s)
    with progress.show_progress("replaying") as report:
        report(0.0)
        report(0.5)
    assert ("replaying" in output.getvalue()) is drawn


def test_the_parts_of_some_work_add_up():
    shares: list[float] = []
    for number in range(2):
        for share in (0.0, 0.5, 1.0):
            part_of(shares.append, number, 2)(share)
    assert shares == [0.0, 0.25, 0.5, 0.5, 0.75, 1.0]

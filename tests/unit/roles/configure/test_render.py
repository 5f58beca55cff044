"""Rendering over an earlier rendering: manual changes are kept, conflicts reported, nothing overwritten without --force."""

from pathlib import Path

import pytest

from din_extproc.roles.configure.render import KEPT, RenderFailed, write_over

FIRST, SECOND = "a: 1\nb: 2\nc: 3\n", "a: 1\nb: 2\nc: 4\n"


def write(file: Path, text: str, *, force: bool = False) -> str:
    write_over(file, text, force=force)
    return file.read_text()


def test_a_hand_edit_outlives_the_next_renderings(tmp_path):
    file = tmp_path / "envoy.yaml"
    assert write(file, FIRST) == FIRST
    file.write_text("a: 1  # ours\nb: 2\nc: 3\n")
    assert write(file, SECOND) == "a: 1  # ours\nb: 2\nc: 4\n"
    assert write(file, SECOND) == "a: 1  # ours\nb: 2\nc: 4\n"
    assert write(file, FIRST) == "a: 1  # ours\nb: 2\nc: 3\n"


def test_where_both_changed_the_same_line_nothing_is_written(tmp_path):
    file = tmp_path / "envoy.yaml"
    write(file, FIRST)
    file.write_text("a: 1\nb: 2\nc: ours\n")
    with pytest.raises(RenderFailed, match="line 3: by hand 'c: ours', now rendered 'c: 4'"):
        write(file, SECOND)
    assert file.read_text() == "a: 1\nb: 2\nc: ours\n"
    assert file.with_name(f"envoy.yaml{KEPT}").read_text() == FIRST
    assert write(file, SECOND, force=True) == SECOND


def test_a_file_of_unknown_history_is_not_overwritten_unasked(tmp_path):
    file = tmp_path / "envoy.yaml"
    file.write_text("somebody: else\n")
    with pytest.raises(RenderFailed, match="--force"):
        write(file, FIRST)

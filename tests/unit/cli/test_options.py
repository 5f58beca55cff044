"""Options with impossible values are rejected by name before anything starts."""

import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app


@pytest.mark.parametrize(
    "wrong",
    [
        ["engine-sim", "--port", "99999"],
        ["engine-sim", "--port", "-1"],
        ["engine-sim", "--host", ""],
        ["engine-sim", "--prefill-rate", "nan"],
        ["engine-sim", "--decode-rate", "inf"],
        ["demo", "--port", "99999"],
        ["drain", "--at-most-s", "-1"],
        ["drain", "--at-most-s", "nan"],
        ["drain", "--at-least-s", "-1"],
        ["serve", "--drain-s", "-1"],
        ["envoy", __file__, "--drain-s", "inf"],
        ["envoy", __file__, "--concurrency", "-1"],
    ],
    ids=lambda wrong: " ".join([wrong[0], *wrong[-2:]]),
)
def test_a_value_that_nothing_can_take_is_refused_with_the_options_name(wrong):
    result = CliRunner().invoke(app, wrong)
    assert (result.exit_code, wrong[-2] in result.output) == (2, True), result.output


def test_an_envoy_without_its_file_is_a_wrong_call(tmp_path):
    result = CliRunner().invoke(app, ["envoy", str(tmp_path / "nope.yaml")], env={"COLUMNS": "200"})
    assert (result.exit_code, "nope.yaml" in result.output) == (2, True), result.output

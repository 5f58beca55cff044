"""The command `check`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from din_extproc.cli.options import DEFAULT_CONFIG, Json, finish
from din_extproc.settings.check import check as check_file


def check(
    file: Annotated[Path, typer.Argument(help="Configuration file.")] = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Check a configuration and report every error.

    Each error names file, line and setting, with a hint. Exit code 1: there are errors.
    """
    checked = check_file(file, os.environ)
    finish({"sound": checked.sound, "problems": checked.problems}, [checked.text], json=json, ok=checked.sound)

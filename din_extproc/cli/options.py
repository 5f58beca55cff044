"""What commands share: their options, and how they answer.

Rule: an answer that is no is one line on standard error and exit code 1.
"""

import os
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from din_extproc.settings.load import load
from din_extproc.settings.problems import Rejected
from din_extproc.settings.settings import Settings

Config = Annotated[Path, typer.Option("--config", "-c", help="The configuration.", envvar="DIN_CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to standard output.")]
DEFAULT_CONFIG = Path("din.yaml")


def settings_of(config: Path) -> Settings:
    """The configuration, or the end with everything that is wrong with it."""
    settings = load(config, os.environ)
    if isinstance(settings, Rejected):
        typer.echo(str(settings), err=True)
        raise typer.Exit(1)
    return settings


def write(text: str, output: Path | None) -> None:
    """To a file, or to standard output."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


def print_json(value: object) -> None:
    """For machines."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def fail(message: str) -> NoReturn:
    """The answer is no."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)

"""What commands share: their options, and how they answer.

Rule: an answer that is no is one line on standard error and exit code 1.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

Config = Annotated[Path, typer.Option("--config", "-c", help="The configuration.", envvar="DIN_CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to standard output.")]
DEFAULT_CONFIG = Path("din.yaml")
DAY_S = 86_400.0
MOST_PORTS = 65_535


def amount(told: str, *, most: float, least: float = 0.0) -> Any:
    """An option that is a number from the least to the most, both included."""
    return typer.Option(help=told, min=least, max=most, callback=_number)


def port(told: str, *, least: int = 1) -> Any:
    """An option that is a port. `least` 0: none may be named."""
    return typer.Option(help=told, min=least, max=MOST_PORTS)


def not_empty(text: str) -> str:
    """An option that says something."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def _number(value: float | None) -> float | None:
    """`nan` lies between any two numbers, as far as a comparison can tell."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


def settings_of(config: Path) -> Settings:
    """The configuration, or the end with everything that is wrong with it."""
    settings = load(config, os.environ)
    if isinstance(settings, ConfigRejected):
        typer.echo(str(settings), err=True)
        raise typer.Exit(1)
    return settings


def write(text: str, output: Path | None) -> None:
    """To a file, or to standard output."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        with written(output):
            output.write_text(text)


@contextmanager
def written(output: Path) -> Iterator[None]:
    """Inside, a file is written; a file that can't be is an answer that is no."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{output}: {getattr(error, 'strerror', None) or 'what it holds is no text'}")


def print_json(value: object) -> None:
    """For machines."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def fail(message: str) -> NoReturn:
    """The answer is no."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)

"""Options and output that commands share.

Rule: an error is one line on standard error and exit code 1.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import typer

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file.", envvar="DIN_CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level that is logged (JSON lines on stderr).")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of standard output.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh the table until Ctrl-C.")]
WatchInterval = Annotated[float, typer.Option(help="Seconds between two refreshes.", min=0.1)]
Loaded = TypeVar("Loaded")
DEFAULT_CONFIG = Path("din.yaml")
DAY_S = 86_400.0
MAX_PORT = 65_535


def number(help_text: str, *, most: float, least: float = 0.0) -> Any:
    """Declare an option that is a number between two bounds, both included."""
    return typer.Option(help=help_text, min=least, max=most, callback=_reject_nan)


def port(help_text: str, *, least: int = 1) -> Any:
    """Declare an option that is a port. With `least=0`, port 0 means a free one."""
    return typer.Option(help=help_text, min=least, max=MAX_PORT)


def not_empty(text: str) -> str:
    """Return a text option unless it is empty (`BadParameter`)."""
    if not text:
        raise typer.BadParameter("it is empty")
    return text


def _reject_nan(value: float | None) -> float | None:
    """Reject `nan`, which passes every range check."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number")
    return value


def load_settings(config: Path) -> Settings:
    """Return the configuration; print all its errors and exit with code 1 if it has any."""
    return accepted(load(config, os.environ))


def accepted(loaded: Loaded | ConfigRejected) -> Loaded:
    """Return what was loaded; print all errors of a rejected configuration and exit with code 1."""
    if isinstance(loaded, ConfigRejected):
        typer.echo(str(loaded), err=True)
        raise typer.Exit(1)
    return loaded


def write(text: str, output: Path | None) -> None:
    """Write a text to a file, or to standard output."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        with fail_on_unwritable(output):
            output.write_text(text)


@contextmanager
def fail_on_unwritable(output: Path) -> Iterator[None]:
    """Exit with code 1 when the file that is written inside can't be written."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{output}: {getattr(error, 'strerror', None) or 'the file is not UTF-8 text'}")


@contextmanager
def fail_on(*errors: type[Exception]) -> Iterator[None]:
    """Exit with code 1 and the error's message when one of these errors is raised inside."""
    try:
        yield
    except errors as error:
        fail(str(error))


def finish(value: object, lines: Iterable[str], *, json: bool, ok: bool = True) -> NoReturn:
    """Print a result as JSON or as lines, and exit with code 0, or 1 if it is not `ok`."""
    if json:
        print_json(value)
    else:
        typer.echo("\n".join(lines))
    raise typer.Exit(0 if ok else 1)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def fail(message: str) -> NoReturn:
    """Print an error and exit with code 1."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)

"""Flaws of a route configuration as values, each with its place.

A place is the path of keys and indexes from the top (`("rules", 2, "when", "cel")`); `settings` maps it to file and line.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from msgspec import Struct

Place = tuple[str | int, ...]


class Flaw(Struct, frozen=True, gc=False):
    """One finding."""

    place: Place
    message: str
    hint: str = ""
    missing: tuple[str, str] | None = None
    """The undeclared object that the place refers to: (`pools`, `aliases`, `tenants` or `models`; its name)."""
    warning: bool = False
    """Routing works despite the flaw."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known name; "" when none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""

"""What is wrong with a set of routes, as values: every flaw at once, each at its place in the configuration.

Rule: a place is the path of keys and indexes from the top (`("rules", 2, "when", "cel")`); which file and line that is, others know.
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
    """What the place refers to but nothing declares: (`pools`, `aliases`, `tenants` or `models`; its name)."""
    warning: bool = False
    """Routing works without it being mended."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is closest; "" when none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""

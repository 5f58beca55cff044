"""Version constraints, parsed once per text into predicates over version strings.

An invalid constraint is None; an invalid version satisfies only the constraint that allows everything.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct
from packaging.specifiers import SpecifierSet
from packaging.version import Version

MAX_LENGTH = 128
"""The longest constraint of a client or the configuration, in characters."""
_MAX_COMBINED_LENGTH = 4 * MAX_LENGTH
"""The longest combined constraint of client and configuration, in characters."""

_PART = re.compile(r"\s*(>=|<=|==|!=|~=|>|<|=|~|\^)?\s*([^\s,<>=!~^]+)\s*").fullmatch


class Constraint(Struct, frozen=True, gc=False):
    """A constraint on a model version."""

    text: str
    """The text as written; "" allows every version."""
    allows: Callable[[str], bool]
    """Returns whether a node's version meets the constraint."""


def _allow_all(version: str) -> bool:  # noqa: ARG001 - the shape of `allows`
    return True


ANY = Constraint("", _allow_all)


@lru_cache(maxsize=4096)
def parse_constraint(text: str) -> Constraint | None:
    """Parse a constraint: comma-separated parts, all of which a version must meet.

    A part is `>=2025.3` (also `>`, `<=`, `<`, `!=`, `~=`), `2025.03.1` (exact, ignoring leading zeros), `~2025.3` (`>=2025.3,<2025.4`),
    `^2025.3` (`>=2025.3,<2026`), `2025.3.*` or `*`. "" allows everything.

    Returns:
        None for an invalid part, or a text longer than `MAX_LENGTH`.
    """
    return None if len(text) > MAX_LENGTH else _parse(text)


@lru_cache(maxsize=4096)
def combine(*texts: str) -> Constraint | None:
    """Return the constraint that requires all of them; None when one is invalid."""
    text = ",".join(text for text in texts if text and not text.isspace())
    return None if len(text) > _MAX_COMBINED_LENGTH else _parse(text)


def _parse(text: str) -> Constraint | None:
    if not text or text.isspace():
        return ANY
    try:
        specifiers = SpecifierSet(",".join(filter(None, map(_to_specifier, text.split(",")))), prereleases=True)
    except ValueError:
        return None
    if not len(specifiers):
        return Constraint(text, _allow_all)
    return Constraint(text, lru_cache(maxsize=256)(_build_predicate(specifiers)))


def is_version(text: str) -> bool:
    """Return whether constraints can be checked against this version."""
    try:
        Version(text)
    except ValueError:
        return False
    return True


def _build_predicate(specifiers: SpecifierSet) -> Callable[[str], bool]:
    def allows(version: str) -> bool:
        return is_version(version) and specifiers.contains(version)

    return allows


def _to_specifier(part: str) -> str:
    """Return one part in the spelling of PEP 440, "" for one that allows everything.

    Raises:
        ValueError: The part is not a constraint.
    """
    found = _PART(part)
    if found is None:
        raise ValueError(f"{part!r} is not a version constraint")
    operator, version = found.groups()
    if version == "*" and operator in {None, "=", "=="}:
        return ""
    if operator in {None, "="}:
        return f"=={version}"
    if operator == "~":
        return f">={version},<{_compute_next_release(Version(version), keep=2)}"
    if operator == "^":
        leading_zeros = next((at for at, number in enumerate(Version(version).release) if number), len(Version(version).release) - 1)
        return f">={version},<{_compute_next_release(Version(version), keep=leading_zeros + 1)}"
    return f"{operator}{version}"


def _compute_next_release(version: Version, *, keep: int) -> str:
    """Return the first release that differs within the first `keep` numbers."""
    head = version.release[:keep]
    return f"{version.epoch}!{'.'.join(map(str, (*head[:-1], head[-1] + 1)))}"

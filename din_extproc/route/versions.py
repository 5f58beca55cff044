"""Version constraints (R07): text to a predicate over version strings, made once per text.

Rule: an unreadable constraint is a value (None); an unreadable version satisfies only the constraint that allows everything.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct
from packaging.specifiers import SpecifierSet
from packaging.version import Version

LONGEST = 128
"""Characters of a constraint: clients write them."""
_LONGEST_COMBINED = 4 * LONGEST
"""What client and configuration ask together is never cut."""

_PART = re.compile(r"\s*(>=|<=|==|!=|~=|>|<|=|~|\^)?\s*([^\s,<>=!~^]+)\s*").fullmatch


class Constraint(Struct, frozen=True, gc=False):
    """What a model version has to meet."""

    text: str
    """As written, "" allows every version."""
    allows: Callable[[str], bool]
    """Whether a version, as a node states it, meets the constraint."""


def _everything(version: str) -> bool:  # noqa: ARG001 - the shape of `allows`
    return True


ANY = Constraint("", _everything)


@lru_cache(maxsize=4096)
def parse_constraint(text: str) -> Constraint | None:
    """Read a constraint: comma-separated parts, all of which a version must meet.

    A part is `>=2025.3` (also `>`, `<=`, `<`, `!=`, `~=`), `2025.03.1` (exactly that; leading zeros count for nothing),
    `~2025.3` (`>=2025.3,<2025.4`), `^2025.3` (`>=2025.3,<2026`), `2025.3.*` or `*`. "" allows everything.

    Returns:
        None when a part is none of these, or the text is longer than `LONGEST`.
    """
    return None if len(text) > LONGEST else _parsed(text)


@lru_cache(maxsize=4096)
def combine(*texts: str) -> Constraint | None:
    """The constraint that meets all of them; None when one can't be read."""
    text = ",".join(text for text in texts if text and not text.isspace())
    return None if len(text) > _LONGEST_COMBINED else _parsed(text)


def _parsed(text: str) -> Constraint | None:
    if not text or text.isspace():
        return ANY
    try:
        specifiers = SpecifierSet(",".join(filter(None, map(_specifier, text.split(",")))), prereleases=True)
    except ValueError:
        return None
    if not len(specifiers):
        return Constraint(text, _everything)
    return Constraint(text, lru_cache(maxsize=256)(_predicate(specifiers)))


def is_version(text: str) -> bool:
    """Whether constraints can be held against this version."""
    try:
        Version(text)
    except ValueError:
        return False
    return True


def _predicate(specifiers: SpecifierSet) -> Callable[[str], bool]:
    def allows(version: str) -> bool:
        return is_version(version) and specifiers.contains(version)

    return allows


def _specifier(part: str) -> str:
    """One part in the spelling of PEP 440, "" for one that allows everything.

    Raises:
        ValueError: it is no constraint.
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
        return f">={version},<{_bumped(Version(version), keep=2)}"
    if operator == "^":
        leading_zeros = next((at for at, number in enumerate(Version(version).release) if number), len(Version(version).release) - 1)
        return f">={version},<{_bumped(Version(version), keep=leading_zeros + 1)}"
    return f"{operator}{version}"


def _bumped(version: Version, *, keep: int) -> str:
    """The first release that differs within the first `keep` numbers."""
    head = version.release[:keep]
    return f"{version.epoch}!{'.'.join(map(str, (*head[:-1], head[-1] + 1)))}"

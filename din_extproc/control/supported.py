"""The Envoy versions that the rendered configuration supports.

Invariant: one rendering for all of them. Workarounds for older versions are rendered for all (the response's trailers, without which
1.37 and 1.38 end an exchange too early); versions that lack a required feature are refused.
"""

import re

OLDEST, NEWEST_TESTED = (1, 36), (1, 40)
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.\d+)?").fullmatch


def describe_unsupported(version: str) -> str | None:
    """Return why this Envoy can't run the rendered configuration; None if it can.

    Args:
        version: `1.38` or `1.38.3`.
    """
    numbers = parse_minor(version)
    if numbers is None:
        return f"{version!r} is not a version, such as 1.38 or 1.38.3"
    if numbers < OLDEST:
        return f"Envoy {version} is too old: what is rendered needs 1.36 or newer"
    return None


def parse_minor(version: str) -> tuple[int, int] | None:
    """The part of a version that features depend on; None: it is no version."""
    found = _VERSION(version)
    return None if found is None else (int(found[1]), int(found[2]))

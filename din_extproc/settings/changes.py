"""Single values of a configuration put in the place of others, before it is looked at: what would be, if.

Rule: what is put there is checked as if it stood in the file.
"""

from collections.abc import Mapping
from typing import Any

from din_extproc.settings.document import Document

Changes = Mapping[str, Any]
"""Values by path: `pools.fast.scheduler`, `rules.1.when.estimated_tokens.lt`."""
UNCHANGED: Changes = {}


def put_all(document: Document, changes: Changes) -> None:
    """Put these values into the document. A path that leads nowhere is a problem."""
    for path, value in changes.items():
        wrong = _put_value(document, path, value)
        if wrong:
            document.report((), f"{path}: {wrong}")


def _put_value(document: Document, path: str, value: Any) -> str:
    """Returns why it can't be put there, "" when it is."""
    if not isinstance(document.data, dict):
        return "the file is no mapping"
    place, rest = document.data, path
    while True:
        key, rest = _find_step(place, rest)
        if isinstance(place, list):
            if not key.isdecimal() or int(key) >= len(place):
                return f"the list has no entry {key}" + (f", only 0 to {len(place) - 1}" if place else "")
            if not rest:
                place[int(key)] = value
                return ""
            place = place[int(key)]
        elif isinstance(place, dict):
            if not rest:
                place[key] = value
                return ""
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        else:
            return f"{key} is beyond a single value"


def _find_step(place: Any, path: str) -> tuple[str, str]:
    """The first key of the path, and the rest of it. Names may have dots: the longest that is there is meant."""
    parts = path.split(".")
    if isinstance(place, dict):
        for length in range(len(parts), 1, -1):
            if ".".join(parts[:length]) in place:
                return ".".join(parts[:length]), ".".join(parts[length:])
    return parts[0], ".".join(parts[1:])

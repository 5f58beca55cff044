"""The report of `din-extproc check FILE`.

Rule: the same loading as at start, so that what passes here starts.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigProblem, ConfigRejected, report


class CheckResult(Struct, frozen=True):
    """The verdict on a file."""

    sound: bool
    problems: tuple[ConfigProblem, ...]
    text: str
    """For a terminal."""


def check(path: Path, env: Mapping[str, str]) -> CheckResult:
    """Load the file and say what was found: all problems, or what the configuration consists of."""
    loaded = load(path, env)
    if isinstance(loaded, ConfigRejected):
        return CheckResult(sound=False, problems=loaded.problems, text=report(loaded.problems))
    nodes = sum(len(pool.nodes) for pool in loaded.pools)
    models = len({model for pool in loaded.pools for model in pool.models})
    parts = [
        f"{count} {name}{'' if count == 1 else 's'}"
        for count, name in ((len(loaded.pools), "pool"), (nodes, "node"), (models, "model"), (len(loaded.tenants), "tenant"))
    ]
    text = f"{path}: sound: {', '.join(parts)}"
    if loaded.warnings:
        text = f"{report(loaded.warnings)}\n{text}"
    return CheckResult(sound=True, problems=loaded.warnings, text=text)

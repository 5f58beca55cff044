"""Errors in the configuration, with what is needed to correct them: file, line, place, message, hint.

Rule: a problem never shows a secret, and never a value that came from the environment.
"""

from collections.abc import Sequence

from msgspec import Struct

Place = tuple[str | int, ...]
"""Keys and indexes from the top of the file: `("pools", "fast", "nodes", 0, "id")`."""


class ConfigProblem(Struct, frozen=True, kw_only=True):
    """One finding. `line` and `column` count from 1; None: it concerns the file as a whole."""

    file: str
    message: str
    line: int | None = None
    column: int | None = None
    place: Place = ()
    hint: str = ""
    warning: bool = False

    @property
    def path(self) -> str:
        """The place as people write it: `pools.fast.nodes[0].id`."""
        text = ""
        for part in self.place:
            text += f"[{part}]" if isinstance(part, int) else f".{part}"
        return text.removeprefix(".")

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        text = f"{where}: {'warning' if self.warning else 'error'}: {': '.join(filter(None, (self.path, self.message)))}"
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class ConfigRejected(Struct, frozen=True):
    """A configuration that can't be used, with everything that is wrong with it."""

    problems: tuple[ConfigProblem, ...]

    def __str__(self) -> str:
        return report(self.problems)


def in_order(problems: Sequence[ConfigProblem]) -> tuple[ConfigProblem, ...]:
    """By file and line, each once."""
    return tuple(
        sorted(dict.fromkeys(problems), key=lambda problem: (problem.file, problem.line or 0, problem.column or 0, problem.message))
    )


def report(problems: Sequence[ConfigProblem]) -> str:
    """All problems for a terminal, one or two lines each, and a last line that counts them."""
    warnings = sum(problem.warning for problem in problems)
    counts = [(len(problems) - warnings, "error"), (warnings, "warning")]
    summary = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
    return "\n".join([*map(str, problems), summary or "no problems"])

"""What `din-extproc verify` says, for machines as it stands and for people in lines."""

from msgspec import Struct

OK, WRONG, UNREACHABLE, PARTLY, NOT_ASKED, IDLE = "ok", "wrong", "unreachable", "partly", "not asked", "no request"
_FAULTY = (WRONG, UNREACHABLE, NOT_ASKED)


class NodeAnswers(Struct, frozen=True, omit_defaults=True):
    """The answers of one node."""

    node: str
    answers: int
    problems: tuple[str, ...] = ()


class VerifiedEntry(Struct, frozen=True, omit_defaults=True):
    """One entry of the route table, as it was found."""

    verdict: str
    """`ok`: every node that can take it answered as it should. `partly`: all answers were right, and some nodes were never chosen.
    `wrong`: an answer came from elsewhere or lacks something. `unreachable`: no answer. `not asked`: it could not be asked, see `why`.
    `no request`: it is proven that none of this tenant gets there, see `why`."""
    name: str
    rule: str
    pool: str
    operation: str
    tokens: int
    """Of the prompt, as estimated."""
    answered: tuple[NodeAnswers, ...] = ()
    silent: tuple[str, ...] = ()
    """Nodes that could have answered, and were never chosen."""
    problems: tuple[str, ...] = ()
    """The same one once."""
    why: str = ""
    """Why it was not asked, or why no request gets there."""

    @property
    def line(self) -> str:
        """For a terminal."""
        what = f"{self.name} -> {self.rule or '(no rule)'} -> {self.pool}"
        if self.why:
            return f"{self.verdict:11} {what}: {self.why}"
        nodes = ", ".join(f"{each.node} x{each.answers}" for each in self.answered) or "nobody"
        silent = f"; never chosen: {', '.join(self.silent)}" if self.silent else ""
        problems = "".join(f"\n{'':12}{problem}" for problem in self.problems)
        return f"{self.verdict:11} {what} ({self.operation}, {self.tokens} tokens): {nodes}{silent}{problems}"


class VerifyReport(Struct, frozen=True):
    """The whole table."""

    url: str
    tenant: str
    entries: tuple[VerifiedEntry, ...]

    @property
    def sound(self) -> bool:
        """Everything that a request can reach was asked, and answered as it should."""
        return not any(entry.verdict in _FAULTY for entry in self.entries)

    def counts(self) -> dict[str, int]:
        """Entries by verdict."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.verdict] = found.get(entry.verdict, 0) + 1
        return found

    def lines(self) -> list[str]:
        """For a terminal."""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts().items()) or "none"
        lines = [*(entry.line for entry in self.entries), f"{len(self.entries)} entries of {self.tenant} at {self.url}: {counted}"]
        if missed := self.counts().get(NOT_ASKED):
            lines.append(f"{missed} could not be asked: the lines `{NOT_ASKED}` say why")
        return lines

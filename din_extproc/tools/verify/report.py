"""The report of `din-extproc verify`, as JSON and as text."""

from msgspec import Struct

OK, WRONG, UNREACHABLE, PARTLY, NOT_ASKED, IDLE = "ok", "wrong", "unreachable", "partly", "not asked", "no request"
_FAULTY = (WRONG, UNREACHABLE, NOT_ASKED)


class NodeAnswers(Struct, frozen=True, omit_defaults=True):
    """The answers of one node."""

    node: str
    answers: int
    problems: tuple[str, ...] = ()
    stated: bool = False
    """The node's own Envoy stated its id, so that this is not the gateway's word alone."""


class VerifiedEntry(Struct, frozen=True, omit_defaults=True):
    """The result for one entry of the route table."""

    verdict: str
    """`ok`: every possible node answered correctly. `partly`: all answers were correct, and some nodes were never chosen.
    `wrong`: an answer came from another node or is incomplete. `unreachable`: no answer. `not asked`: no request could be sent, see `why`.
    `no request`: provably no request of this tenant reaches the entry, see `why`."""
    name: str
    rule: str
    pool: str
    operation: str
    tokens: int
    """Estimated prompt tokens."""
    answered: tuple[NodeAnswers, ...] = ()
    silent: tuple[str, ...] = ()
    """Nodes that could have answered and were never chosen."""
    problems: tuple[str, ...] = ()
    """Problems without duplicates."""
    why: str = ""
    """Why no request was sent, or why none reaches the entry."""
    leaves_site: bool = False
    """Its nodes are hosted APIs."""

    @property
    def line(self) -> str:
        """Return the text for a terminal."""
        what = f"{self.name} -> {self.rule or '(no rule)'} -> {self.pool}{' (leaves the site)' if self.leaves_site else ''}"
        if self.why:
            return f"{self.verdict:11} {what}: {self.why}"
        names = (f"{each.node} x{each.answers}{' (as it says itself)' if each.stated else ''}" for each in self.answered)
        nodes = ", ".join(names) or "no node"
        silent = f"; never chosen: {', '.join(self.silent)}" if self.silent else ""
        problems = "".join(f"\n{'':12}{problem}" for problem in self.problems)
        return f"{self.verdict:11} {what} ({self.operation}, {self.tokens} tokens): {nodes}{silent}{problems}"


class VerifyReport(Struct, frozen=True):
    """The result for the whole route table."""

    url: str
    tenant: str
    entries: tuple[VerifiedEntry, ...]

    @property
    def sound(self) -> bool:
        """Whether every reachable entry was requested and answered correctly."""
        return not any(entry.verdict in _FAULTY for entry in self.entries)

    def counts(self) -> dict[str, int]:
        """Number of entries by verdict."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.verdict] = found.get(entry.verdict, 0) + 1
        return found

    def lines(self) -> list[str]:
        """Return the text for a terminal."""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts().items()) or "none"
        lines = [*(entry.line for entry in self.entries), f"{len(self.entries)} entries of {self.tenant} at {self.url}: {counted}"]
        if missed := self.counts().get(NOT_ASKED):
            lines.append(f"{missed} could not be asked: the lines `{NOT_ASKED}` say why")
        return lines

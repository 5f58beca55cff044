"""Find sensitive data in the texts of a prompt.

Rule: linear and bounded. One search for everything answers most prompts; only a prompt that holds something is looked at kind by kind, and
past a number of places it is not judged any more.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import re2
from msgspec import Struct

from din_extproc.screen.kinds import SensitiveKind, SensitiveShape, compiled, options

_BETWEEN = b"\n"


class FindingSpan(Struct, frozen=True, gc=False):
    """One finding: bytes `start` to `end` of a text."""

    text: int
    """Which of the texts."""
    start: int
    end: int
    kind: SensitiveKind


class Findings(Struct, frozen=True):
    """Return the findings in the texts."""

    places: tuple[FindingSpan, ...] = ()
    """In order; none overlaps another."""
    whole: bool = True
    """False: there were more places than are looked at."""

    def counts(self) -> dict[str, int]:
        """How many findings, by kind."""
        counts: dict[str, int] = {}
        for place in self.places:
            counts[place.kind.name] = counts.get(place.kind.name, 0) + 1
        return counts


_NOTHING = Findings()


class _Searched(Struct, frozen=True):
    """One shape of one kind, ready to be searched for."""

    rank: int
    shape: SensitiveShape
    pattern: "re2._Regexp"
    exact: "re2._Regexp"
    """On what `pattern` matched: the first group is the finding."""


class Screen:
    """Looks for some kinds, immutable. `^` and `$` in patterns are the ends of lines.

    Args:
        kinds: The first wins where findings overlap.
        most: Places that are looked at in one prompt, so that its cost is bounded; more are too many to judge.
    """

    __slots__ = ("_any", "_kinds", "_most", "_set", "_shapes")

    def __init__(self, kinds: Iterable[SensitiveKind], most: int = 4096) -> None:
        self._most = most
        self._kinds = tuple(kinds)
        shapes = [(rank, shape, f"(?m:{shape.led})") for rank, kind in enumerate(self._kinds) for shape in kind.shapes]
        self._shapes = [_Searched(rank, shape, compiled(led), compiled(led, groups=True)) for rank, shape, led in shapes]
        self._any = compiled("|".join(led for _, _, led in shapes))
        self._set = re2.Set.SearchSet(options())
        for _, _, led in shapes:
            self._set.Add(led)
        self._set.Compile()

    def clean(self, joined: bytes) -> bool:
        """Whether texts, UTF-8 with ends of lines between, hold nothing that even looks so: one search, which answers for most prompts."""
        return self._any.search(joined) is None

    def find(self, texts: Sequence[bytes]) -> Findings:
        """Find everything in the texts, UTF-8 each. No finding goes over the end of one."""
        joined = _BETWEEN.join(texts)
        first = self._any.search(joined)
        if first is None:
            return _NOTHING
        begin = first.start()
        ends = list(accumulate([len(text) + 1 for text in texts]))
        found: list[tuple[int, int, int]] = []
        looked = 0
        # The set runs out of memory on strange texts and then names none: all are tried.
        for index in self._set.Match(joined[max(0, begin - 1) :]) or range(len(self._shapes)):
            searched = self._shapes[index]
            for start, end, proven in _find_matches(searched, joined, begin, ends):
                if looked == self._most:
                    return Findings(tuple(self._find_places(found, ends)), whole=False)
                looked += 1
                if proven:
                    found.append((start, end, searched.rank))
        return Findings(tuple(self._find_places(found, ends)))

    def _find_places(self, found: list[tuple[int, int, int]], ends: list[int]) -> Iterator[FindingSpan]:
        """Findings that overlap become one, under the name that comes first."""
        found.sort()
        at = 0
        while at < len(found):
            start, end, rank = found[at]
            at += 1
            while at < len(found) and found[at][0] < end:
                end, rank = max(end, found[at][1]), min(rank, found[at][2])
                at += 1
            text = bisect_right(ends, start)
            before = ends[text - 1] if text else 0
            yield FindingSpan(text, start - before, end - before, self._kinds[rank])


def _find_matches(searched: _Searched, joined: bytes, at: int, ends: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Where the pattern matches, within one text each, and whether that is proven."""
    search, shape = searched.pattern.search, searched.shape
    while (match := search(joined, at)) is not None:
        start, end = match.span()
        if shape.alone:
            inner = searched.exact.fullmatch(joined[start:end])
            start += inner.start(1) if inner else 0
        last = ends[min(bisect_right(ends, start), len(ends) - 1)] - 1
        if end > last:  # over the end of its text: what is there of it inside?
            match = search(joined, at, last)
            if match is None:
                at = last + 1
                continue
            start, end = match.span()
        proven = end > start and shape.proof(joined[start:end])
        yield start, end, proven
        at = end if proven else start + 1

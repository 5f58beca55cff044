"""Merges manual changes of a rendered file with those of a new rendering: both, or the conflicts.

Invariant: three texts in, one text or the places of contradiction out; nothing of a hand edit is ever lost silently.
"""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from msgspec import Struct


class EditConflict(Struct, frozen=True):
    """Lines that both have changed."""

    line: int
    """Of the file as it is, from 1."""
    by_hand: tuple[str, ...]
    rendered: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: by hand {_quote_lines(self.by_hand)}, now rendered {_quote_lines(self.rendered)}"


def merge_edits(before: str, by_hand: str, rendered: str) -> str | tuple[EditConflict, ...]:
    """The new rendering with what was changed by hand.

    Args:
        before: What was rendered last time.
        by_hand: What the file says now.
        rendered: What is rendered now.
    """
    base, edited, new = (text.splitlines(keepends=True) for text in (before, by_hand, rendered))
    lines: list[str] = []
    contradictions = []
    at_base = at_edited = at_new = 0
    for start, in_edited, in_new, length in _find_unchanged(base, edited, new):
        was, kept, now = base[at_base:start], edited[at_edited:in_edited], new[at_new:in_new]
        if now in (was, kept):
            lines += kept
        elif was == kept:
            lines += now
        else:
            contradictions.append(EditConflict(at_edited + 1, tuple(kept), tuple(now)))
        lines += base[start : start + length]
        at_base, at_edited, at_new = start + length, in_edited + length, in_new + length
    return tuple(contradictions) or "".join(lines)


def _find_unchanged(base: Sequence[str], edited: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of lines that neither has changed: where they begin in each, and how long they are. The last one is empty."""
    one, other = (SequenceMatcher(None, base, text, autojunk=False).get_matching_blocks() for text in (edited, new))
    i = j = 0
    while i < len(one) and j < len(other):
        (base_a, at_edited, length_a), (base_b, at_new, length_b) = one[i], other[j]
        start, end = max(base_a, base_b), min(base_a + length_a, base_b + length_b)
        if start < end:
            yield start, at_edited + start - base_a, at_new + start - base_b, end - start
        if base_a + length_a <= base_b + length_b:
            i += 1
        else:
            j += 1
    yield len(base), len(edited), len(new), 0


def _quote_lines(lines: Sequence[str]) -> str:
    return " / ".join(repr(line.strip()) for line in lines[:3]) + (" ..." if len(lines) > 3 else "") or "removed"  # noqa: PLR2004 - to be read

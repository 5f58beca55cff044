"""How many answers went well and ill lately: a window that slides in twelfths.

Rule: the memory does not grow with the number of answers, and an answer older than the window never counts.
"""

from msgspec import Struct

_SLICES = 12


class Slice(Struct):
    """The answers of one twelfth of the window."""

    number: int
    good: int = 0
    bad: int = 0


class OutcomeWindow:
    """The answers of the last `seconds`, give or take a twelfth."""

    __slots__ = ("_slice_s", "_slices")

    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / _SLICES
        self._slices: list[Slice] = []

    def good(self, now: float) -> None:
        """An answer went well."""
        self._current(now).good += 1

    def bad(self, now: float) -> None:
        """One did not."""
        self._current(now).bad += 1

    def counts(self, now: float) -> tuple[int, int]:
        """How many went well, and how many ill."""
        oldest = int(now / self._slice_s) - _SLICES
        recent = [each for each in self._slices if each.number > oldest]
        return sum(each.good for each in recent), sum(each.bad for each in recent)

    def clear(self) -> None:
        """Forget all of them."""
        self._slices.clear()

    def _current(self, now: float) -> Slice:
        number = int(now / self._slice_s)
        slices = self._slices
        if slices and slices[-1].number >= number:  # a clock that stands still, or is read a moment apart
            return slices[-1]
        if len(slices) >= _SLICES:
            del slices[0]
        slices.append(Slice(number))
        return slices[-1]

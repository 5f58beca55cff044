"""Counts of successes and failures in a sliding window of twelve slices.

Invariant: memory does not grow with the number of outcomes, and an outcome older than the window is never counted.
"""

from msgspec import Struct

_SLICES = 12


class WindowSlice(Struct):
    """Outcomes of one twelfth of the window."""

    number: int
    successes: int = 0
    failures: int = 0


class OutcomeWindow:
    """Outcomes of the last `seconds`, to the precision of one slice."""

    __slots__ = ("_slice_s", "_slices")

    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / _SLICES
        self._slices: list[WindowSlice] = []

    def record_success(self, now: float) -> None:
        """Count a success."""
        self._current(now).successes += 1

    def record_failure(self, now: float) -> None:
        """Count a failure."""
        self._current(now).failures += 1

    def count(self, now: float) -> tuple[int, int]:
        """Return the numbers of successes and failures."""
        oldest = int(now / self._slice_s) - _SLICES
        recent = [each for each in self._slices if each.number > oldest]
        return sum(each.successes for each in recent), sum(each.failures for each in recent)

    def clear(self) -> None:
        """Drop all outcomes."""
        self._slices.clear()

    def _current(self, now: float) -> WindowSlice:
        number = int(now / self._slice_s)
        slices = self._slices
        if slices and slices[-1].number >= number:  # the clock did not advance, or was read slightly earlier
            return slices[-1]
        if len(slices) >= _SLICES:
            del slices[0]
        slices.append(WindowSlice(number))
        return slices[-1]

"""Plain counters and histograms by label values, and their form for scrapes and exports.

Rule: a family never grows past its cap: what comes after counts as `other` in every label, and how often that happened is counted too.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from msgspec import Struct

from din_extproc.observe.instruments import OTHER, Instrument

CAP = 5000
"""Label sets of one family."""
_LONGEST = 128
"""Characters of a label's value."""
Labels = tuple[str, ...]
"""Values in the order of the instrument's labels."""


class Distribution(Struct, gc=False):
    """A histogram of values. `counts`: one per bucket, and one for values above the last bound."""

    counts: list[int]
    total: float = 0.0


Value = float | Distribution


class Family(Struct, frozen=True):
    """One instrument and what it measured, as it is shown."""

    instrument: Instrument
    points: Iterable[tuple[Labels, Value]]


class Counts:
    """A counter per label set."""

    __slots__ = ("_cap", "folded", "instrument", "values")

    def __init__(self, instrument: Instrument, cap: int = CAP) -> None:
        self.instrument = instrument
        self._cap = cap
        self.values: dict[Labels, float] = {}
        self.folded = 0
        """Measurements that found the family full."""

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Count."""
        values = self.values
        if labels in values:
            values[labels] += amount
        else:
            labels = self._find_room(labels)
            values[labels] = values.get(labels, 0) + amount

    def _find_room(self, labels: Labels) -> Labels:
        if len(self.values) < self._cap:
            return tuple([text[:_LONGEST] for text in labels])
        self.folded += 1
        return (OTHER,) * len(labels)

    def family(self) -> Family:
        """As it is now, and only once."""
        return Family(self.instrument, _select_values(self.values))


class Distributions:
    """A histogram per label set."""

    __slots__ = ("_bounds", "_cap", "folded", "instrument", "values")

    def __init__(self, instrument: Instrument, cap: int = CAP) -> None:
        self.instrument = instrument
        self._bounds = instrument.bounds
        self._cap = cap
        self.values: dict[Labels, Distribution] = {}
        self.folded = 0
        """Measurements that found the family full."""

    def record(self, labels: Labels, value: float) -> None:
        """Measure."""
        found = self.values.get(labels)
        if found is None:
            found = self._find_room(labels)
        found.counts[bisect_left(self._bounds, value)] += 1
        found.total += value

    def _find_room(self, labels: Labels) -> Distribution:
        if len(self.values) >= self._cap:
            self.folded += 1
            labels = (OTHER,) * len(labels)
        else:
            labels = tuple([text[:_LONGEST] for text in labels])
        return self.values.setdefault(labels, Distribution([0] * (len(self._bounds) + 1)))

    def family(self) -> Family:
        """As it is now, and only once."""
        return Family(self.instrument, _select_values(self.values))


def _select_values(values: Mapping[Labels, Value]) -> Iterator[tuple[Labels, Value]]:
    """Two lists at one go, each pair when it is asked for: thousands of pairs at one go would take a millisecond."""
    return zip(list(values), list(values.values()), strict=True)


def make_family(instrument: Instrument, value: float) -> Family:
    """A family of one value without labels."""
    return Family(instrument, (((), value),))


def make_labelled_family(instrument: Instrument, values: Iterable[tuple[str, float | None]]) -> Family:
    """A family with one label; what is None is not told. Past the cap nothing is shown: how things stand does not add up."""
    return Family(instrument, _drop_unknown(values))


def _drop_unknown(values: Iterable[tuple[str, float | None]]) -> Iterator[tuple[Labels, float]]:
    for at, (text, value) in enumerate(values):
        if at >= CAP:
            return
        if value is not None and isfinite(value):
            yield (text[:_LONGEST],), value

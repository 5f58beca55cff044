"""Service level objectives, compared with the outcomes; and the least number of nodes that meets them.

Rule: a promise about something that was never measured is not kept.
"""

from collections.abc import Callable

from msgspec import Struct

from din_extproc.tools.simulate.stats import Outcomes


class Slo(Struct, frozen=True):
    """Bounds. None: nothing is promised."""

    first_token_p99_s: float | None = None
    per_token_p99_s: float | None = None
    p99_s: float | None = None
    """Of the whole answer."""
    errors: float | None = None
    """Share of requests that are refused, fail or are given up."""

    @property
    def promised(self) -> dict[str, float]:
        """Return the objectives."""
        return {name: bound for name in self.__struct_fields__ if (bound := getattr(self, name)) is not None}

    def broken(self, outcomes: Outcomes) -> tuple[str, ...]:
        """Return the objectives that were missed; empty: none."""
        measured = {
            "first_token_p99_s": outcomes.first_token_s.p99,
            "per_token_p99_s": outcomes.per_token_s.p99,
            "p99_s": outcomes.seconds.p99,
            "errors": outcomes.errors,
        }
        return tuple(name for name, bound in self.promised.items() if (found := measured[name]) is None or found > bound)


def fewest(keeps: Callable[[int], bool], most: int) -> int | None:
    """The least number, from 1 to `most`, that keeps a promise which every larger one keeps too. None: not even `most` does."""
    known_bad, upper = 0, 1
    while not keeps(upper):
        if upper >= most:
            return None
        known_bad, upper = upper, min(most, 2 * upper)
    while upper - known_bad > 1:
        middle = (known_bad + upper) // 2
        if keeps(middle):
            upper = middle
        else:
            known_bad = middle
    return upper

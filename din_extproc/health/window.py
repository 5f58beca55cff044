"""Counts of successes and failures in a sliding window of twelve slices.

Invariant: memory does not grow with the number of outcomes, an outcome older than the window is never counted, and the failures of one
request, however often it is sent, are one.
"""

from msgspec import Struct

from din_extproc.domain.health import tenant_of

_SLICES = 12
_KNOWN_ORIGINS = 512
"""Failed requests of one slice that are distinguished. Behind so many, one that fails again counts again."""


class WindowSlice(Struct):
    """Outcomes of one twelfth of the window."""

    number: int
    successes: int = 0
    failures: dict[str, int] = {}
    """By tenant; "": of unknown origin."""
    origins: set[str] = set()


class WindowCounts(Struct, frozen=True, gc=False):
    """Outcomes within the window."""

    successes: int
    failures: int
    failures_of_one: int
    """Failures of the tenant that has most of them."""


class OutcomeWindow:
    """Outcomes of the last `seconds`, to the precision of one slice."""

    __slots__ = ("_slice_s", "_slices")

    def __init__(self, seconds: float) -> None:
        self._slice_s = seconds / _SLICES
        self._slices: list[WindowSlice] = []

    def record_success(self, now: float) -> None:
        """Count a success."""
        self._get_current(now).successes += 1

    def record_failure(self, now: float, origin: str) -> None:
        """Count a failure, unless the same request has failed within the window. `origin` "": unknown, it counts."""
        if origin and any(origin in each.origins for each in self._recent(now)):
            return
        current, tenant = self._get_current(now), tenant_of(origin)
        current.failures[tenant] = current.failures.get(tenant, 0) + 1
        if origin and len(current.origins) < _KNOWN_ORIGINS:
            current.origins.add(origin)

    def count(self, now: float) -> WindowCounts:
        """Return the numbers of successes and failures."""
        by_tenant: dict[str, int] = {}
        recent = self._recent(now)
        for each in recent:
            for tenant, failures in each.failures.items():
                by_tenant[tenant] = by_tenant.get(tenant, 0) + failures
        most = max((failures for tenant, failures in by_tenant.items() if tenant), default=0)
        return WindowCounts(sum(each.successes for each in recent), sum(by_tenant.values()), most)

    def clear(self) -> None:
        """Drop all outcomes."""
        self._slices.clear()

    def _recent(self, now: float) -> list[WindowSlice]:
        oldest = int(now / self._slice_s) - _SLICES
        return [each for each in self._slices if each.number > oldest]

    def _get_current(self, now: float) -> WindowSlice:
        number = int(now / self._slice_s)
        slices = self._slices
        if slices and slices[-1].number >= number:  # the clock did not advance, or was read slightly earlier
            return slices[-1]
        if len(slices) >= _SLICES:
            del slices[0]
        slices.append(WindowSlice(number))
        return slices[-1]

"""The last 15 minutes per pool and tenant, step by step: requests, refusals, tokens per second, time to first token.

Invariant: bounded in time and names; adding an exchange costs a few dictionary look-ups.
"""

import math
from collections import deque

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord, Outcome

STEP_S = 10
STEPS = 90
_NAMES = 12
"""Pools, and tenants, that are shown: those with the most requests."""
_MOST_NAMES = 500
"""Pools, and tenants, that one step tells apart; further ones are left out."""
_GROWTH = math.log(1.15)
"""Time-to-first-token buckets grow by 15 %, so a percentile is at most that much too large."""


class Series(Struct, frozen=True):
    """One pool or tenant: one value per step, the oldest first. None: no stream began."""

    requests: tuple[int, ...]
    refused: tuple[int, ...]
    tokens_per_s: tuple[float, ...]
    ttft_p50_ms: tuple[int | None, ...]
    ttft_p99_ms: tuple[int | None, ...]


class TimelineData(Struct, frozen=True):
    """All series, and the step after their last one."""

    step: int
    pools: dict[str, Series]
    tenants: dict[str, Series]


class _Point(Struct):
    """One name in one step."""

    requests: int = 0
    refused: int = 0
    tokens: int = 0
    ttft: dict[int, int] = {}
    """Streams by bucket of their time to first token."""


_Step = tuple[int, dict[str, _Point], dict[str, _Point]]
"""Number, pools, tenants."""


class Timelines:
    """Counts finished exchanges by step of the monotonic clock, which never goes back."""

    __slots__ = ("_latest", "_steps")

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._latest = TimelineData(0, {}, {})

    def add(self, record: ExchangeRecord, step: int) -> None:
        """Count one exchange."""
        steps = self._steps
        if not steps or steps[-1][0] != step:
            steps.append((step, {}, {}))
            while steps[0][0] < step - STEPS:
                steps.popleft()
        _, pools, tenants = steps[-1]
        for points, name in ((pools, record.pool), (tenants, record.tenant)):
            point = points.get(name)
            if point is None:
                if not name or len(points) >= _MOST_NAMES:
                    continue
                point = points[name] = _Point(ttft={})
            point.requests += 1
            point.refused += record.outcome is Outcome.REFUSED
            point.tokens += record.usage.total_tokens
            if record.first_token_ms is not None:
                bucket = _find_bucket(record.first_token_ms)
                point.ttft[bucket] = point.ttft.get(bucket, 0) + 1

    def snapshot(self, step: int) -> TimelineData:
        """Return the finished steps before `step`. The same object until the next step begins."""
        if self._latest.step != step:
            self._latest = TimelineData(step, self._make_series(step, 1), self._make_series(step, 2))
        return self._latest

    def _make_series(self, step: int, kind: int) -> dict[str, Series]:
        """Return the series of the busiest pools (1) or tenants (2)."""
        first = step - STEPS
        lines: dict[str, list[_Point | None]] = {}
        for each in self._steps:
            if first <= each[0] < step:
                points: dict[str, _Point] = each[kind]  # type: ignore[assignment]
                for name, point in points.items():
                    lines.setdefault(name, [None] * STEPS)[each[0] - first] = point
        busiest = sorted(lines, key=lambda name: -sum(point.requests for point in lines[name] if point is not None))[:_NAMES]
        return {name: _make_one_series(lines[name]) for name in sorted(busiest)}


def _make_one_series(points: list[_Point | None]) -> Series:
    return Series(
        requests=tuple(0 if point is None else point.requests for point in points),
        refused=tuple(0 if point is None else point.refused for point in points),
        tokens_per_s=tuple(0.0 if point is None else round(point.tokens / STEP_S, 1) for point in points),
        ttft_p50_ms=tuple(None if point is None else _compute_percentile(point.ttft, 0.5) for point in points),
        ttft_p99_ms=tuple(None if point is None else _compute_percentile(point.ttft, 0.99) for point in points),
    )


def _find_bucket(milliseconds: float) -> int:
    return 0 if milliseconds <= 1 else math.ceil(math.log(milliseconds) / _GROWTH)


def _compute_percentile(buckets: dict[int, int], share: float) -> int | None:
    """Return the upper bound of the bucket that holds the percentile, in milliseconds."""
    rank = share * sum(buckets.values())
    below = 0
    for bucket in sorted(buckets):
        below += buckets[bucket]
        if below >= rank:
            return round(math.exp(bucket * _GROWTH))
    return None

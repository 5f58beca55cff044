"""Stored comparisons of `bench baseline`, and the changes between them.

Rule: results are compared only if load and node are the same; other differences are listed.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from din_extproc.tools.bench.baseline_figures import BOTTLENECK, BaselineLoad, Figures, Reason, TimeShares


class BaselineComparison(Struct, frozen=True, omit_defaults=True):
    """One comparison of a node with the gateway."""

    at: str
    """Time of the comparison, ISO 8601, UTC."""
    release: str
    """The version of din-extproc."""
    configuration: str
    """The fingerprint of the configuration in use."""
    url: str
    model: str
    pool: str
    node: str
    load: BaselineLoad
    direct: Figures
    through: Figures
    ratio: float
    """Throughput through the gateway as a share of the node's own."""
    spread: tuple[float, float]
    """Lowest and highest ratio of single rounds."""
    shares: TimeShares | None = None
    """None: the gateway has reported no request."""
    cache_hits: float | None = None
    """Share of decisions that hit the route cache; None: unknown."""
    reason: Reason | None = None
    """None: the gateway is not the bottleneck."""
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the gateway is not the bottleneck and most requests succeeded."""
        return self.ratio >= BOTTLENECK

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        share = f"{self.ratio:.2f} of the node's own throughput ({self.spread[0]:.2f} to {self.spread[1]:.2f})"
        if self.reason is None:
            return f"the network gives {share}"
        return f"the gateway is the bottleneck: {share}. {self.reason.part}: {self.reason.cause}"

    def lines(self) -> list[str]:
        """Return the lines for a terminal."""
        load = self.load
        head = (
            f"{self.model} in pool {self.pool}: {load.prompts} prompts, {load.at_once} at once, {load.tokens} tokens, {load.rounds} rounds"
        )
        rows = [_format_row(f"{self.node} alone", self.direct), _format_row("through the network", self.through)]
        columns = f"{'':22} {'tokens/s':>9} {'req/s':>7} {'TTFT p50':>9} {'p99':>8} {'TPOT p50':>9} {'p99':>8} {'failed':>7}"
        where = [] if self.shares is None else [self.shares.line]
        errors = [f"failed {who}: {count} {code}" for who, side in self._format_sides() for code, count in side.errors.items()]
        return [head, columns, *rows, *where, *errors, *self.notes, self.verdict]

    def _format_sides(self) -> Iterator[tuple[str, Figures]]:
        yield "directly", self.direct
        yield "through the network", self.through


class BaselineChange(Struct, frozen=True):
    """The change of a comparison from the one before it."""

    ratio: float | None
    """New ratio divided by the old one; None: there is no comparable result."""
    throughput: float | None
    """New throughput through the gateway divided by the old one; None likewise."""
    differs: tuple[str, ...]
    """`configuration`, `release`."""


def find_changes(kept: Sequence[BaselineComparison]) -> list[BaselineChange]:
    """Return the change of each result, in stored order."""
    latest: dict[tuple[str, str, str, BaselineLoad], BaselineComparison] = {}
    found = []
    for one in kept:
        key = (one.url, one.model, one.node, one.load)
        before = latest.get(key)
        latest[key] = one
        if before is None:
            found.append(BaselineChange(None, None, ()))
            continue
        differs = tuple(name for name in ("configuration", "release") if getattr(one, name) != getattr(before, name))
        found.append(
            BaselineChange(
                _format_difference(one.ratio, before.ratio),
                _format_difference(one.through.tokens_per_s, before.through.tokens_per_s),
                differs,
            )
        )
    return found


def history_lines(kept: Sequence[BaselineComparison]) -> list[str]:
    """Return the lines for a terminal, oldest first."""
    lines = [
        f"{'when':20} {'configuration':13} {'node':16} {'alone':>9} {'network':>9} {'ratio':>6} {'TTFT p50':>9} {'failed':>6}  since before"
    ]
    for one, change in zip(kept, find_changes(kept), strict=True):
        ttft = "-" if one.through.ttft_p50_ms is None else f"{one.through.ttft_p50_ms:.0f} ms"
        lines.append(
            f"{one.at[:19]:20} {one.configuration[:12]:13} {one.node[:16]:16} {one.direct.tokens_per_s:>9.1f} "
            f"{one.through.tokens_per_s:>9.1f} {one.ratio:>6.2f} {ttft:>9} {one.through.failed:>6}  {_format_change(change, one.reason)}"
        )
    return lines


def _format_change(change: BaselineChange, reason: Reason | None) -> str:
    slow = "" if reason is None else f"; {reason.part}"
    if change.ratio is None or change.throughput is None:
        return f"-{slow}"
    differs = f" ({' and '.join(change.differs)} changed)" if change.differs else ""
    return f"ratio {change.ratio - 1:+.0%}, throughput {change.throughput - 1:+.0%}{differs}{slow}"


def _format_difference(new: float, old: float) -> float | None:
    return round(new / old, 3) if old else None


def _format_row(name: str, side: Figures) -> str:
    times = [side.ttft_p50_ms, side.ttft_p99_ms, side.tpot_p50_ms, side.tpot_p99_ms]
    cells = [f"{'-' if value is None else f'{value:.1f} ms':>{width}}" for value, width in zip(times, (9, 8, 9, 8), strict=True)]
    return f"{name[:22]:22} {side.tokens_per_s:>9.1f} {side.requests_per_s:>7.2f} {' '.join(cells)} {side.failed:>7}"

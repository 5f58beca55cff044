"""Comparisons as they are kept, and what has changed from one to the next (R44).

Rule: two are compared only when the same was asked of the same node; what else differs between them is said.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from din_extproc.tools.bench.baseline import BOTTLENECK, BaselineLoad, Figures, Reason, TimeShares


class BaselineComparison(Struct, frozen=True, omit_defaults=True):
    """One comparison."""

    at: str
    """When: ISO 8601, UTC."""
    release: str
    """Of din-extproc."""
    configuration: str
    """The fingerprint of the one in use."""
    url: str
    model: str
    pool: str
    node: str
    load: BaselineLoad
    direct: Figures
    through: Figures
    ratio: float
    """Throughput through the network, as a share of the node's own."""
    spread: tuple[float, float]
    """Of single rounds: the lowest and the highest."""
    shares: TimeShares | None = None
    """None: the gateway has told of no request."""
    cache_hits: float | None = None
    """Share of the rankings that the route cache knew; None: nobody told."""
    reason: Reason | None = None
    """None: the gateway is no bottleneck."""
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """The gateway is no bottleneck, and most requests were answered."""
        return self.ratio >= BOTTLENECK

    @property
    def verdict(self) -> str:
        """In one line."""
        share = f"{self.ratio:.2f} of the node's own throughput ({self.spread[0]:.2f} to {self.spread[1]:.2f})"
        if self.reason is None:
            return f"the network gives {share}"
        return f"the gateway is the bottleneck: {share}. {self.reason.part}: {self.reason.said}"

    def lines(self) -> list[str]:
        """For a terminal."""
        load = self.load
        head = (
            f"{self.model} in pool {self.pool}: {load.prompts} prompts, {load.at_once} at once, {load.tokens} tokens, {load.rounds} rounds"
        )
        rows = [_row(f"{self.node} alone", self.direct), _row("through the network", self.through)]
        columns = f"{'':22} {'tokens/s':>9} {'req/s':>7} {'TTFT p50':>9} {'p99':>8} {'TPOT p50':>9} {'p99':>8} {'failed':>7}"
        where = [] if self.shares is None else [self.shares.line]
        errors = [f"failed {who}: {count} {code}" for who, side in self._sides() for code, count in side.errors.items()]
        return [head, columns, *rows, *where, *errors, *self.notes, self.verdict]

    def _sides(self) -> Iterator[tuple[str, Figures]]:
        yield "directly", self.direct
        yield "through the network", self.through


class BaselineChange(Struct, frozen=True):
    """What has become of a comparison since the one before it."""

    ratio: float | None
    """New by old; None: there is none before it to compare with."""
    throughput: float | None
    """Through the network, likewise."""
    differs: tuple[str, ...]
    """`configuration`, `release`."""


def changes(kept: Sequence[BaselineComparison]) -> list[BaselineChange]:
    """Of each, in the order in which they are kept."""
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
        found.append(BaselineChange(_by(one.ratio, before.ratio), _by(one.through.tokens_per_s, before.through.tokens_per_s), differs))
    return found


def history_lines(kept: Sequence[BaselineComparison]) -> list[str]:
    """For a terminal: oldest first."""
    lines = [
        f"{'when':20} {'configuration':13} {'node':16} {'alone':>9} {'network':>9} {'ratio':>6} {'TTFT p50':>9} {'failed':>6}  since before"
    ]
    for one, change in zip(kept, changes(kept), strict=True):
        ttft = "-" if one.through.ttft_p50_ms is None else f"{one.through.ttft_p50_ms:.0f} ms"
        lines.append(
            f"{one.at[:19]:20} {one.configuration[:12]:13} {one.node[:16]:16} {one.direct.tokens_per_s:>9.1f} "
            f"{one.through.tokens_per_s:>9.1f} {one.ratio:>6.2f} {ttft:>9} {one.through.failed:>6}  {_said(change, one.reason)}"
        )
    return lines


def _said(change: BaselineChange, reason: Reason | None) -> str:
    slow = "" if reason is None else f"; {reason.part}"
    if change.ratio is None or change.throughput is None:
        return f"-{slow}"
    differs = f" ({' and '.join(change.differs)} changed)" if change.differs else ""
    return f"ratio {change.ratio - 1:+.0%}, throughput {change.throughput - 1:+.0%}{differs}{slow}"


def _by(new: float, old: float) -> float | None:
    return round(new / old, 3) if old else None


def _row(name: str, side: Figures) -> str:
    times = [side.ttft_p50_ms, side.ttft_p99_ms, side.tpot_p50_ms, side.tpot_p99_ms]
    shown = [f"{'-' if value is None else f'{value:.1f} ms':>{width}}" for value, width in zip(times, (9, 8, 9, 8), strict=True)]
    return f"{name[:22]:22} {side.tokens_per_s:>9.1f} {side.requests_per_s:>7.2f} {' '.join(shown)} {side.failed:>7}"

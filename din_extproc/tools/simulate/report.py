"""The readable report of a simulation: Markdown tables, for a terminal and a pull request.

Rule: one run is shown whole; several get a line each, the same figures for all.
"""

from collections.abc import Iterator

from din_extproc.domain.price import format_money
from din_extproc.tools.simulate.simulate import Simulated, VariantResult
from din_extproc.tools.simulate.stats import Outcomes


def lines(simulated: Simulated) -> list[str]:
    """The tables."""
    title = f"{simulated.seconds:g} s of virtual time, seed {simulated.seed}"
    if simulated.skipped:
        title += f"; {simulated.skipped} recorded requests say too little to be sent again"
    if simulated.slo:
        title += f"; promised: {', '.join(f'{name} <= {bound:g}' for name, bound in simulated.slo.items())}"
    if len(simulated.rows) > 1:
        return [title, "", *_compared(simulated)]
    [row] = simulated.rows
    return [title, *_verdict(simulated, row), "", *_whole(row.outcomes)]


def _verdict(simulated: Simulated, row: VariantResult) -> Iterator[str]:
    if simulated.sized:
        most = row.outcomes.pools[simulated.sized].nodes
        enough = f"{row.nodes} nodes of {simulated.sized} are enough, fewer are not" if row.nodes else f"not even {most} nodes are enough"
        yield enough
    elif simulated.slo:
        yield f"not kept: {', '.join(row.slo_broken)}" if row.slo_broken else "all of it is kept"


def _compared(simulated: Simulated) -> Iterator[str]:
    paths = list(simulated.rows[0].variant)
    sized = [f"nodes of {simulated.sized}"] if simulated.sized else []
    kept = ["kept"] if simulated.slo else []
    figures = ["requests/s", "tokens/s", "errors", "first token P50 s", "P99 s", "whole P50 s", "P99 s", "busy"]
    yield _line([*paths, *sized, *figures, *kept])
    yield _line(["---"] * (len(paths) + len(sized) + len(figures) + len(kept)))
    for row in simulated.rows:
        found = row.outcomes
        cells = [str(row.variant[path]) for path in paths]
        if sized:
            cells.append("not enough" if row.nodes is None else str(row.nodes))
        cells += [f"{found.requests_per_s:,.2f}", f"{found.tokens_per_s:,.0f}", f"{found.errors:.2%}"]
        cells += [*map(_seconds, (found.first_token_s.p50, found.first_token_s.p99, found.seconds.p50, found.seconds.p99)), _busy(found)]
        if kept:
            cells.append(f"no: {', '.join(row.slo_broken)}" if row.slo_broken else "yes")
        yield _line(cells)


def _whole(found: Outcomes) -> Iterator[str]:
    yield from _pairs(found)
    yield ""
    yield _line(["pool", "nodes", "requests", "busy", "busiest node", "first token P50 s", "P99 s", "preemptions"])
    yield _line(["---"] * 8)
    for name, pool in found.pools.items():
        cells = [name, str(pool.nodes), f"{pool.share:.1%}", f"{pool.busy:.0%}", f"{pool.busiest:.0%}"]
        yield _line([*cells, _seconds(pool.first_token_s.p50), _seconds(pool.first_token_s.p99), str(pool.preemptions)])
    yield ""
    yield _line(["requests", "number", "errors", "first token P50 s", "P99 s", "whole P50 s", "P99 s", "answered by"])
    yield _line(["---"] * 8)
    for name, source in found.sources.items():
        cells = [name, str(source.requests), f"{source.errors:.2%}", _seconds(source.first_token_s.p50), _seconds(source.first_token_s.p99)]
        where = ", ".join(f"{pool} {share:.1%}" for pool, share in source.pools.items())
        yield _line([*cells, _seconds(source.seconds.p50), _seconds(source.seconds.p99), where])


def _pairs(found: Outcomes) -> Iterator[str]:
    yield _line(["figure", "value"])
    yield _line(["---", "---"])
    rates = f"{found.requests_per_s:,.2f} requests/s, {found.tokens_per_s:,.0f} tokens/s ({found.output_tokens_per_s:,.0f} of answers)"
    yield _line(["answered", rates])
    losses = {"refused": found.refused, "failed": found.failed}
    reasons = "; ".join(f"{name} {number}" for counts in losses.values() for name, number in counts.items())
    yield _line(["errors", f"{found.errors:.2%} of {found.requests:,}" + (f": {reasons}" if reasons else "")])
    yield _line(["degraded, waited, retried", f"{found.degraded:.2%}, {found.waited:.2%}, {found.retried:.2%} of those that were sent"])
    if found.unfinished:
        yield _line(["unfinished at the end", str(found.unfinished)])
    if found.breakers_opened:
        yield _line(["breakers opened", str(found.breakers_opened)])
    if found.tenants_refused:
        yield _line(["refused most", ", ".join(f"{tenant} {number}" for tenant, number in found.tenants_refused.items())])
    if found.cost:
        spent = ", ".join(f"{tenant} {format_money(cost)}" for tenant, cost in found.tenants_cost.items())
        yield _line(["cost; by tenant", f"{format_money(found.cost)}; {spent}"])
    for name, spread in (("first token", found.first_token_s), ("per token", found.per_token_s), ("whole answer", found.seconds)):
        yield _line([f"{name} P50, P95, P99 s", f"{_seconds(spread.p50)}, {_seconds(spread.p95)}, {_seconds(spread.p99)}"])


def _busy(found: Outcomes) -> str:
    nodes = sum(pool.nodes for pool in found.pools.values())
    return f"{sum(pool.busy * pool.nodes for pool in found.pools.values()) / max(1, nodes):.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""Figures of `bench baseline`: the throughput of one node directly and through the gateway, and the cause of the difference.

Rule: throughput is output tokens per second in the median round; below half of the node's own, the gateway is the bottleneck.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct, field

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer

BOTTLENECK = 0.5
"""Share of the node's own throughput below which the gateway is the bottleneck."""
_POOR_CACHE = 0.5
_MOSTLY = 0.5


class BaselineFailed(Exception):  # noqa: N818 - the name says what happened
    """The comparison is impossible; the message says why."""


class BaselineLoad(Struct, frozen=True):
    """The load that both sides get."""

    prompts: int = 24
    """Number of different prompts; each round sends all."""
    at_once: int = 4
    tokens: int = 32
    """Maximum output tokens of an answer."""
    rounds: int = 3
    """Number of measured rounds, after one for warm-up."""


class BaselineRound(Struct, frozen=True):
    """The result of one round: all prompts once."""

    seconds: float
    answers: tuple[TimedAnswer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of complete answers."""
        return sum(answer.tokens for answer in self.answers if not answer.trouble) / self.seconds


class Figures(Struct, frozen=True):
    """The figures of one side, in milliseconds; None where no answer has the value."""

    requests: int
    tokens_per_s: float
    """The output tokens per second of the median round."""
    requests_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    total_ms: float | None
    """Mean time of complete answers."""
    errors: dict[str, int]
    """Number of failed requests by error code."""

    @property
    def failed(self) -> int:
        """The number of requests without a complete answer."""
        return sum(self.errors.values())


class TimeShares(Struct, frozen=True):
    """Mean times of a request through the gateway in milliseconds, over the requests that the gateway reports."""

    requests: int
    waited_ms: float
    """Time in the admission queue."""
    decided_ms: float
    forwarded_ms: float
    """All remaining time outside of the node: Envoy and the network."""
    node_ms: float

    @property
    def line(self) -> str:
        """Return the line for a terminal."""
        own = f"queue {self.waited_ms:.1f} ms, decision {self.decided_ms:.2f} ms, forwarding {self.forwarded_ms:.1f} ms"
        return f"of a request: {own}, node {self.node_ms:.1f} ms"


class Reason(Struct, frozen=True):
    """The cause of the difference."""

    part: str
    """`errors`, `queue`, `decision`, `forwarding`, `node`; `unknown`: the gateway has reported no request."""
    cause: str = field(name="said")


def make_figures(rounds: Sequence[BaselineRound]) -> Figures:
    """Compute the figures of one side."""
    answers = [answer for each in rounds for answer in each.answers]
    good = [answer for answer in answers if not answer.trouble]
    first = sorted(answer.first_token_ms for answer in good if answer.first_token_ms is not None)
    pace = sorted(answer.per_token_ms for answer in good if answer.per_token_ms is not None)
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.trouble:
            errors[answer.trouble] = errors.get(answer.trouble, 0) + 1
    return Figures(
        requests=len(answers),
        tokens_per_s=round(median(each.tokens_per_s for each in rounds), 2),
        requests_per_s=round(median(sum(not answer.trouble for answer in each.answers) / each.seconds for each in rounds), 3),
        ttft_p50_ms=_compute_percentile(first, 0.5),
        ttft_p99_ms=_compute_percentile(first, 0.99),
        tpot_p50_ms=_compute_percentile(pace, 0.5),
        tpot_p99_ms=_compute_percentile(pace, 0.99),
        total_ms=round(fmean(answer.total_ms for answer in good), 3) if good else None,
        errors=errors,
    )


def ratio_range(direct: Sequence[BaselineRound], through: Sequence[BaselineRound]) -> tuple[float, float]:
    """Return the lowest and the highest ratio of paired rounds. No direct round may be 0."""
    ratios = [of.tokens_per_s / to.tokens_per_s for to, of in zip(direct, through, strict=True)]
    return round(min(ratios), 3), round(max(ratios), 3)


def time_shares(answers: Mapping[str, TimedAnswer], records: Sequence[GatewayTimes]) -> TimeShares | None:
    """Compute where the time went.

    Args:
        answers: Answers through the gateway, by trace id.
        records: The gateway's records of these requests.

    Returns:
        None if it has no record of a complete answer.
    """
    parts = [
        (times.waited_ms, times.decided_ms, answers[times.trace_id].total_ms, times.node_ended_ms - times.sent_ms)
        for times in records
        if times.trace_id in answers and not answers[times.trace_id].trouble
        if times.sent_ms is not None and times.node_ended_ms is not None and times.decided_ms is not None
    ]
    if not parts:
        return None
    waited, decided, total, node = (fmean(part) for part in zip(*parts, strict=True))
    own = max(0.0, decided - waited)
    return TimeShares(len(parts), round(waited, 3), round(own, 3), round(max(0.0, total - waited - own - node), 3), round(node, 3))


def find_reason(direct: Figures, through: Figures, found: TimeShares | None, cache_hits: float | None) -> Reason:
    """Return why the gateway is slower than the node.

    Args:
        direct: The figures of the node.
        through: The figures through the gateway.
        found: The time shares.
        cache_hits: Share of decisions that hit the route cache; None: unknown.
    """
    if through.failed > _MOSTLY * through.requests:
        code = max(through.errors, key=lambda each: through.errors[each])
        return Reason("errors", f"{through.failed} of {through.requests} requests failed, {through.errors[code]} with {code}")
    if found is None or direct.total_ms is None:
        return Reason("unknown", "the admin port has no record of these requests, so the cause is unknown")
    more = {
        "queue": found.waited_ms,
        "decision": found.decided_ms,
        "forwarding": found.forwarded_ms,
        "node": found.node_ms - direct.total_ms,
    }
    part = max(more, key=lambda each: more[each])
    hits = "" if cache_hits is None else f"; the route cache knew {cache_hits:.0%} of the nodes' rankings"
    poor = cache_hits is not None and cache_hits < _POOR_CACHE
    match part:
        case "queue":
            text = f"requests wait {found.waited_ms:.1f} ms for the tenant's tokens or slots"
        case "decision":
            text = f"a decision takes {found.decided_ms:.1f} ms{hits}{', which is little' if poor else ''}"
        case "forwarding":
            text = f"Envoy and the network take {found.forwarded_ms:.1f} ms a request{hits}"
        case _:
            text = f"nodes of the pool take {found.node_ms:.0f} ms a request, this one {direct.total_ms:.0f} ms without the gateway"
    return Reason(part, text)


def _compute_percentile(values: Sequence[float], share: float) -> float | None:
    """Return a percentile of sorted values."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else None

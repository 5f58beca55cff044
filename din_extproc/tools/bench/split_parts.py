"""Splits one request by the clocks of client, gateway and node: transfer, queue, decision, gateway, node, transfer.

Rule: no part is negative. If a clock is off, a part would be, the others add up to more than the total, and the excess is the gap.

| part       | from                                       | to                                   | by whose clock              |
|------------|--------------------------------------------|--------------------------------------|-----------------------------|
| `transfer` | the client sends                           | the gateway has the whole request    | client's and gateway's      |
| `queue`    | the request enters the admission queue     | it leaves it                         | gateway's                   |
| `decision` | the whole request (less the queue)         | the verdict                          | gateway's                   |
| `gateway`  | the verdict                                | the request's first byte to the node | gateway's                   |
| `way`      | that, less what the node works             |                                      | gateway's less node's       |
| `node`     | the engine works, as it reports; else:     | the node's last byte                 | node's, else gateway's      |
| `forward`  | the node's last byte                       | the last byte to the client          | gateway's                   |
| `back`     | the last byte to the client                | the client has it                    | gateway's and client's      |
"""

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer
from din_extproc.tools.bench.clocks import TOLERANCE_MS, ClockOffset, MeasuredClock, TimedExchange

PARTS = ("transfer", "queue", "decision", "gateway", "way", "node", "forward", "back")
"""The parts in the order in which they happen."""
_LOOSE_MS = 300.0


class Split(Struct, frozen=True):
    """The split of one request, in milliseconds."""

    trace_id: str
    node: str
    tokens: int
    total_ms: float
    """Total time by the client's clock."""
    ttft_ms: float | None
    tpot_ms: float | None
    parts: dict[str, float]
    """The parts of the table above, with clock offsets corrected."""
    gap_ms: float
    """The excess of the parts' sum over the total, with clocks as they are."""
    node_says: bool
    """Whether the engine reported its own time."""
    suspect: str = ""
    """The clock that causes the gap, "" if the gap is small."""


class SplitReport(Struct, frozen=True):
    """The report on many split requests."""

    at: str
    url: str
    model: str
    tolerance_ms: float
    splits: tuple[Split, ...]
    clocks: tuple[MeasuredClock, ...]
    failed: dict[str, int]
    """Number of requests that could not be split, by reason."""

    @property
    def adds_up(self) -> bool:
        """Whether no request has a large gap and no clock is off."""
        return not any(split.suspect for split in self.splits) and not any(clock.off for clock in self.clocks)

    @property
    def sound(self) -> bool:
        """Whether all parts add up, no clock is off and no request failed."""
        return bool(self.splits) and self.adds_up and not self.failed

    def lines(self) -> list[str]:
        """Return the lines for a terminal."""
        head = (
            f"{'tokens':>6} {'node':16} {'TTFT':>8} {'TPOT':>7} {'total':>9}  " + " ".join(f"{name:>8}" for name in PARTS) + f" {'gap':>6}"
        )
        rows = [_format_row(split) for split in self.splits]
        failed = [f"not taken apart: {count} ({why})" for why, count in self.failed.items()]
        clocks = [clock.fault or _describe_sound_clock(clock) for clock in self.clocks]
        suspects = sorted({split.suspect for split in self.splits if split.suspect})
        if len(self.splits) > 1:
            middle = median_parts(self.splits)
            rows.append(f"{'':>6} {'median':16} {'':>8} {'':>7} {'':>9}  " + " ".join(f"{middle[name]:>8.1f}" for name in PARTS))
        return [f"{self.model} at {self.url}, milliseconds", head, *rows, *failed, *clocks, *suspects, self.verdict]

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        if not self.splits:
            return "nothing could be taken apart"
        worst = max(split.gap_ms for split in self.splits)
        off = ", ".join(clock.whose for clock in self.clocks if clock.off)
        named = f"; a clock is off: {off}" if off else ""
        gap = f"within {self.tolerance_ms:g} ms: the largest gap of {len(self.splits)} requests is {worst:.1f} ms"
        apart = any(each.suspect for each in self.splits)
        return f"the parts {'do not add' if apart else 'add'} up {gap}{named}"


def split_request(exchange: TimedExchange, gateway: ClockOffset, tolerance_ms: float = TOLERANCE_MS) -> Split | str:
    """Split one request.

    Args:
        exchange: The request with the timestamps of client, gateway and node.
        gateway: The gateway's clock offset; if it is off for certain, the parts are corrected by it.
        tolerance_ms: The accepted gap.

    Returns:
        A sentence if a timestamp is missing.
    """
    answer, times = exchange.answer, exchange.gateway
    if answer.trouble:
        return answer.trouble
    if times.received_ms is None or times.sent_ms is None or times.node_ended_ms is None or times.ended_ms is None:
        return f"the gateway does not know all its times (outcome {times.outcome})"
    if times.decided_ms is None:
        return "the gateway does not say how long it decided"
    ahead_ms = (times.started_at - exchange.began_at) * 1e3
    raw = _make_parts(answer, times, ahead_ms)
    gap_ms = max(0.0, sum(max(0.0, part) for part in raw.values()) - answer.total_ms)
    right = _make_parts(answer, times, ahead_ms - gateway.middle_ms) if gateway.is_off(tolerance_ms) else raw
    return Split(
        trace_id=times.trace_id,
        node=times.node_id,
        tokens=answer.tokens,
        total_ms=round(answer.total_ms, 3),
        ttft_ms=None if answer.first_token_ms is None else round(answer.first_token_ms, 3),
        tpot_ms=None if answer.per_token_ms is None else round(answer.per_token_ms, 3),
        parts={name: round(max(0.0, right[name]), 3) for name in PARTS},
        gap_ms=round(gap_ms, 3),
        node_says=answer.executed_ms is not None,
        suspect=_find_suspect(raw, times.node_id, tolerance_ms) if gap_ms > tolerance_ms else "",
    )


def _make_parts(answer: TimedAnswer, times: GatewayTimes, ahead_ms: float) -> dict[str, float]:
    """Return the uncorrected parts; they may be negative. `ahead_ms`: from the client's sending to the first byte at the gateway."""
    received, sent, node_ended = times.received_ms or 0.0, times.sent_ms or 0.0, times.node_ended_ms or 0.0
    decided, busy = times.decided_ms or 0.0, node_ended - sent
    works = _measure_node(answer, sent, busy)
    after = answer.total_ms - ahead_ms - node_ended
    forward = min((times.ended_ms or node_ended) - node_ended, max(0.0, after))  # Envoy may finish later
    return {
        "transfer": ahead_ms + received,
        "queue": times.waited_ms,
        "decision": decided - times.waited_ms,
        "gateway": sent - received - decided,
        "way": busy - works,
        "node": works,
        "forward": forward,
        "back": after - forward,
    }


def _measure_node(answer: TimedAnswer, sent_ms: float, busy_ms: float) -> float:
    """Return the engine's reported time; else the gateway's waiting time less the network time that the node's Envoy reports."""
    if answer.executed_ms is not None:
        return answer.executed_ms
    if answer.node is None:
        return busy_ms
    return busy_ms - min(busy_ms, max(0.0, answer.node.seen_ms - sent_ms - answer.node.answered_ms))


def median_parts(splits: Sequence[Split]) -> dict[str, float]:
    """Return the median of each part."""
    return {name: median(each.parts[name] for each in splits) for name in PARTS}


def _find_suspect(raw: Mapping[str, float], node: str, tolerance_ms: float) -> str:
    """Return the clock that causes the most negative part."""
    part = min(raw, key=lambda each: raw[each])
    if raw[part] > -tolerance_ms / 2:
        return "no single clock is off: several parts are a little below zero"
    short = f"{part} takes {raw[part]:.0f} ms"
    if part in {"transfer", "back"}:
        return f"{short}: the clocks of client and gateway differ"
    if part == "way":
        return f"{short}: {node} says that it worked longer than the gateway waited for it"
    return f"{short}: the stopwatches of sidecar and Envoy differ"


def _describe_sound_clock(clock: MeasuredClock) -> str:
    if clock.low_ms is None or clock.high_ms is None:
        return f"clock of {clock.whose}: it has no timestamps"
    loosely = "; too loosely known: ask more short requests" if clock.high_ms - clock.low_ms > _LOOSE_MS else ""
    return f"clock of {clock.whose}: between {clock.low_ms:+.0f} and {clock.high_ms:+.0f} ms of the client's{loosely}"


def _format_row(each: Split) -> str:
    times = [f"{'-' if value is None else f'{value:.1f}':>{width}}" for value, width in ((each.ttft_ms, 8), (each.tpot_ms, 7))]
    parts = " ".join(f"{each.parts[name]:>8.1f}" for name in PARTS)
    return f"{each.tokens:>6} {each.node[:16]:16} {' '.join(times)} {each.total_ms:>9.1f}  {parts} {each.gap_ms:>6.1f}"

"""One request taken apart by the clocks of client, gateway and node (R43): transfer, queue, decision, gateway, node, transfer.

Rule: a part takes no less than no time. Where a clock lies, a part comes out below zero, the others add up to more than the whole, and
that much is missing: the gap.

| part       | from                                       | to                                   | by whose clock              |
|------------|--------------------------------------------|--------------------------------------|-----------------------------|
| `transfer` | the client sends                           | the gateway has the whole request    | client's and gateway's      |
| `queue`    | the request joins the line for its limits  | it leaves the line                   | gateway's                   |
| `decision` | the whole request (less the queue)         | the verdict                          | gateway's                   |
| `gateway`  | the verdict                                | the request's first byte to the node | gateway's                   |
| `way`      | that, less what the node works             |                                      | gateway's less node's       |
| `node`     | the engine works, as it says itself; else: | the node's last byte                 | node's, else gateway's      |
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
"""In the order in which they happen."""
_LOOSE_MS = 300.0


class Split(Struct, frozen=True):
    """One request. Milliseconds."""

    trace_id: str
    node: str
    tokens: int
    total_ms: float
    """By the client's clock."""
    ttft_ms: float | None
    tpot_ms: float | None
    parts: dict[str, float]
    """As the table above has them; with clocks that are off put right."""
    gap_ms: float
    """By how much the parts add up to more than the whole, with the clocks as they are."""
    node_says: bool
    """The engine told how long it worked."""
    suspect: str = ""
    """Whose clock or stopwatch the gap comes from, "" when it is small."""


class Apart(Struct, frozen=True):
    """Many requests taken apart."""

    at: str
    url: str
    model: str
    tolerance_ms: float
    splits: tuple[Split, ...]
    clocks: tuple[MeasuredClock, ...]
    failed: dict[str, int]
    """Requests that could not be taken apart, by why."""

    @property
    def adds_up(self) -> bool:
        """Every request's parts, and no clock is off."""
        return not any(split.suspect for split in self.splits) and not any(clock.off for clock in self.clocks)

    @property
    def sound(self) -> bool:
        """Everything adds up, and nothing failed."""
        return bool(self.splits) and self.adds_up and not self.failed

    def lines(self) -> list[str]:
        """For a terminal."""
        head = (
            f"{'tokens':>6} {'node':16} {'TTFT':>8} {'TPOT':>7} {'total':>9}  " + " ".join(f"{name:>8}" for name in PARTS) + f" {'gap':>6}"
        )
        rows = [_row(split) for split in self.splits]
        failed = [f"not taken apart: {count} ({why})" for why, count in self.failed.items()]
        clocks = [clock.said or _fine(clock) for clock in self.clocks]
        suspects = sorted({split.suspect for split in self.splits if split.suspect})
        if len(self.splits) > 1:
            middle = typical(self.splits)
            rows.append(f"{'':>6} {'median':16} {'':>8} {'':>7} {'':>9}  " + " ".join(f"{middle[name]:>8.1f}" for name in PARTS))
        return [f"{self.model} at {self.url}, milliseconds", head, *rows, *failed, *clocks, *suspects, self.verdict]

    @property
    def verdict(self) -> str:
        """In one line."""
        if not self.splits:
            return "nothing could be taken apart"
        worst = max(split.gap_ms for split in self.splits)
        off = ", ".join(clock.whose for clock in self.clocks if clock.off)
        named = f"; a clock is off: {off}" if off else ""
        gap = f"within {self.tolerance_ms:g} ms: the largest gap of {len(self.splits)} requests is {worst:.1f} ms"
        apart = any(each.suspect for each in self.splits)
        return f"the parts {'do not add' if apart else 'add'} up {gap}{named}"


def split(exchange: TimedExchange, gateway: ClockOffset, tolerance_ms: float = TOLERANCE_MS) -> Split | str:
    """Take one request apart.

    Args:
        exchange: As everybody saw it.
        gateway: Its clock against the client's: where it is certainly off, the parts are put right by it.
        tolerance_ms: How large a gap may be.

    Returns:
        A sentence where something is missing.
    """
    answer, times = exchange.answer, exchange.gateway
    if answer.trouble:
        return answer.trouble
    if times.received_ms is None or times.sent_ms is None or times.node_ended_ms is None or times.ended_ms is None:
        return f"the gateway does not know all its times (outcome {times.outcome})"
    if times.decided_ms is None:
        return "the gateway does not say how long it decided"
    ahead_ms = (times.started_at - exchange.began_at) * 1e3
    raw = _parts(answer, times, ahead_ms)
    gap_ms = max(0.0, sum(max(0.0, part) for part in raw.values()) - answer.total_ms)
    right = _parts(answer, times, ahead_ms - gateway.middle_ms) if gateway.is_off(tolerance_ms) else raw
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
        suspect=_suspect(raw, times.node_id, tolerance_ms) if gap_ms > tolerance_ms else "",
    )


def _parts(answer: TimedAnswer, times: GatewayTimes, ahead_ms: float) -> dict[str, float]:
    """As the clocks have them, below zero where they must. `ahead_ms`: from the client's sending to the request's first byte here."""
    received, sent, node_ended = times.received_ms or 0.0, times.sent_ms or 0.0, times.node_ended_ms or 0.0
    decided, busy = times.decided_ms or 0.0, node_ended - sent
    works = _works(answer, sent, busy)
    after = answer.total_ms - ahead_ms - node_ended
    forward = min((times.ended_ms or node_ended) - node_ended, max(0.0, after))  # Envoy's last note may come after the client has read all
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


def _works(answer: TimedAnswer, sent_ms: float, busy_ms: float) -> float:
    """What the engine says of itself; else all that the gateway waited for it, less the ways as far as the node's own Envoy tells."""
    if answer.executed_ms is not None:
        return answer.executed_ms
    if answer.node is None:
        return busy_ms
    return busy_ms - min(busy_ms, max(0.0, answer.node.seen_ms - sent_ms - answer.node.answered_ms))


def typical(splits: Sequence[Split]) -> dict[str, float]:
    """The median of each part."""
    return {name: median(each.parts[name] for each in splits) for name in PARTS}


def _suspect(raw: Mapping[str, float], node: str, tolerance_ms: float) -> str:
    """Whose clock makes the part that is furthest below zero."""
    part = min(raw, key=lambda each: raw[each])
    if raw[part] > -tolerance_ms / 2:
        return "no single clock is off: several parts are a little below zero"
    short = f"{part} takes {raw[part]:.0f} ms"
    if part in {"transfer", "back"}:
        return f"{short}: the clocks of client and gateway differ"
    if part == "way":
        return f"{short}: {node} says that it worked longer than the gateway waited for it"
    return f"{short}: the stopwatches of sidecar and Envoy differ"


def _fine(clock: MeasuredClock) -> str:
    if clock.low_ms is None or clock.high_ms is None:
        return f"clock of {clock.whose}: it does not tell"
    loosely = "; too loosely known: ask more short requests" if clock.high_ms - clock.low_ms > _LOOSE_MS else ""
    return f"clock of {clock.whose}: between {clock.low_ms:+.0f} and {clock.high_ms:+.0f} ms of the client's{loosely}"


def _row(each: Split) -> str:
    times = [f"{'-' if value is None else f'{value:.1f}':>{width}}" for value, width in ((each.ttft_ms, 8), (each.tpot_ms, 7))]
    parts = " ".join(f"{each.parts[name]:>8.1f}" for name in PARTS)
    return f"{each.tokens:>6} {each.node[:16]:16} {' '.join(times)} {each.total_ms:>9.1f}  {parts} {each.gap_ms:>6.1f}"

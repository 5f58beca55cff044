"""How far the clocks of gateway and nodes are from the client's, and which of them is the one that is off.

Rule: only causes and effects count: what was sent before it arrived bounds the difference of two clocks, whatever the way took. A bound
is kept until a tighter one comes; nothing is averaged.

An engine writes whole seconds (`created`): one request bounds its clock by a second, many at different moments of the second by little.
An Envoy in front of it says when the request came: one is enough.
"""

from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer

TOLERANCE_MS = 50.0
"""What R43 allows."""
_SECOND_MS = 1e3
_ANOTHER_DAY_MS = 86_400e3
"""Who is so far off does not tell the time at all."""


class TimedExchange(Struct, frozen=True):
    """One request as everybody saw it."""

    began_at: float
    """When it was sent: seconds since the epoch, by the client's clock."""
    answer: TimedAnswer
    gateway: GatewayTimes


class ClockOffset(Struct, frozen=True):
    """A clock is so far ahead of another one: at least and at most, in milliseconds. Behind: below 0."""

    low_ms: float = -inf
    high_ms: float = inf

    def within(self, low_ms: float, high_ms: float) -> "ClockOffset":
        """With more known."""
        return ClockOffset(max(self.low_ms, low_ms), min(self.high_ms, high_ms))

    def seen_from(self, other: "ClockOffset") -> "ClockOffset":
        """The same clock against another one than the client's."""
        return ClockOffset(self.low_ms - other.high_ms, self.high_ms - other.low_ms)

    @property
    def middle_ms(self) -> float:
        """Where it is most likely."""
        return (self.low_ms + self.high_ms) / 2

    @property
    def is_known(self) -> bool:
        """Both ways, and it is a clock."""
        return abs(self.low_ms) < _ANOTHER_DAY_MS and abs(self.high_ms) < _ANOTHER_DAY_MS

    def is_off(self, tolerance_ms: float = TOLERANCE_MS) -> bool:
        """Certainly, by more than is allowed."""
        return self.is_known and (min(self.low_ms, self.high_ms) > tolerance_ms or max(self.low_ms, self.high_ms) < -tolerance_ms)

    @property
    def said(self) -> str:
        """For people."""
        low, high = sorted((self.low_ms, self.high_ms))
        if high < 0:
            return f"{-self.middle_ms:.0f} ms behind (between {-high:.0f} and {-low:.0f})"
        return f"{self.middle_ms:.0f} ms ahead (between {low:.0f} and {high:.0f})"


class MeasuredClock(Struct, frozen=True):
    """What was found out about one."""

    whose: str
    """`gateway`, `client` or a node's id."""
    low_ms: float | None
    """Ahead of the client's at least; None: it is not known."""
    high_ms: float | None
    off: bool
    said: str = ""
    """What is wrong with it, "" when nothing is."""


def gateway_offset(exchanges: Iterable[TimedExchange]) -> ClockOffset:
    """Of the gateway's clock against the client's: the request left before it came, and each byte of the answer likewise."""
    found = ClockOffset()
    for each in exchanges:
        times, answer = each.gateway, each.answer
        ahead_ms = (times.started_at - each.began_at) * _SECOND_MS
        found = found.within(-inf, ahead_ms)
        if times.node_ended_ms is not None:
            found = found.within(ahead_ms + times.node_ended_ms - answer.total_ms, inf)
        if times.first_token_ms is not None and answer.first_token_ms is not None:
            found = found.within(ahead_ms + times.first_token_ms - answer.first_token_ms, inf)
    return found


def node_offsets(exchanges: Iterable[TimedExchange]) -> dict[str, ClockOffset]:
    """Of nodes' clocks against the client's, by node: an event was written after the node was sent the request, and before it arrived."""
    found: dict[str, ClockOffset] = {}
    for each in exchanges:
        if not each.gateway.node_id or each.gateway.attempts > 1:
            continue
        began_ms = each.began_at * _SECOND_MS
        earliest_ms = began_ms + (each.gateway.sent_ms or 0.0)
        offset = found.get(each.gateway.node_id, ClockOffset())
        node = each.answer.node
        if node is not None:
            came_ms = node.received_at * _SECOND_MS
            offset = offset.within(came_ms + node.answered_ms - (began_ms + node.head_ms), came_ms - earliest_ms)
        for second, arrived_ms in each.answer.created:
            written_ms = second * _SECOND_MS
            offset = offset.within(written_ms - (began_ms + arrived_ms), written_ms + _SECOND_MS - earliest_ms)
        found[each.gateway.node_id] = offset
    return found


def judged(gateway: ClockOffset, nodes: Mapping[str, ClockOffset], tolerance_ms: float = TOLERANCE_MS) -> list[MeasuredClock]:
    """Which clock is off. Against two that differ the others are witnesses; without a witness both are named.

    Args:
        gateway: Against the client's.
        nodes: Likewise.
        tolerance_ms: How far clocks may be apart.
    """
    if not gateway.is_off(tolerance_ms):
        return [_clock("gateway", gateway), *(_node(name, offset, offset, tolerance_ms) for name, offset in nodes.items())]
    apart = {name: offset.seen_from(gateway) for name, offset in nodes.items()}
    with_gateway = sum(nodes[name].is_off(tolerance_ms) and not apart[name].is_off(tolerance_ms) for name in nodes)
    with_client = sum(apart[name].is_off(tolerance_ms) and not nodes[name].is_off(tolerance_ms) for name in nodes)
    if with_gateway > with_client:
        behind = ClockOffset(-gateway.high_ms, -gateway.low_ms)
        said = f"the client's clock is {behind.said} of the gateway's and of {_nodes(with_gateway)}"
        client = MeasuredClock("client", 0.0, 0.0, off=True, said=said)
        return [client, _clock("gateway", gateway), *(_node(name, nodes[name], apart[name], tolerance_ms) for name in nodes)]
    others = [_node(name, nodes[name], nodes[name], tolerance_ms) for name in nodes]
    if with_client > with_gateway:
        said = f"the gateway's clock is {gateway.said} of the client's and of {_nodes(with_client)}"
    else:
        said = f"the gateway's clock is {gateway.said} of the client's: either may be the one that is off, no node's clock tells which"
    return [_clock("gateway", gateway, said), *others]


def _node(name: str, offset: ClockOffset, against: ClockOffset, tolerance_ms: float) -> MeasuredClock:
    said = f"the clock of {name} is {against.said} of the others'" if against.is_off(tolerance_ms) else ""
    return _clock(name, offset, said)


def _clock(whose: str, offset: ClockOffset, said: str = "") -> MeasuredClock:
    known = offset.is_known
    low, high = (round(offset.low_ms, 1), round(offset.high_ms, 1)) if known else (None, None)
    return MeasuredClock(whose, low, high, off=bool(said), said=said)


def _nodes(count: int) -> str:
    return "a node's" if count == 1 else f"{count} nodes'"

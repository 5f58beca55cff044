"""Offsets of the clocks of gateway and nodes from the client's, and which clock is off.

Rule: only cause and effect count: an event that is sent before it arrives bounds the offset of two clocks, whatever the network delay.
Bounds are only narrowed, never averaged.

An engine reports whole seconds (`created`): one request bounds its clock to a second, many at different fractions to much less.
An Envoy in front of it reports when the request arrived: one request is enough.
"""

from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct, field

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer

TOLERANCE_MS = 50.0
"""Accepted clock offset in milliseconds."""
_SECOND_MS = 1e3
_ANOTHER_DAY_MS = 86_400e3
"""Offset from which on a clock is considered not set at all."""


class TimedExchange(Struct, frozen=True):
    """One request with the timestamps of client, gateway and node."""

    began_at: float
    """When the request was sent: seconds since the epoch, client's clock."""
    answer: TimedAnswer
    gateway: GatewayTimes


class ClockOffset(Struct, frozen=True):
    """Bounds of a clock's offset from another clock in milliseconds; negative: it is behind."""

    low_ms: float = -inf
    high_ms: float = inf

    def narrow(self, low_ms: float, high_ms: float) -> "ClockOffset":
        """Return the offset narrowed by further bounds."""
        return ClockOffset(max(self.low_ms, low_ms), min(self.high_ms, high_ms))

    def relative_to(self, other: "ClockOffset") -> "ClockOffset":
        """Return the offset from another clock than the client's."""
        return ClockOffset(self.low_ms - other.high_ms, self.high_ms - other.low_ms)

    @property
    def middle_ms(self) -> float:
        """The middle of the bounds."""
        return (self.low_ms + self.high_ms) / 2

    @property
    def is_known(self) -> bool:
        """Whether both bounds are known and plausible."""
        return abs(self.low_ms) < _ANOTHER_DAY_MS and abs(self.high_ms) < _ANOTHER_DAY_MS

    def is_off(self, tolerance_ms: float = TOLERANCE_MS) -> bool:
        """Whether the offset exceeds the tolerance for certain."""
        return self.is_known and (min(self.low_ms, self.high_ms) > tolerance_ms or max(self.low_ms, self.high_ms) < -tolerance_ms)

    @property
    def text(self) -> str:
        """Return the offset as text."""
        low, high = sorted((self.low_ms, self.high_ms))
        if high < 0:
            return f"{-self.middle_ms:.0f} ms behind (between {-high:.0f} and {-low:.0f})"
        return f"{self.middle_ms:.0f} ms ahead (between {low:.0f} and {high:.0f})"


class MeasuredClock(Struct, frozen=True):
    """The result for one clock."""

    whose: str
    """`gateway`, `client` or a node's id."""
    low_ms: float | None
    """Lower bound of its offset from the client's clock; None: unknown."""
    high_ms: float | None
    off: bool
    fault: str = field(default="", name="said")
    """The fault of the clock; "" if there is none."""


def measure_gateway(exchanges: Iterable[TimedExchange]) -> ClockOffset:
    """Return the offset of the gateway's clock: the request was sent before it arrived, and each byte of the answer likewise."""
    found = ClockOffset()
    for each in exchanges:
        times, answer = each.gateway, each.answer
        ahead_ms = (times.started_at - each.began_at) * _SECOND_MS
        found = found.narrow(-inf, ahead_ms)
        if times.node_ended_ms is not None:
            found = found.narrow(ahead_ms + times.node_ended_ms - answer.total_ms, inf)
        if times.first_token_ms is not None and answer.first_token_ms is not None:
            found = found.narrow(ahead_ms + times.first_token_ms - answer.first_token_ms, inf)
    return found


def measure_nodes(exchanges: Iterable[TimedExchange]) -> dict[str, ClockOffset]:
    """Return the offsets of nodes' clocks by node: an event was written after the request reached the node and before it arrived."""
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
            offset = offset.narrow(came_ms + node.answered_ms - (began_ms + node.head_ms), came_ms - earliest_ms)
        for second, arrived_ms in each.answer.created:
            written_ms = second * _SECOND_MS
            offset = offset.narrow(written_ms - (began_ms + arrived_ms), written_ms + _SECOND_MS - earliest_ms)
        found[each.gateway.node_id] = offset
    return found


def check_clocks(gateway: ClockOffset, nodes: Mapping[str, ClockOffset], tolerance_ms: float = TOLERANCE_MS) -> list[MeasuredClock]:
    """Judge which clock is off. If two differ, the others decide; if none can, both are named.

    Args:
        gateway: The offset of the gateway's clock.
        nodes: The offsets of the nodes' clocks.
        tolerance_ms: The accepted offset.
    """
    if not gateway.is_off(tolerance_ms):
        return [_make_clock("gateway", gateway), *(_check_node(name, offset, offset, tolerance_ms) for name, offset in nodes.items())]
    apart = {name: offset.relative_to(gateway) for name, offset in nodes.items()}
    with_gateway = sum(nodes[name].is_off(tolerance_ms) and not apart[name].is_off(tolerance_ms) for name in nodes)
    with_client = sum(apart[name].is_off(tolerance_ms) and not nodes[name].is_off(tolerance_ms) for name in nodes)
    if with_gateway > with_client:
        behind = ClockOffset(-gateway.high_ms, -gateway.low_ms)
        fault = f"the client's clock is {behind.text} of the gateway's and of {_count_nodes(with_gateway)}"
        client = MeasuredClock("client", 0.0, 0.0, off=True, fault=fault)
        return [client, _make_clock("gateway", gateway), *(_check_node(name, nodes[name], apart[name], tolerance_ms) for name in nodes)]
    others = [_check_node(name, nodes[name], nodes[name], tolerance_ms) for name in nodes]
    if with_client > with_gateway:
        fault = f"the gateway's clock is {gateway.text} of the client's and of {_count_nodes(with_client)}"
    else:
        fault = f"the gateway's clock is {gateway.text} of the client's: either may be off, and no node's clock decides which"
    return [_make_clock("gateway", gateway, fault), *others]


def _check_node(name: str, offset: ClockOffset, against: ClockOffset, tolerance_ms: float) -> MeasuredClock:
    fault = f"the clock of {name} is {against.text} of the others'" if against.is_off(tolerance_ms) else ""
    return _make_clock(name, offset, fault)


def _make_clock(whose: str, offset: ClockOffset, fault: str = "") -> MeasuredClock:
    known = offset.is_known
    low, high = (round(offset.low_ms, 1), round(offset.high_ms, 1)) if known else (None, None)
    return MeasuredClock(whose, low, high, off=bool(fault), fault=fault)


def _count_nodes(count: int) -> str:
    return "a node's" if count == 1 else f"{count} nodes'"

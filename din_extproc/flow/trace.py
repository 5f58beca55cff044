"""The trace id: made at the first hop, with the time and the gateway's number inside, and the same at every later hop.

W3C's context is kept and passed on beside it.
"""

import re
from zlib import crc32

from msgspec import Struct

from din_extproc.observe.spans import derive_node_span_id

_KEPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.:-]{7,127}").fullmatch
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?").fullmatch
_W3C_ID = re.compile(r"[0-9a-f]{32}").fullmatch
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SPAN_DIGITS = 16
_NODE_BITS = 16
_SEQUENCE_BITS = 64


class TraceIds:
    """Makes ids of 32 hex digits: 12 of Unix milliseconds, 4 of gateway number, 16 that count on from a random start.

    They sort by time, tell which gateway made them, and can serve as a W3C trace id.

    Args:
        node_number: 0-65535, the gateway's own.
        start: A random 64-bit number, different in each process.
    """

    __slots__ = ("_next", "_node")

    def __init__(self, node_number: int, start: int) -> None:
        self._node = f"{node_number % (1 << _NODE_BITS):04x}"
        self._next = start % (1 << _SEQUENCE_BITS)

    def make(self, now: float) -> str:
        """A new id. `now` in seconds since the epoch."""
        self._next = (self._next + 1) % (1 << _SEQUENCE_BITS)
        return f"{int(now * 1000):012x}{self._node}{self._next:016x}"


def is_trace_id(text: str) -> bool:
    """Return whether a client's trace id is accepted: 8 to 128 letters, digits and `_.:-`."""
    return _KEPT(text) is not None


class SpanContext(Struct, frozen=True, gc=False):
    """The trace and parent of the spans of one exchange. Ids in lower-case hex, as in W3C Trace Context."""

    trace_id: str
    span_id: str
    """The gateway's."""
    parent_id: str = ""
    """The client's; "": the trace begins here."""

    @property
    def text(self) -> str:
        """As the access log brings it back."""
        return f"{self.trace_id}-{self.span_id}-{self.parent_id}"

    @property
    def traceparent(self) -> str:
        """The `traceparent` for the node: its parent is the span of the way to it."""
        return f"00-{self.trace_id}-{derive_node_span_id(self.span_id)}-01"


class Sampler:
    """Chooses the exchanges that leave spans: those whose client's trace is sampled, and a share of those that come without a trace.

    Args:
        share: 0 to 1.
    """

    __slots__ = ("_below",)

    def __init__(self, share: float) -> None:
        self._below = share * (1 << 32)

    def context(self, request_id: str, trace_id: str, traceparent: str) -> SpanContext | None:
        """Return the trace and parent of the spans; None: the exchange is not traced.

        Args:
            request_id: The exchange's own.
            trace_id: That of `x-din-trace-id`; the spans' as well, where it can be.
            traceparent: The client's header, "" without one. An invalid one is ignored.
        """
        span_id = request_id[-_SPAN_DIGITS:]
        given = _TRACEPARENT(traceparent) if traceparent else None
        if given is not None and given[1] != _NO_TRACE and given[2] != _NO_SPAN:
            return SpanContext(given[1], span_id, given[2]) if int(given[3], 16) & 1 else None
        if crc32(request_id.encode()) >= self._below:
            return None
        return SpanContext(trace_id if _W3C_ID(trace_id) and trace_id != _NO_TRACE else request_id, span_id)

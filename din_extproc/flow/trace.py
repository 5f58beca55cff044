"""The trace id (R38): made at the first hop, with the time and the gateway's number inside, and the same at every later hop."""

import re

_KEPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.:-]{7,127}").fullmatch
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


def kept(text: str) -> bool:
    """Whether a client's own trace id is passed on: 8 to 128 letters, digits and `_.:-`."""
    return _KEPT(text) is not None

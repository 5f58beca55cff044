"""Resource limits of a peer, and rate limits of frames that are cheap to send and costly to handle: those of the known HTTP/2 attacks.

Rule: an allowance fills again with time; who empties one is no client but a flood, and loses the connection.

Sources: CVE-2019-9512 (ping), -9515 (settings), -9518 (empty frames), -9513 (priorities), -9511 (window updates), CVE-2023-44487
(rapid reset), CVE-2024-27316 (continuation), CVE-2025-8671 (resets that the server is made to send).
"""

from msgspec import Struct

from din_extproc.wire.frames import LARGEST_WINDOW, ErrorCode, GoAwayError

MESSAGE_OVERHEAD_BYTES = 1024 * 1024
"""Bytes by which a message may exceed the body that it carries: headers, metadata, framing."""


class WireLimits(Struct, frozen=True):
    """Limits of one connection. Sizes in bytes, times in seconds."""

    max_streams: int = 10_000
    stream_window: int = 16 * 2**20
    """Initial flow-control window of a stream, in bytes."""
    connection_window: int = 64 * 2**20
    max_header_bytes: int = 32 * 1024
    """Both for a block as sent and for the list it decodes to."""
    max_message_bytes: int = 16 * 2**20
    max_held_bytes: int = 256 * 2**20
    """Unfinished messages of all streams together."""
    max_unsent_bytes_per_stream: int = 48 * 2**20
    max_unsent_bytes: int = 256 * 2**20
    """Replies that wait for the peer's window, of all streams together."""
    handshake_s: float = 10.0
    """A peer that has not sent preface and SETTINGS after this time is cut off."""
    frame_s: float = 30.0
    """Limit for a frame or header block that has begun; past it the connection is cut off."""
    message_s: float = 30.0
    """Limit for a call's first message and for each that has begun; past it the call is ended."""
    keepalive_s: float = 30.0
    """Silence after which the peer is asked whether it lives."""
    keepalive_timeout_s: float = 10.0


def limits_for(max_body_bytes: int) -> WireLimits:
    """Limits under which bodies of `max_body_bytes` pass both ways, a few at once, without waiting for a window."""
    message = max_body_bytes + MESSAGE_OVERHEAD_BYTES
    usual = WireLimits()
    return WireLimits(
        max_message_bytes=message,
        stream_window=min(2 * message, LARGEST_WINDOW),
        connection_window=min(max(usual.connection_window, 4 * message), LARGEST_WINDOW),
        max_held_bytes=max(usual.max_held_bytes, 8 * message),
        max_unsent_bytes_per_stream=3 * message,
        max_unsent_bytes=max(usual.max_unsent_bytes, 8 * message),
    )


class Allowance:
    """A token bucket for one kind of event.

    Args:
        what: names the flood in the GOAWAY's reason.
        burst: how many may come at once.
        per_second: how many more each second brings.
        now: when it starts, seconds.
    """

    __slots__ = ("_burst", "_left", "_per_second", "_since", "_what")

    def __init__(self, what: str, burst: float, per_second: float, now: float) -> None:
        self._what = what
        self._burst = burst
        self._left = burst
        self._per_second = per_second
        self._since = now

    def take(self, now: float) -> None:
        """One more event at `now` (seconds).

        Raises:
            GoAwayError: ENHANCE_YOUR_CALM, when nothing is left.
        """
        left = self._left - 1
        if left < 0:
            left = min(self._burst, self._left + (now - self._since) * self._per_second) - 1
            self._since = now
            if left < 0:
                raise GoAwayError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")
        self._left = left

    def earn(self, count: float) -> None:
        """Our own sending makes `count` further events legitimate."""
        self._left = min(self._burst, self._left + count)


class Allowances:
    """Remaining allowance of one connection. The limits are far above the need of Envoy and grpc and far below an overload."""

    __slots__ = ("empties", "pings", "resets", "settings", "strangers", "window_updates")

    def __init__(self, now: float) -> None:
        self.resets = Allowance("streams reset before an answer", burst=1000, per_second=200, now=now)
        self.settings = Allowance("SETTINGS frames", burst=32, per_second=2, now=now)
        self.pings = Allowance("PING frames", burst=256, per_second=32, now=now)
        self.empties = Allowance("empty frames", burst=256, per_second=64, now=now)
        self.strangers = Allowance("PRIORITY and unknown frames", burst=1000, per_second=100, now=now)
        self.window_updates = Allowance("WINDOW_UPDATE frames", burst=4000, per_second=1000, now=now)

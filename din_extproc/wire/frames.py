"""HTTP/2's numbers and the frames a server writes (RFC 9113 sections 4, 6 and 7).

Rule: only layout. Nothing here remembers anything or decides anything.
"""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
HEADER = Struct(">IBI")
"""Length and type share the first word: `length << 8 | type`; then flags; then the stream id."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1
SMALLEST_FRAME_LIMIT = 16_384
"""Every peer takes frames of 16 KiB, and no less may be announced."""
LARGEST_FRAME_LIMIT = 2**24 - 1

TABLE_SIZE_ZERO = b"\x20"
"""Opens the first header block we send: our blocks never use HPACK's dynamic table, whatever the peer's settings allow."""

WORD = Struct(">I")
SETTING = Struct(">HI")


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113 section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class GoAwayError(Exception):
    """The peer broke the connection's rules: it gets the code and the reason in a GOAWAY, and then the connection ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame that announces `values`."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Ends one stream, both halves."""
    return HEADER.pack(4 << 8 | RST_STREAM, 0, stream_id) + WORD.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    """Lets the peer send `increment` bytes more; stream 0 is the connection."""
    return HEADER.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id) + WORD.pack(increment)


def goaway(last_stream_id: int, code: ErrorCode, reason: str) -> bytes:
    """Says that no stream above `last_stream_id` was or will be handled, and why."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream_id) + WORD.pack(code) + reason.encode())

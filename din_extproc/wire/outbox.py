"""Outgoing frames of an HTTP/2 connection, in order; DATA only within the peer's windows and the socket's buffer.

Rule: what can't leave yet is counted, and past its bound the stream is given up; nothing waits in memory for a peer that never reads.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, GoAwayError

_FAIR_BYTES = 64 * 1024
"""How much a stream sends before the next waiting one has its turn."""
_PIECE_OVERHEAD = 64
"""Counted for each waiting piece besides its bytes, so that many tiny ones can't hide."""
_BYTES_PER_UPDATE = 1024
"""A peer may well send one WINDOW_UPDATE for each so many bytes."""


class OutboundStream:
    """One stream's state that both directions need. The layer above adds its own."""

    __slots__ = ("begun", "end_block", "expected", "finishing", "half_closed", "id", "queue", "queued", "received", "window")

    def __init__(self, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.window = window
        """Bytes that may be sent now; below 0 after the peer has shrunk its initial window."""
        self.received = 0
        """Bytes taken since the peer was last told that it may send more."""
        self.expected: int | None = None
        """Bytes of the body that the declared content-length still promises."""
        self.half_closed = False
        """The peer has ended its half."""
        self.begun = False
        """The answer's headers were sent."""
        self.finishing = False
        """Nothing more may be said on it: the answer is complete, though perhaps not sent yet, or the stream is gone."""
        self.queue: deque[memoryview] | None = None
        self.queued = 0
        self.end_block: bytes | None = None


S = TypeVar("S", bound=OutboundStream)


class Outbox(Generic[S]):
    """The sending side of one connection.

    Args:
        ended: told when a stream's last frame is in the outbox.
        stream_bytes: how much of one stream may wait.
        all_bytes: how much of all streams may wait.
    """

    def __init__(self, ended: Callable[[S], None], stream_bytes: int, all_bytes: int) -> None:
        self._ended = ended
        self._stream_bytes = stream_bytes
        self._all_bytes = all_bytes
        self._out: list[bytes | memoryview] = []
        self._window = frames.DEFAULT_WINDOW
        self._max_frame = frames.SMALLEST_FRAME_LIMIT
        self._queued = 0
        self._ready: OrderedDict[int, S] = OrderedDict()
        self._writable = True
        self._opening = frames.TABLE_SIZE_ZERO
        self.initial_window = frames.DEFAULT_WINDOW
        self.earned = 0
        """WINDOW_UPDATEs that our own sending has made legitimate since this was last set to 0."""

    @property
    def queued(self) -> int:
        """Bytes of replies that wait for a window or for the socket, with their overhead."""
        return self._queued

    def take(self) -> bytes:
        """Everything that may leave now, in order."""
        out = self._out
        whole = b"".join(out)
        out.clear()
        return whole

    def control(self, whole_frame: bytes) -> None:
        """Send a frame that is not flow-controlled."""
        self._out.append(whole_frame)

    def headers(self, stream: S, block: bytes) -> None:
        """Begin the answer."""
        stream.begun = True
        self._put_block(stream.id, block, frames.END_HEADERS)

    def data(self, stream: S, data: bytes) -> bool:
        """Send a piece of the answer's body. False: too much waits already, and this piece was dropped."""
        length = len(data)
        self.earned += 1
        if stream.queue is None and self._writable and length <= self._max_frame and length <= self._window and length <= stream.window:
            self._window -= length
            stream.window -= length
            self._out.append(frames.HEADER.pack(length << 8, 0, stream.id))
            self._out.append(data)
            return True
        cost = length + _PIECE_OVERHEAD
        if stream.queued + cost > self._stream_bytes or self._queued + cost > self._all_bytes:
            return False
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(memoryview(data))
        stream.queued += cost
        self._queued += cost
        self._wake_stream(stream)
        return True

    def finish(self, stream: S, block: bytes) -> None:
        """Send the last header block, after everything that waits."""
        stream.finishing = True
        stream.end_block = block
        if stream.queue is None:
            self._end_stream(stream)

    def drop(self, stream: S) -> None:
        """Forget what waits: the stream is gone."""
        self._queued -= stream.queued
        stream.queued = 0
        stream.queue = None
        self._ready.pop(stream.id, None)

    def pause(self) -> None:
        """The socket is full: keep DATA back."""
        self._writable = False

    def resume(self) -> None:
        """The socket takes bytes again."""
        self._writable = True
        self._send_queued()

    def widen(self, increment: int) -> bool:
        """The peer opens the connection's window. False: past what is allowed."""
        self._window += increment
        self._send_queued()
        return self._window <= frames.LARGEST_WINDOW

    def widen_stream(self, stream: S, increment: int) -> bool:
        """The peer opens a stream's window. False: past what is allowed."""
        stream.window += increment
        if stream.window > frames.LARGEST_WINDOW:
            return False
        if stream.queue is not None:
            self._wake_stream(stream)
        return True

    def configure(self, payload: bytes, streams: Iterable[S]) -> None:
        """Obey the peer's SETTINGS.

        Raises:
            GoAwayError: a value that is not allowed.
        """
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise GoAwayError(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
                self._resize(value, streams)
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.SMALLEST_FRAME_LIMIT <= value <= frames.LARGEST_FRAME_LIMIT:
                    raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "max frame size out of range")
                self._max_frame = value
            elif key == frames.ENABLE_PUSH and value > 1:
                raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "enable push is neither 0 nor 1")

    def _resize(self, initial_window: int, streams: Iterable[S]) -> None:
        """A new initial window moves the window of every open stream by the difference (RFC 9113 section 6.9.2)."""
        difference = initial_window - self.initial_window
        self.initial_window = initial_window
        for stream in list(streams):
            if not self.widen_stream(stream, difference):
                raise GoAwayError(ErrorCode.FLOW_CONTROL_ERROR, "initial window overflows a stream's window")

    def _put_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if self._opening:
            block, self._opening = self._opening + block, b""
        self._out.append(frames.HEADER.pack(len(block) << 8 | frames.HEADERS, flags, stream_id))
        self._out.append(block)

    def _end_stream(self, stream: S) -> None:
        assert stream.end_block is not None  # noqa: S101 - only called after `finish`
        self._put_block(stream.id, stream.end_block, frames.END_HEADERS | frames.END_STREAM)
        self._ended(stream)

    def _wake_stream(self, stream: S) -> None:
        if stream.window > 0:
            self._ready[stream.id] = stream
            self._send_queued()

    def _send_queued(self) -> None:
        """Send for the streams that have both bytes and a window, in turns, until the connection's window or the socket ends it."""
        ready = self._ready
        while ready and self._window > 0 and self._writable:
            stream_id, stream = ready.popitem(last=False)
            self._send_waiting(stream)
            if stream.queue and stream.window > 0:
                ready[stream_id] = stream
            elif not stream.queue:
                stream.queue = None
                if stream.end_block is not None:
                    self._end_stream(stream)

    def _send_waiting(self, stream: S) -> None:
        queue = stream.queue
        budget = min(_FAIR_BYTES, self._window, stream.window)
        while queue and budget > 0:
            piece = queue[0]
            length = min(len(piece), budget, self._max_frame)
            self._out.append(frames.HEADER.pack(length << 8, 0, stream.id))
            self._out.append(piece[:length])
            spent = length
            if length == len(piece):
                queue.popleft()
                spent += _PIECE_OVERHEAD
            else:
                queue[0] = piece[length:]
            self.earned += length // _BYTES_PER_UPDATE
            budget -= length
            self._window -= length
            stream.window -= length
            stream.queued -= spent
            self._queued -= spent

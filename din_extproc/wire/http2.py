"""The server side of HTTP/2 (RFC 9113) as bytes in, calls on streams, bytes out. No sockets, no clock: time is an argument.

Rule: whatever a peer sends, nothing is raised: a stream ends by RST_STREAM, the connection by GOAWAY, and everything held is bounded.
"""

from typing import Generic, Protocol, TypeVar

from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, GoAwayError
from din_extproc.wire.framing import Framer, without_padding
from din_extproc.wire.header_block import BlockReader, MalformedError, Memo, RequestBlock, check_trailers
from din_extproc.wire.limits import Allowances, WireLimits
from din_extproc.wire.outbox import OutboundStream, Outbox

H_contra = TypeVar("H_contra", contravariant=True)
H = TypeVar("H")
S = TypeVar("S", bound=OutboundStream)

_DRAIN_PING = b"draining"
_ALIVE_PING = b"alive???"
_REMEMBERED_STREAMS = 2048
_PRIORITY_BYTES = 5


class Receiver(Protocol[H_contra, S]):
    """The application above a connection. It may answer, finish and reset streams from inside its methods."""

    def stream(self, stream_id: int, window: int, meaning: H_contra, now: float) -> S:
        """Make the stream that the peer has just opened; `window` is what may be sent on it."""

    def opened(self, stream: S) -> None:
        """The stream exists now, and may be answered."""

    def data(self, stream: S, buffer: bytes, start: int, stop: int) -> None:
        """Take `buffer[start:stop]`, the next piece of the stream's body."""

    def half_closed(self, stream: S) -> None:
        """The peer sends nothing more on this stream."""

    def cut(self, stream: S) -> None:
        """The stream is gone: reset by either side, or lost with its connection."""


class H2Connection(Generic[H, S]):
    """One accepted connection.

    Args:
        receiver: what lies above.
        memo: decoded header blocks, shared by the process.
        limits: what the peer may use.
        now: the time of the accept, seconds; every later `now` is of the same clock.
    """

    def __init__(self, receiver: Receiver[H, S], memo: Memo[H], limits: WireLimits, now: float) -> None:
        self._receiver = receiver
        self._limits = limits
        self._blocks = BlockReader(memo, limits.max_header_bytes)
        self._allow = Allowances(now)
        self.streams: dict[int, S] = {}
        """The open streams by id."""
        self.outbox: Outbox[S] = Outbox(self._on_answered, limits.max_unsent_bytes_per_stream, limits.max_unsent_bytes)
        self._framer = Framer(limits.max_header_bytes)
        self._settled = self._acknowledged = self._draining = False
        self._half_window = limits.connection_window // 2
        self._half_stream_window = limits.stream_window // 2
        self._received = 0
        self._last_id = 0
        self._refuse_above = frames.LARGEST_STREAM_ID
        self._gone: dict[int, bool] = {}
        self._gone_before: dict[int, bool] = {}
        self._since = self._last_receipt = now
        self._last_ping: float | None = None
        self._unfinished, self._unfinished_since = 0, now
        self.fault: GoAwayError | None = None
        self._now = now
        self._announce()

    @property
    def over(self) -> bool:
        """Nothing more will be said: send what is left to send, then close."""
        return self.fault is not None or (self.warned and not self.streams)

    @property
    def warned(self) -> bool:
        """The peer has confirmed that it knows about the drain: no stream that it opens later is served."""
        return self._refuse_above != frames.LARGEST_STREAM_ID

    def _announce(self) -> None:
        limits = self._limits
        self.outbox.control(
            frames.settings(
                {
                    frames.HEADER_TABLE_SIZE: 0,
                    frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window,
                    frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
                }
            )
        )
        self.outbox.control(frames.window_update(0, limits.connection_window - frames.DEFAULT_WINDOW))

    def receive(self, data: bytes, now: float) -> None:
        """Take what the peer sent. Frames that are not whole yet wait for the rest."""
        if self.fault is not None:
            return
        self._now = self._last_receipt = now
        try:
            for kind, flags, stream_id, buffer, start, stop in self._framer.feed(data):
                if kind == frames.DATA and self._settled:
                    self._on_data(stream_id, flags, buffer, start, stop)
                else:
                    self._on_other_frame(kind, flags, stream_id, buffer[start:stop])
        except GoAwayError as fault:
            self._end(fault)

    def _on_data(self, stream_id: int, flags: int, data: bytes, start: int, stop: int) -> None:
        # Credit is given back before either window is used up, so neither can be overrun: what is held is bounded by what is above.
        length = stop - start
        self._received += length
        if self._received > self._half_window:
            self.outbox.control(frames.window_update(0, self._received))
            self._received = 0
        if flags & frames.PADDED:
            start, stop = without_padding(data, start, stop)
        stream = self.streams.get(stream_id)
        if stream is None or stream.half_closed:
            self._on_late_frame(stream_id, "DATA")
            return
        ended = flags & frames.END_STREAM
        if start == stop and not ended:
            self._allow.empties.take(self._now)
        stream.received += length
        if stream.received > self._half_stream_window and not ended:
            self.outbox.control(frames.window_update(stream_id, stream.received))
            stream.received = 0
        if stream.expected is not None:
            stream.expected -= stop - start
            if stream.expected < 0 or (ended and stream.expected):
                self._reset_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
        if ended:
            stream.half_closed = True
        self._receiver.data(stream, data, start, stop)
        if ended:
            self._close_half(stream)

    def _close_half(self, stream: S) -> None:
        if not stream.finishing and self.streams.get(stream.id) is stream:
            self._receiver.half_closed(stream)

    def _on_late_frame(self, stream_id: int, kind: str) -> None:
        """A frame on a stream that takes none (any more)."""
        if self._is_idle(stream_id):
            raise GoAwayError(ErrorCode.PROTOCOL_ERROR, f"{kind} on a stream that was never opened")
        if stream_id > self._refuse_above or self._is_gone_by_us(stream_id):
            return
        self._reset_stream(stream_id, ErrorCode.STREAM_CLOSED)

    def _on_other_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._settled and (kind != frames.SETTINGS or flags & frames.ACK):
            raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        match kind:
            case frames.HEADERS:
                self._on_headers(flags, stream_id, payload)
            case frames.RST_STREAM:
                self._on_rst_stream(stream_id, payload)
            case frames.WINDOW_UPDATE:
                self._on_window_update(stream_id, payload)
            case frames.SETTINGS:
                self._on_settings(flags, stream_id, payload)
            case frames.PING:
                self._on_ping(flags, stream_id, payload)
            case frames.GOAWAY:
                _require(stream_id == 0, "GOAWAY on a stream")
                _require(len(payload) >= 2 * frames.WORD.size, "GOAWAY too short", ErrorCode.FRAME_SIZE_ERROR)
                self._allow.strangers.take(self._now)
            case frames.PRIORITY:
                self._on_priority(stream_id, payload)
            case frames.PUSH_PROMISE:
                raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "a client can't push")
            case _:
                self._allow.strangers.take(self._now)

    def _on_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        _require(stream_id % 2 == 1, "HEADERS on a stream that a client can't open")
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, flags, block)
        elif self._last_id < stream_id <= self._refuse_above:
            self._open(flags, stream_id, block)
        else:
            # Decoded all the same: the peer's HPACK table may depend on it.
            self._blocks.fields(block)
            by_us = self._is_gone_by_us(stream_id)
            if not by_us and stream_id <= self._refuse_above:
                code = ErrorCode.PROTOCOL_ERROR if by_us is None else ErrorCode.STREAM_CLOSED
                raise GoAwayError(code, "HEADERS on a stream that is closed")

    def _open(self, flags: int, stream_id: int, block: bytes) -> None:
        self._last_id = stream_id
        try:
            request: RequestBlock[H] = self._blocks.request(block)
        except MalformedError:
            self._reset_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        ended = bool(flags & frames.END_STREAM)
        if len(self.streams) >= self._limits.max_streams:
            # Before it has seen our SETTINGS, a peer can't know how many streams it may open.
            self._reset_stream(stream_id, ErrorCode.REFUSED_STREAM, blame=self._acknowledged)
            return
        if ended and request.content_length:
            self._reset_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        stream = self._receiver.stream(stream_id, self.outbox.initial_window, request.meaning, self._now)
        stream.expected = request.content_length
        stream.half_closed = ended
        self.streams[stream_id] = stream
        self._receiver.opened(stream)
        if ended:
            self._close_half(stream)

    def _on_trailers(self, stream: S, flags: int, block: bytes) -> None:
        fields = self._blocks.fields(block)
        if stream.half_closed:
            self._reset_stream(stream.id, ErrorCode.STREAM_CLOSED)
            return
        try:
            check_trailers(fields)
        except MalformedError:
            self._reset_stream(stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        if not flags & frames.END_STREAM or stream.expected:
            self._reset_stream(stream.id, ErrorCode.PROTOCOL_ERROR)
            return
        stream.half_closed = True
        self._close_half(stream)

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        _require(len(payload) == frames.WORD.size, "RST_STREAM of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
        stream = self.streams.get(stream_id)
        if stream is None:
            _require(not self._is_idle(stream_id), "RST_STREAM on a stream that was never opened")
            return
        if not stream.begun:
            self._allow.resets.take(self._now)
        self._forget(stream_id, by_us=False)
        self._receiver.cut(stream)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        _require(len(payload) == frames.WORD.size, "WINDOW_UPDATE of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
        if self.outbox.earned:
            self._allow.window_updates.earn(self.outbox.earned)
            self.outbox.earned = 0
        self._allow.window_updates.take(self._now)
        increment = frames.WORD.unpack(payload)[0] & frames.LARGEST_WINDOW
        if stream_id == 0:
            _require(increment != 0, "WINDOW_UPDATE of 0")
            _require(self.outbox.widen(increment), "connection window too large", ErrorCode.FLOW_CONTROL_ERROR)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            _require(not self._is_idle(stream_id), "WINDOW_UPDATE on a stream that was never opened")
        elif increment == 0:
            self._reset_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif not self.outbox.widen_stream(stream, increment):
            self._reset_stream(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        _require(stream_id == 0, "SETTINGS on a stream")
        if flags & frames.ACK:
            _require(not payload, "SETTINGS acknowledgement with a payload", ErrorCode.FRAME_SIZE_ERROR)
            self._allow.settings.take(self._now)
            if not self._acknowledged:
                self._acknowledged = True
                self._blocks.table_size_agreed()
            return
        _require(len(payload) % frames.SETTING.size == 0, "SETTINGS of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
        self._allow.settings.take(self._now)
        self._settled = True
        # First, because the peer counts what a wider window lets out only after this.
        self.outbox.control(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.outbox.configure(payload, self.streams.values())

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        _require(stream_id == 0, "PING on a stream")
        _require(len(payload) == len(_DRAIN_PING), "PING of a wrong size", ErrorCode.FRAME_SIZE_ERROR)
        self._allow.pings.take(self._now)
        if not flags & frames.ACK:
            self.outbox.control(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN_PING and self._draining:
            self._refuse_later()

    def _on_priority(self, stream_id: int, payload: bytes) -> None:
        _require(stream_id != 0, "PRIORITY on stream 0")
        self._allow.strangers.take(self._now)
        if len(payload) != _PRIORITY_BYTES:
            self._reset_stream(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        elif frames.WORD.unpack_from(payload)[0] & frames.LARGEST_STREAM_ID == stream_id:
            self._reset_stream(stream_id, ErrorCode.PROTOCOL_ERROR)

    def finish(self, stream: S, block: bytes) -> None:
        """End the answer by a last header block. A peer that is still sending gets a reset."""
        if not stream.finishing:
            self.outbox.finish(stream, block)

    def reset(self, stream: S, code: ErrorCode) -> None:
        """Give up a stream, both halves."""
        if self.streams.get(stream.id) is stream:
            self._reset_stream(stream.id, code, blame=False)

    def _on_answered(self, stream: S) -> None:
        if not stream.half_closed:
            self.outbox.control(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream.id, by_us=not stream.half_closed)

    def _reset_stream(self, stream_id: int, code: ErrorCode, *, blame: bool = True) -> None:
        """A stream error. `blame`: the peer provoked it, and may do so only so often."""
        self.outbox.control(frames.rst_stream(stream_id, code))
        stream = self.streams.get(stream_id)
        self._forget(stream_id, by_us=True)
        if stream is not None:
            self._receiver.cut(stream)
        if blame:
            self._allow.resets.take(self._now)

    def _forget(self, stream_id: int, *, by_us: bool) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.finishing = True
            if stream.queue is not None:
                self.outbox.drop(stream)
        if len(self._gone) >= _REMEMBERED_STREAMS:
            self._gone_before, self._gone = self._gone, {}
        self._gone[stream_id] = by_us

    def _is_gone_by_us(self, stream_id: int) -> bool | None:
        """Whether a closed stream was cut by us, so that late frames are to be expected. None: no stream that is remembered."""
        return self._gone.get(stream_id, self._gone_before.get(stream_id))

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id % 2 == 0 or self._last_id < stream_id <= self._refuse_above

    def tick(self, now: float) -> None:
        """Let time pass: ask a silent peer whether it lives, and end a connection that never began, drips or no longer answers."""
        if self.fault is not None:
            return
        limits = self._limits
        if not self._settled:
            if now - self._since > limits.handshake_s:
                self._end(GoAwayError(ErrorCode.SETTINGS_TIMEOUT, "no SETTINGS in time"))
        elif self._check_slow_frames(now):
            self._end(GoAwayError(ErrorCode.ENHANCE_YOUR_CALM, "a frame did not arrive in time"))
        elif self._last_ping is None or self._last_ping < self._last_receipt:
            if now - self._last_receipt > limits.keepalive_s:
                self._last_ping = now
                self.outbox.control(frames.frame(frames.PING, 0, 0, _ALIVE_PING))
        elif now - self._last_ping > limits.keepalive_timeout_s:
            self._end(GoAwayError(ErrorCode.NO_ERROR, "keepalive timeout"))

    def _check_slow_frames(self, now: float) -> bool:
        """Whether a frame or header block has been on its way for too long, however much of it still comes."""
        unfinished = self._framer.unfinished
        if not unfinished or unfinished != self._unfinished:
            self._unfinished, self._unfinished_since = unfinished, now
        return now - self._unfinished_since > self._limits.frame_s

    def drain(self) -> None:
        """Ask the peer to open no more streams. Those it opens before it can know are still served; `over` tells when all are done."""
        if self.fault is None and not self._draining:
            self._draining = True
            self.outbox.control(frames.goaway(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR, "draining"))
            self.outbox.control(frames.frame(frames.PING, 0, 0, _DRAIN_PING))

    def on_connection_lost(self) -> None:
        """The transport is gone: cut every stream."""
        if self.fault is None:
            self.fault = GoAwayError(ErrorCode.NO_ERROR, "connection lost")
        self._cut_all()

    def _refuse_later(self) -> None:
        if not self.warned:
            self._refuse_above = self._last_id
            self.outbox.control(frames.goaway(self._last_id, ErrorCode.NO_ERROR, "draining"))

    def _end(self, fault: GoAwayError) -> None:
        self.fault = fault
        self.outbox.control(frames.goaway(self._last_id, fault.code, fault.reason))
        self._framer = Framer(self._limits.max_header_bytes)
        self._cut_all()

    def _cut_all(self) -> None:
        for stream in list(self.streams.values()):
            self._forget(stream.id, by_us=True)
            self._receiver.cut(stream)


def _require(condition: bool, reason: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:  # noqa: FBT001 - an assertion about the peer's frames
    if not condition:
        raise GoAwayError(code, reason)

"""The server side of gRPC over HTTP/2: calls, whole messages, statuses, deadlines. No sockets, no clock, no threads.

Rule: a call that breaks gRPC's rules or a bound ends with a status of its own; the connection and its other calls go on.
"""

from collections.abc import Callable
from struct import Struct as Layout
from typing import Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from din_extproc.wire.frames import ErrorCode
from din_extproc.wire.header_block import Fields, Memo, literal, response_block
from din_extproc.wire.http2 import H2Connection
from din_extproc.wire.limits import WireLimits
from din_extproc.wire.outbox import OutboundStream

OK = 0
DEADLINE_EXCEEDED = 4
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12
INTERNAL = 13

_PREFIX = Layout(">BI")
"""Compressed flag and length, before every message."""
_PREFIX_BYTES = 5
_CONTENT_TYPE = (b"content-type", b"application/grpc")
_OPENING = response_block((_CONTENT_TYPE,))
_TRAILERS_OK = literal(b"grpc-status", b"0")
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
_LOOK_S = 5.0
_MAX_DETAIL = 1024
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"
"""Characters that `grpc-message` carries unescaped besides letters and digits: printable ASCII without the percent sign."""


class CallHead(Struct, frozen=True, gc=False):
    """The decoded header block of a call. `refusal`: the block that rejects it if it is no valid gRPC request."""

    path: str
    authorization: str = ""
    """As sent, "" without."""
    timeout_s: float | None = None
    refusal: bytes | None = None


class GrpcCall(OutboundStream):
    """One call. The layer above adds its own."""

    __slots__ = ("deadline", "head", "need", "partial", "partials")

    def __init__(self, stream_id: int, window: int, head: CallHead, deadline: float | None) -> None:
        super().__init__(stream_id, window)
        self.head = head
        self.deadline = deadline
        self.partial: bytearray | None = None
        """The beginning of a message, with its prefix."""
        self.need = 0
        """How long `partial` must grow before it is looked at again."""
        self.partials = 0
        """How many there were."""


C = TypeVar("C", bound=GrpcCall)


class Opened(Struct, Generic[C], frozen=True, gc=False):
    """A client calls `call.head.path`."""

    call: C


class Message(Struct, Generic[C], frozen=True, gc=False):
    """One whole message of a call."""

    call: C
    data: bytes


class HalfClosed(Struct, Generic[C], frozen=True, gc=False):
    """The client sends no more messages and waits for the end."""

    call: C


class Cut(Struct, Generic[C], frozen=True, gc=False):
    """The call is gone: cancelled, out of time, refused, or lost with its connection. Nothing can be sent on it."""

    call: C


Event = Opened[C] | Message[C] | HalfClosed[C] | Cut[C]


def read_head(fields: Fields) -> CallHead:
    """Read the gRPC meaning of a request's fields."""
    by_name = dict(fields)
    path = by_name[":path"]
    if by_name[":method"] != "POST":
        return CallHead(path, refusal=response_block((), status=405))
    content_type = by_name.get("content-type", "")
    if not content_type.startswith("application/grpc") or content_type[16:17] not in {"", "+", ";"}:
        return CallHead(path, refusal=response_block((), status=415))
    timeout = by_name.get("grpc-timeout")
    authorization = by_name.get("authorization", "")
    if timeout is None:
        return CallHead(path, authorization)
    digits, unit = timeout[:-1], timeout[-1:]
    if unit not in _SECONDS or not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_TIMEOUT_DIGITS:
        return CallHead(path, refusal=_make_status_block(INTERNAL, "malformed grpc-timeout", begun=False))
    return CallHead(path, authorization, int(digits) * _SECONDS[unit])


class GrpcConnection(Generic[C]):
    """One accepted connection, as calls.

    Args:
        memo: `Memo(read_head)`, shared by the process.
        limits: what the peer may use.
        now: seconds, of the clock that every later `now` is of.
        new_call: makes a call of its stream id, window, head and deadline.
    """

    def __init__(
        self, memo: Memo[CallHead], limits: WireLimits, now: float, new_call: Callable[[int, int, CallHead, float | None], C]
    ) -> None:
        self._new_call = new_call
        self._limits = limits
        self._max_message_bytes = limits.max_message_bytes
        self._connection: H2Connection[CallHead, C] = H2Connection(self, memo, limits, now)
        self._outbox = self._connection.outbox
        self._events: list[Event[C]] = []
        self._held = 0
        self._awaited: dict[int, tuple[int, float]] = {}
        """Calls whose message is not whole: which it is, and when it was first seen so."""
        self._looked = now
        self.next_deadline: float | None = None
        """When `expire` has something to do, at the earliest."""
        self.receive: Callable[[bytes, float], None] = self._connection.receive
        """Take the peer's bytes, at a time in seconds. Never raises."""
        self.drain = self._connection.drain
        """Ask the peer to open no more calls."""
        self.lost = self._connection.on_connection_lost
        """The transport is gone: every call is cut."""
        self.pause = self._outbox.pause
        """The transport is full."""
        self.resume = self._outbox.resume
        """The transport takes bytes again."""
        self.take = self._outbox.take
        """Every byte that may leave now."""

    @property
    def calls(self) -> int:
        """How many are open."""
        return len(self._connection.streams)

    @property
    def busy(self) -> bool:
        """A call is open that has said something, as far as the last look tells."""
        return len(self._connection.streams) > len(self._awaited)

    @property
    def over(self) -> bool:
        """Send what is left to send, then close."""
        return self._connection.over

    @property
    def warned(self) -> bool:
        """The client has confirmed that it opens no more calls, or is gone."""
        return self._connection.warned or self._connection.fault is not None

    @property
    def fault(self) -> str:
        """Why the connection ends, "" when it does not end by a fault."""
        fault = self._connection.fault
        return "" if fault is None else f"{fault.code.name}: {fault.reason}"

    @property
    def held(self) -> int:
        """Bytes of unfinished messages and of replies that can't leave yet."""
        return self._held + self._outbox.queued

    def take_events(self) -> list[Event[C]]:
        """Return the events since the last call, in order."""
        events = self._events
        if events:
            self._events = []
        return events

    # -- answers -------------------------------------------------------------------------------------------------------------------

    def send(self, call: C, message: bytes) -> None:
        """Send one message. A call whose client lets too much wait is cut; on a call that is over this does nothing."""
        if call.finishing:
            return
        if not call.begun:
            self._outbox.headers(call, _OPENING)
        if not self._outbox.data(call, _PREFIX.pack(0, len(message)) + message):
            self._connection.reset(call, ErrorCode.ENHANCE_YOUR_CALM)

    def finish(self, call: C, status: int = OK, detail: str = "") -> None:
        """End a call with a gRPC status; the client's part of it that is still to come is not wanted. Does nothing when it is over."""
        if not call.finishing:
            self._release(call)
            self._connection.finish(
                call, _TRAILERS_OK if call.begun and status == OK else _make_status_block(status, detail, begun=call.begun)
            )

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        soonest: float | None = None
        for call in list(self._connection.streams.values()):
            if call.deadline is None:
                continue
            if call.deadline <= now and call.queue is not None:
                self._connection.reset(call, ErrorCode.CANCEL)
            elif call.deadline <= now:
                self._refuse(call, DEADLINE_EXCEEDED, "deadline exceeded")
            elif soonest is None or call.deadline < soonest:
                soonest = call.deadline
        self.next_deadline = soonest

    def tick(self, now: float) -> None:
        """Let time pass, at least once a second: keepalive, and an end to calls that say nothing or drip."""
        self._connection.tick(now)
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._check_limits(now)

    def _check_limits(self, now: float) -> None:
        before, self._awaited = self._awaited, {}
        for call in list(self._connection.streams.values()):
            if (call.need and call.partial is None) or call.half_closed or call.finishing:
                continue
            which, since = before.get(call.id, (call.partials, now))
            if which != call.partials:
                since = now
            if now - since > self._limits.message_s:
                self._refuse(call, DEADLINE_EXCEEDED, "no whole message in time")
            else:
                self._awaited[call.id] = (call.partials, since)

    # -- what the connection below tells (http2.Receiver) --------------------------------------------------------------------------

    def stream(self, stream_id: int, window: int, meaning: CallHead, now: float) -> C:
        """A stream was opened."""
        deadline: float | None = None
        if meaning.timeout_s is not None:
            deadline = now + meaning.timeout_s
            if self.next_deadline is None or deadline < self.next_deadline:
                self.next_deadline = deadline
        return self._new_call(stream_id, window, meaning, deadline)

    def opened(self, stream: C) -> None:
        """The stream may be answered."""
        if stream.head.refusal is None:
            self._events.append(Opened(stream))
        else:
            self._connection.finish(stream, stream.head.refusal)

    def data(self, stream: C, buffer: bytes, start: int, stop: int) -> None:
        """A piece of the call's messages."""
        if stream.finishing or start == stop:
            return
        partial = stream.partial
        if partial is None:
            done = self._split_messages(stream, buffer, start, stop)
            if done < stop and not stream.finishing:
                stream.partial = bytearray(memoryview(buffer)[done:stop])
                stream.partials += 1
                self._hold(stream, stop - done)
            return
        partial += memoryview(buffer)[start:stop]
        self._hold(stream, stop - start)
        length = len(partial)
        if length < stream.need or stream.finishing:
            return
        with memoryview(partial) as view:
            done = self._split_messages(stream, view, 0, length)
            if done and not stream.finishing:
                self._held -= done
                stream.partial = bytearray(view[done:]) if done < length else None
                stream.partials += 1

    def half_closed(self, stream: C) -> None:
        """The client's half is complete."""
        if stream.partial is None:
            self._events.append(HalfClosed(stream))
        else:
            self._refuse(stream, INTERNAL, "the last message is incomplete")

    def cut(self, stream: C) -> None:
        """The stream is gone."""
        self._release(stream)
        self._events.append(Cut(stream))

    def _split_messages(self, call: C, buffer: bytes | memoryview, start: int, stop: int) -> int:
        """Tell every whole message. Returns where the first unfinished one starts, and notes how long it must grow."""
        need = _PREFIX_BYTES
        unpack = _PREFIX.unpack_from
        while stop - start >= _PREFIX_BYTES:
            compressed, length = unpack(buffer, start)
            if compressed:
                self._refuse(call, UNIMPLEMENTED, "compressed messages are not supported")
                break
            if length > self._max_message_bytes:
                self._refuse(call, RESOURCE_EXHAUSTED, f"message larger than {self._max_message_bytes} bytes")
                break
            need = _PREFIX_BYTES + length
            if stop - start < need:
                break
            self._events.append(Message(call, bytes(buffer[start + _PREFIX_BYTES : start + need])))
            start += need
            need = _PREFIX_BYTES
        call.need = need
        return start

    def _hold(self, call: C, count: int) -> None:
        self._held += count
        if self._held > self._limits.max_held_bytes:
            self._refuse(call, RESOURCE_EXHAUSTED, "too many unfinished messages")

    def _release(self, call: GrpcCall) -> None:
        if call.partial is not None:
            self._held -= len(call.partial)
            call.partial = None

    def _refuse(self, call: C, status: int, detail: str) -> None:
        self.finish(call, status, detail)
        self._events.append(Cut(call))


def _make_status_block(status: int, detail: str, *, begun: bool) -> bytes:
    """The block that ends a call: trailers, or headers and trailers in one when nothing was sent before."""
    fields = [(b"grpc-status", b"%d" % status)]
    if detail:
        fields.append((b"grpc-message", quote(detail[:_MAX_DETAIL], safe=_PLAIN).encode()))
    return b"".join(literal(*field) for field in fields) if begun else response_block((_CONTENT_TYPE, *fields))

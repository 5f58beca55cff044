"""A client that sends raw HTTP/2 frames to a `GrpcConnection`, valid or not, and reads the reply.

Rule: it checks nothing and keeps no state but the bytes; tests make the assertions.
"""

from typing import NamedTuple

import hpack

from din_extproc.wire import frames
from din_extproc.wire.frames import frame
from din_extproc.wire.grpc import Event, GrpcCall, GrpcConnection, read_head
from din_extproc.wire.header_block import Memo
from din_extproc.wire.limits import WireLimits

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "din"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
HELLO = frames.PREFACE + frames.settings({}) + frame(frames.SETTINGS, frames.ACK, 0)


class Seen(NamedTuple):
    """One frame that the server wrote."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of a RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == frames.GOAWAY else self.payload, "big")

    @property
    def reason(self) -> str:
        """A GOAWAY's reason."""
        return self.payload[8:].decode()


def connection(*, limits: WireLimits | None = None, now: float = 0.0) -> GrpcConnection:
    """Make a server connection."""
    return GrpcConnection(Memo(read_head), limits or WireLimits(), now, GrpcCall)


def block(fields=REQUEST, **changed: str) -> bytes:
    """Encode a header block of literals only. `changed` replaces fields: `path="/x"` or `grpc_timeout="1S"`."""
    named = dict(fields)
    for name, value in changed.items():
        key = name.replace("_", "-")
        named[f":{key}" if f":{key}" in named else key] = value
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(list(named.items()), huffman=False)


def opening(stream_id: int, *, flags: int = frames.END_HEADERS, fields=REQUEST, **changed: str) -> bytes:
    """Encode HEADERS that open a call."""
    return frame(frames.HEADERS, flags, stream_id, block(fields, **changed))


def message(data: bytes, *, compressed: int = 0) -> bytes:
    """Encode a gRPC message with its prefix."""
    return bytes((compressed,)) + len(data).to_bytes(4, "big") + data


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    """Encode DATA in as many frames as necessary."""
    pieces = [payload[at : at + 16384] for at in range(0, len(payload), 16384)] or [b""]
    last = len(pieces) - 1
    return b"".join(frame(frames.DATA, int(end and at == last), stream_id, piece) for at, piece in enumerate(pieces))


def split(written: bytes) -> list[Seen]:
    """Split the server's bytes into frames."""
    seen = []
    while written:
        word, flags, stream_id = frames.HEADER.unpack_from(written)
        seen.append(Seen(word & 0xFF, flags, stream_id, written[9 : 9 + (word >> 8)]))
        written = written[9 + (word >> 8) :]
    return seen


class Peer:
    """A client with its server: sends frames and keeps all that it receives."""

    def __init__(self, *, limits: WireLimits | None = None, hello: bytes = HELLO, now: float = 0.0) -> None:
        self.grpc = connection(limits=limits, now=now)
        self.now = now
        self.received: list[Seen] = []
        self.events: list[Event] = []
        self._decoder = hpack.Decoder()
        self.say(hello)

    def say(self, *what: bytes) -> list[Seen]:
        """Send bytes, and return the frames of the reply."""
        self.grpc.receive(b"".join(what), self.now)
        return self.take_frames()

    def take_frames(self) -> list[Seen]:
        """Return the frames that the server has written since."""
        self.events += self.grpc.take_events()
        new = split(self.grpc.take())
        self.received += new
        return new

    def headers(self, seen: Seen) -> dict[str, str]:
        """Return the fields of a HEADERS frame in order."""
        return dict(self._decoder.decode(seen.payload))

    def fields(self, stream_id: int) -> list[dict[str, str]]:
        """Decode all header blocks of a stream. Call it once only."""
        return [self.headers(seen) for seen in self.received if seen.kind == frames.HEADERS and seen.stream_id == stream_id]

    def event_names(self, stream_id: int) -> list[str]:
        """Return the names of the events of a call."""
        return [type(event).__name__ for event in self.events if event.call.id == stream_id]

    def call(self, stream_id: int):
        """Return the server's call object."""
        return next(event.call for event in self.events if event.call.id == stream_id)

    def goodbye(self) -> Seen | None:
        """Return the GOAWAY frame, if there was one."""
        return next((seen for seen in self.received if seen.kind == frames.GOAWAY), None)

    def resets(self) -> list[tuple[int, int]]:
        """Return (stream, code) of every RST_STREAM."""
        return [(seen.stream_id, seen.code) for seen in self.received if seen.kind == frames.RST_STREAM]

"""A peer's bytes cut into whole HTTP/2 frames, header blocks put together. Padding of DATA stays: it counts for flow control.

Rule: the same bytes give the same frames wherever the network has cut them, and never more than one unfinished frame or block is held.
"""

from collections.abc import Iterator
from typing import NamedTuple

from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, GoAwayError

_MAX_CONTINUATIONS = 64
_PRIORITY_BYTES = 5

Frame = tuple[int, int, int, bytes, int, int]
"""Type, flags, stream id, and where the payload lies: buffer, start, stop. HEADERS comes once per block, without padding and priority."""


class _Block(NamedTuple):
    """A header block that goes on in CONTINUATION frames."""

    stream_id: int
    flags: int
    pieces: list[bytes]


class Framer:
    """The receiving side's first step.

    Args:
        max_block_bytes: a longer header block ends the connection.
    """

    __slots__ = ("_begun", "_block", "_block_bytes", "_blocks", "_max_block_bytes", "_need", "_rest", "_rests")

    def __init__(self, max_block_bytes: int) -> None:
        self._rest = bytearray()
        self._need = len(frames.PREFACE)
        self._block: _Block | None = None
        self._block_bytes = 0
        self._max_block_bytes = max_block_bytes
        self._begun = False
        self._blocks = self._rests = 0

    @property
    def unfinished(self) -> int:
        """Names the frame or header block that waits for its rest, as long as it is the same one. 0: none does."""
        if self._block is not None:
            return -self._blocks
        return self._rests if self._rest else 0

    @property
    def held(self) -> int:
        """Bytes that wait for the rest of their frame or block."""
        return len(self._rest) + self._block_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that `data` completes.

        Raises:
            GoAwayError: what came is no HTTP/2, or breaks its limits.
        """
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._need:
                return
            data = bytes(rest)
            rest.clear()
        pos = 0 if self._begun else self._greet(data)
        end = len(data)
        unpack = frames.HEADER.unpack_from
        last_start = end - frames.HEADER_BYTES if self._begun else -1
        self._need = frames.HEADER_BYTES
        while pos <= last_start:
            word, flags, stream_id = unpack(data, pos)
            start = pos + frames.HEADER_BYTES
            stop = start + (word >> 8)
            if stop - start > frames.SMALLEST_FRAME_LIMIT:
                raise GoAwayError(ErrorCode.FRAME_SIZE_ERROR, "frame larger than announced")
            if stop > end:
                self._need = stop - pos
                break
            pos = stop
            kind = word & 0xFF
            if self._block is None and kind != frames.HEADERS and kind != frames.CONTINUATION:  # noqa: PLR1714 - twice as fast as a set
                yield kind, flags, stream_id & frames.LARGEST_STREAM_ID, data, start, stop
            else:
                block = self._on_block_part(kind, flags, stream_id & frames.LARGEST_STREAM_ID, data[start:stop])
                if block is not None:
                    yield block
        if pos < end:
            self._rests += 1
            rest += memoryview(data)[pos:]

    def _greet(self, data: bytes) -> int:
        """Check the preface, as far as it is there. Returns where the first frame starts."""
        preface = frames.PREFACE
        if data[: len(preface)] != preface[: len(data)]:
            raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        if len(data) < len(preface):
            return 0
        self._begun = True
        return len(preface)

    def _on_block_part(self, kind: int, flags: int, stream_id: int, piece: bytes) -> Frame | None:
        """A piece of a header block. Returns the block when it is whole."""
        block = self._block
        if block is None:
            if kind != frames.HEADERS:
                raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            piece = _block_piece(flags, stream_id, piece)
            if flags & frames.END_HEADERS:
                return frames.HEADERS, flags, stream_id, piece, 0, len(piece)
            self._block, self._block_bytes = _Block(stream_id, flags, [piece]), len(piece)
            self._blocks += 1
            return None
        if kind != frames.CONTINUATION or stream_id != block.stream_id:
            raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        self._block_bytes += len(piece)
        if self._block_bytes > self._max_block_bytes or len(block.pieces) > _MAX_CONTINUATIONS:
            raise GoAwayError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        block.pieces.append(piece)
        if not flags & frames.END_HEADERS:
            return None
        self._block, self._block_bytes = None, 0
        whole = b"".join(block.pieces)
        return frames.HEADERS, block.flags, stream_id, whole, 0, len(whole)


def without_padding(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Where the content of a padded frame lies.

    Raises:
        GoAwayError: padding longer than its frame.
    """
    if start == stop or data[start] >= stop - start:
        raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return start + 1, stop - data[start]


def _block_piece(flags: int, stream_id: int, payload: bytes) -> bytes:
    """A HEADERS frame's piece of the block: behind padding length and priority, before the padding."""
    start, stop = 0, len(payload)
    if flags & frames.PADDED:
        start, stop = without_padding(payload, start, stop)
    if flags & frames.WITH_PRIORITY:
        if stop - start < _PRIORITY_BYTES:
            raise GoAwayError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short")
        if frames.WORD.unpack_from(payload, start)[0] & frames.LARGEST_STREAM_ID == stream_id:
            raise GoAwayError(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
        start += _PRIORITY_BYTES
    return payload[start:stop]

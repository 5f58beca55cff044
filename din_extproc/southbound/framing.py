"""Splits a byte stream into messages: NDJSON lines and SSE events.

Rule: whatever way the bytes are cut, the same messages come out; what is held back is bounded, and every byte is looked at a fixed number
of times.
"""

MAX_MESSAGE = 1 << 20
"""The largest message in bytes, framing included."""
OVERLONG = b"\x00"
"""Returned instead of a longer message. No dialect accepts it, so translators end the stream with an error."""
_LINE_COST = 32
"""Cost of one more line of an event in addition to its bytes, so that many short lines are bounded, too."""


class _Held:
    """The pieces of one incomplete message."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, data: bytes, cost: int = 0) -> None:
        """Add a piece; drop everything once the message is too long."""
        self._size += len(data) + cost
        if self._size <= MAX_MESSAGE:
            self._pieces.append(data)
        elif self._pieces:
            self._pieces.clear()

    def take(self, between: bytes = b"") -> bytes:
        """Return the whole message and clear the buffer."""
        whole = OVERLONG if self._size > MAX_MESSAGE else between.join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return whole

    def __bool__(self) -> bool:
        return self._size > 0


class _RawLines:
    """A splitter for lines that end with LF. Empty lines are kept."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = _Held()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without LF."""
        first, *lines = data.split(b"\n")
        self._held.add(first)
        if not lines:
            return []
        whole = self._held.take()
        self._held.add(lines.pop())
        return [whole, *(line if len(line) <= MAX_MESSAGE else OVERLONG for line in lines)]

    def end(self) -> list[bytes]:
        """Return an unterminated last line."""
        return [self._held.take()] if self._held else []


class LineSplitter:
    """An NDJSON splitter."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = _RawLines()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without line ends; empty lines are omitted."""
        return [line for line in map(bytes.rstrip, self._lines.feed(data)) if line]

    def end(self) -> list[bytes]:
        """Return an unterminated last line."""
        return [line for line in map(bytes.rstrip, self._lines.end()) if line]


class EventSplitter:
    """An SSE splitter that returns the data of each event, its lines joined. A line ends with LF or CRLF; no engine uses a bare CR."""

    __slots__ = ("_data", "_lines")

    def __init__(self) -> None:
        self._lines = _RawLines()
        self._data = _Held()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that these bytes complete."""
        found = []
        for line in self._lines.feed(data):
            if line.rstrip(b"\r"):
                self._take(line)
            elif self._data:
                found.append(self._data.take(b"\n"))
        return found

    def end(self) -> list[bytes]:
        """Return a last event without a terminating blank line, which some engines omit."""
        for line in self._lines.end():
            self._take(line)
        return [self._data.take(b"\n")] if self._data else []

    def _take(self, line: bytes) -> None:
        if line is OVERLONG:
            self._data.add(line, MAX_MESSAGE)
        elif line.startswith(b"data:"):
            line = line.removesuffix(b"\r")
            self._data.add(line[6:] if line.startswith(b"data: ") else line[5:], _LINE_COST)

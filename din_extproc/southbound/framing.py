"""Where one message of a stream ends and the next begins: lines of NDJSON, and events of SSE.

Rule: whatever way the bytes are cut, the same messages come out; what is held back is bounded, and every byte is looked at a fixed number
of times.
"""

MAX_MESSAGE = 1 << 20
"""Bytes of one message, framing included."""
OVERLONG = b"\x00"
"""Given out in place of a longer message. It is no message of any dialect, so translators end the stream with an error."""
_LINE_COST = 32
"""What holding one more line of an event costs besides its bytes: many short lines are no way around the bound."""


class _Held:
    """The pieces of one message that is not complete."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, data: bytes, cost: int = 0) -> None:
        """Hold the next piece, or nothing any more when the message has grown too long."""
        self._size += len(data) + cost
        if self._size <= MAX_MESSAGE:
            self._pieces.append(data)
        elif self._pieces:
            self._pieces.clear()

    def take(self, between: bytes = b"") -> bytes:
        """The whole message; none is held afterwards."""
        whole = OVERLONG if self._size > MAX_MESSAGE else between.join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return whole

    def __bool__(self) -> bool:
        return self._size > 0


class _RawLines:
    """Lines that end with LF. Empty ones are kept."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = _Held()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without LF."""
        first, *lines = data.split(b"\n")
        self._held.add(first)
        if not lines:
            return []
        whole = self._held.take()
        self._held.add(lines.pop())
        return [whole, *(line if len(line) <= MAX_MESSAGE else OVERLONG for line in lines)]

    def end(self) -> list[bytes]:
        """What stood there without an end of line."""
        return [self._held.take()] if self._held else []


class Lines:
    """NDJSON."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = _RawLines()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends; empty ones are left out."""
        return [line for line in map(bytes.rstrip, self._lines.feed(data)) if line]

    def end(self) -> list[bytes]:
        """What stood there without an end of line."""
        return [line for line in map(bytes.rstrip, self._lines.end()) if line]


class Events:
    """SSE: the data of each event, its lines joined. A line ends with LF or CRLF; no engine ends one with CR alone."""

    __slots__ = ("_data", "_lines")

    def __init__(self) -> None:
        self._lines = _RawLines()
        self._data = _Held()

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete."""
        found = []
        for line in self._lines.feed(data):
            if line.rstrip(b"\r"):
                self._take(line)
            elif self._data:
                found.append(self._data.take(b"\n"))
        return found

    def end(self) -> list[bytes]:
        """An event that no blank line closed: engines forget it."""
        for line in self._lines.end():
            self._take(line)
        return [self._data.take(b"\n")] if self._data else []

    def _take(self, line: bytes) -> None:
        if line is OVERLONG:
            self._data.add(line, MAX_MESSAGE)
        elif line.startswith(b"data:"):
            line = line.removesuffix(b"\r")
            self._data.add(line[6:] if line.startswith(b"data: ") else line[5:], _LINE_COST)

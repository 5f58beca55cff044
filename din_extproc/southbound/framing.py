"""Where one message of a stream ends and the next begins: lines of NDJSON, and events of SSE.

Rule: whatever way the bytes are cut, the same messages come out; what is held back is bounded.
"""

MAX_MESSAGE = 4 << 20
"""Bytes of one message. Of a longer one only the last bytes are given out, which are no message of any dialect."""


class Lines:
    """NDJSON."""

    __slots__ = ("_held", "_size")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends; empty ones are left out."""
        if b"\n" not in data:
            self._hold(data)
            return []
        first, *lines = data.split(b"\n")
        self._hold(first)
        whole = self._taken()
        self._hold(lines.pop())
        return [line for line in (whole, *map(bytes.rstrip, lines)) if line]

    def end(self) -> list[bytes]:
        """What stood there without an end of line."""
        whole = self._taken()
        return [whole] if whole else []

    def _hold(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_MESSAGE:
            self._held.clear()
        elif data:
            self._held.append(data)

    def _taken(self) -> bytes:
        whole = b"".join(self._held).rstrip()
        self._held.clear()
        self._size = 0
        return whole


class Events:
    """SSE: the data of each event, its lines joined."""

    __slots__ = ("_data", "_lines")

    def __init__(self) -> None:
        self._lines = _EventLines()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete."""
        found = []
        for line in self._lines.feed(data):
            if line:
                self._take(line)
            elif self._data:
                found.append(self._event())
        return found

    def end(self) -> list[bytes]:
        """An event that no blank line closed: engines forget it."""
        for line in self._lines.end():
            self._take(line)
        return [self._event()] if self._data else []

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])

    def _event(self) -> bytes:
        whole = b"\n".join(self._data)
        self._data.clear()
        return whole


class _EventLines:
    """Lines with their emptiness kept: a blank one closes an event. A line ends with LF or CRLF; no engine ends one with CR alone."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        first, *rest = data.split(b"\n")
        self._held += first
        if not rest:
            if len(self._held) > MAX_MESSAGE:
                self._held = b""
            return []
        lines = [self._held, *rest[:-1]]
        self._held = rest[-1]
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]

    def end(self) -> list[bytes]:
        held, self._held = self._held, b""
        return [held.rstrip(b"\r")] if held else []

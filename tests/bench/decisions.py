"""A minimal ext_proc client: it requests decisions at random times over one connection and times each.

Rule: one JSON line in, one out. A wait is from the moment a request's head and body were written to the moment its verdict was read.
Run: python -m tests.bench.decisions SOCKET
"""

import contextlib
import json
import random
import select
import socket
import sys
import time

from din_extproc.wire import frames
from din_extproc.wire.frames import frame
from tests.bench.contenders import chat_body
from tests.bench.field import BODY_BYTES
from tests.support.frame_peer import data, message, opening
from tests.support.peer import PROCESS
from tests.support.peer import message as build_message
from tests.support.stack import key_of

_WINDOW = frames.LARGEST_WINDOW
_REPLIES = 2
"""To the head at once, to the body with the verdict."""
_GRACE_S = 10.0
_READ_BYTES = 1 << 18
_RENEW_BYTES = 1 << 24
"""Of the bytes that were read, until the server gets a window update."""


class _Connection:
    """One HTTP/2 connection; a stream per decision, ended as soon as it is there."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.setblocking(False)
        head = {":method": "POST", ":path": "/v1/chat/completions", ":authority": "bench", "authorization": f"Bearer {key_of('acme')}"}
        head |= {"content-type": "application/json", "content-length": str(BODY_BYTES), "x-request-id": "0123456789abcdef"}
        self._head = message(build_message("request_headers", head))
        self._body = message(build_message("request_body", body=chat_body(BODY_BYTES), end=True))
        self._next = 1
        self._asked: dict[int, list[float]] = {}
        """By stream: when it was asked, and how many replies have come."""
        self._rest = b""
        self._unsaid_bytes = 0
        hello = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: _WINDOW}) + frame(frames.SETTINGS, frames.ACK, 0)
        self._send(hello + frame(frames.WINDOW_UPDATE, 0, 0, frames.WORD.pack(_WINDOW - frames.DEFAULT_WINDOW)))

    def run(self, rate: float, seconds: float, seed: int) -> list[float]:
        """The waits, in seconds. The same seed asks at the same moments.

        Raises:
            TimeoutError: a decision did not come.
        """
        moments, waits = random.Random(seed), list[float]()
        now = time.perf_counter()
        ends, due = now + seconds, now + moments.expovariate(rate)
        while now < ends or self._asked:
            if now > ends + _GRACE_S:
                raise TimeoutError(f"{len(self._asked)} decisions did not come")
            if due <= now < ends:
                self._ask(now)
                due += moments.expovariate(rate)
            elif select.select([self._socket], [], [], max(0.0, due - now) if now < ends else _GRACE_S)[0]:
                self._read(waits)
            now = time.perf_counter()
        return waits

    def _ask(self, now: float) -> None:
        stream = self._next
        self._next += 2
        self._asked[stream] = [now, 0]
        self._send(opening(stream, path=PROCESS) + data(stream, self._head) + data(stream, self._body))

    def _read(self, waits: list[float]) -> None:
        received = self._rest + self._socket.recv(_READ_BYTES)
        if received == self._rest:
            raise ConnectionError("the sidecar closed the connection")
        now, at, answer = time.perf_counter(), 0, b""
        while at + 9 <= len(received):
            word, flags, stream = frames.HEADER.unpack_from(received, at)
            end = at + 9 + (word >> 8)
            if end > len(received):
                break
            answer += self._on_frame(word & 0xFF, flags, stream, received[at + 9 : end], now, waits)
            at = end
        self._rest = received[at:]
        if self._unsaid_bytes > _RENEW_BYTES:
            answer += frame(frames.WINDOW_UPDATE, 0, 0, frames.WORD.pack(self._unsaid_bytes))
            self._unsaid_bytes = 0
        if answer:
            self._send(answer)

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes, now: float, waits: list[float]) -> bytes:
        """One frame; the reply to it."""
        if kind == frames.PING and not flags & frames.ACK:
            return frame(frames.PING, frames.ACK, 0, payload)
        if kind in {frames.GOAWAY, frames.RST_STREAM}:
            raise ConnectionError(f"the sidecar gave up: {payload!r}")
        if kind != frames.DATA or stream not in self._asked:
            return b""
        self._unsaid_bytes += len(payload)
        asked = self._asked[stream]
        asked[1] += 1
        if asked[1] < _REPLIES:
            return b""
        del self._asked[stream]
        waits.append(now - asked[0])
        return frame(frames.DATA, frames.END_STREAM, stream)

    def _send(self, what: bytes) -> None:
        while what:
            try:
                what = what[self._socket.send(what) :]
            except BlockingIOError:
                select.select([], [self._socket], [])


def _serve() -> None:
    connection = _Connection(sys.argv[1])
    print("LISTENING", flush=True)
    for line in sys.stdin:
        print(json.dumps(connection.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()

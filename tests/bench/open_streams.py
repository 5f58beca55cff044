"""Memory of the sidecar per open exchange, each decided and admitted."""

import asyncio
import contextlib
import time
from typing import Self

import uvloop

from din_extproc.wire import frames
from din_extproc.wire.frames import frame
from tests.bench.contenders import chat_body, configuration
from tests.bench.field import BODY_BYTES, Field, Figures
from tests.bench.harness import memory_bytes, pin
from tests.support.frame_peer import data, message, opening
from tests.support.peer import PROCESS
from tests.support.peer import message as build_message
from tests.support.stack import Stack, key_of

_WARM = 200
_AT_ONCE = 200
_WINDOW = frames.LARGEST_WINDOW


def open_streams(field: Field) -> Figures:
    """Bytes of each open exchange, among a thousand and among many."""
    many = field.effort.many_streams
    stack = Stack(configuration(field.node_ports))
    try:
        stack.redis.start()
        stack.start_sidecar()
        assert stack.sidecar is not None
        pin(stack.sidecar.pid, "server")
        return uvloop.run(_measure(stack, sorted({min(1_000, many), many})))
    finally:
        stack.stop()


async def _measure(stack: Stack, counts: list[int]) -> Figures:
    assert stack.sidecar is not None
    pid = stack.sidecar.pid
    async with _Client(f"{stack.folder}/ext_proc.sock") as client:
        await client.open_more(_WARM)
        await _opened(stack, _WARM)
    await _opened(stack, 0)
    before = memory_bytes(pid)
    each: dict[int, float] = {}
    async with _Client(f"{stack.folder}/ext_proc.sock") as client:
        opened = 0
        for count in counts:
            while opened < count:
                step = min(_AT_ONCE, count - opened)
                await client.open_more(step)
                opened += step
                await _opened(stack, opened)
            each[count] = (memory_bytes(pid) - before) / count
    return {
        "sidecar_bytes_per_open_stream": each[counts[-1]],
        "sidecar_idle_bytes": float(before),
        **{f"sidecar_bytes_per_open_stream_of_{count}": found for count, found in each.items()},
    }


async def _opened(stack: Stack, count: int) -> None:
    deadline = time.monotonic() + 30
    while (found := (await asyncio.to_thread(stack.status))["exchanges"]["open"]) != count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{found} instead of {count} exchanges are open")
        await asyncio.sleep(0.01)


class _Client:
    """One connection that opens exchanges and never ends them. An async context manager."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._next = 1
        head = {":method": "POST", ":path": "/v1/chat/completions", ":authority": "bench", "authorization": f"Bearer {key_of('acme')}"}
        head |= {"content-type": "application/json", "content-length": str(BODY_BYTES), "x-request-id": "0123456789abcdef"}
        self._head = message(build_message("request_headers", head))
        self._body = message(build_message("request_body", body=chat_body(BODY_BYTES), end=True))

    async def open_more(self, count: int) -> None:
        """Open so many more, and say head and body of each."""
        for at in range(self._next, self._next + 2 * count, 2):
            self._writer.write(opening(at, path=PROCESS) + data(at, self._head) + data(at, self._body))
        self._next += 2 * count
        await self._writer.drain()

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        hello = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: _WINDOW}) + frame(frames.SETTINGS, frames.ACK, 0)
        self._writer.write(hello + frame(frames.WINDOW_UPDATE, 0, 0, frames.WORD.pack(_WINDOW - frames.DEFAULT_WINDOW)))
        self._reading = asyncio.ensure_future(_read(reader))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


async def _read(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass

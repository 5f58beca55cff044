"""HTTP clients that can stop, go silent or hang up at any point of a request: the same methods for HTTP/1.1 and HTTP/2.

Rule: one connection, one request after the other; an answer that is cut off raises `Broken`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset

from tests.support.wired import MIB, PATH, closed, reset

_READ_BYTES = 65_536


class Broken(Exception):  # noqa: N818 - the name says what happened
    """The answer was cut off."""


class Client:
    """The shared part of both protocols: the connection and the ways to leave it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=MIB))

    async def ask(self, method: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Run one complete exchange."""
        await self.head(method, len(body) if method == "POST" else None, **headers)
        if body:
            await self.piece(body, last=True)
        return await self.status(), await self.body()

    async def reset(self) -> None:
        reset(self.writer)

    async def half_close(self) -> None:
        self.writer.write_eof()

    async def close(self) -> None:
        await closed(self.writer)


@asynccontextmanager
async def connected(protocol: type[Client], port: int, count: int) -> AsyncIterator[list[Any]]:
    """Open `count` clients and close them at the end."""
    clients = [await protocol.connect(port) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


class Http1(Client):
    """HTTP/1.1."""

    _length = 0

    async def half_a_head(self) -> None:
        self.writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-".encode())

    async def head(self, method: str, length: int | None, **headers: str) -> None:
        lines = [f"{method} {PATH} HTTP/1.1", "host: x", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        if length is not None:
            lines.append(f"content-length: {length}")
        self.writer.write("\r\n".join([*lines, "\r\n"]).encode())

    async def piece(self, data: bytes, *, last: bool) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken from error
        _, found, length = head.partition(b"\r\ncontent-length: ")
        self._length = int(length.split(b"\r\n")[0]) if found else -1
        return int(head[9:12])

    async def body(self) -> bytes:
        try:
            return await (self.reader.readexactly(self._length) if self._length >= 0 else self._chunks())
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken from error

    async def _chunks(self) -> bytes:
        whole = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            whole += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return whole


class Http2(Client):
    """HTTP/2 with prior knowledge."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._id = 0
        self._status: int | None = None
        self._data = b""
        self._ended = False

    async def half_a_head(self) -> None:
        self._begin("POST", 1, {})
        self.writer.write(self._h2.data_to_send()[:-5])

    async def head(self, method: str, length: int | None, **headers: str) -> None:
        self._begin(method, length, headers)
        self._flush()

    async def piece(self, data: bytes, *, last: bool) -> None:
        view = memoryview(data)
        while view:
            room = min(self._h2.local_flow_control_window(self._id), self._h2.max_outbound_frame_size, len(view))
            if room:
                self._h2.send_data(self._id, view[:room].tobytes(), end_stream=last and room == len(view))
                view = view[room:]
            self._flush()
            if not room:
                await self._receive()
        await self.writer.drain()

    async def status(self) -> int:
        while self._status is None:
            await self._receive()
        return self._status

    async def body(self) -> bytes:
        while not self._ended:
            await self._receive()
        return self._data

    async def reset_stream(self) -> None:
        """Reset the stream with CANCEL. Written by hand, because `h2` resets no stream that has ended."""
        self.writer.write(b"\0\0\4\3\0" + self._id.to_bytes(4, "big") + b"\0\0\0\x08")

    async def end_stream(self) -> None:
        """End the stream early, whatever length the head has announced."""
        self.writer.write(b"\0\0\0\0\1" + self._id.to_bytes(4, "big"))  # an empty DATA frame: `h2` would not break the promise

    def _begin(self, method: str, length: int | None, headers: dict[str, str]) -> None:
        self._id, self._status, self._data, self._ended = self._h2.get_next_available_stream_id(), None, b"", False
        fields = [(":method", method), (":scheme", "http"), (":authority", "x"), (":path", PATH)]
        fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
        if length is not None:
            fields.append(("content-length", str(length)))
        self._h2.send_headers(self._id, fields, end_stream=not length)

    def _flush(self) -> None:
        self.writer.write(self._h2.data_to_send())

    async def _receive(self) -> None:
        try:
            data = await self.reader.read(_READ_BYTES)
        except OSError as error:
            raise Broken from error
        if not data:
            raise Broken
        for event in self._h2.receive_data(data):
            match event:
                case ResponseReceived(stream_id=self._id):
                    self._status = int(dict(event.headers)[":status"])
                case DataReceived():
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    self._data += event.data if event.stream_id == self._id else b""
                case StreamEnded(stream_id=self._id):
                    self._ended = True
                case StreamReset(stream_id=self._id) | ConnectionTerminated():
                    self._flush()
                    raise Broken
        self._flush()

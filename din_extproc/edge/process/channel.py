"""Message channel between two processes of one sidecar over a socket pair.

Invariant: a message is MessagePack with a length prefix; the death of the peer ends the messages without an exception.
"""

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
_LONGEST = 64 << 20
Message = TypeVar("Message")


class MessageChannel(Generic[Message]):
    """One end of a channel.

    Args:
        reader: Reader of the socket.
        writer: Writer of the socket.
        expected: Type of received messages.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: type[Message]) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(expected)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, end: socket.socket, expected: type[Message]) -> "MessageChannel[Message]":
        """Create a channel that owns this end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end), expected)

    def send(self, message: object) -> None:
        """Queue a message. Ignored if the peer is gone."""
        if not self._writer.is_closing():
            packed = self._encoder.encode(message)
            self._writer.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)

    async def receive(self) -> Message | None:
        """Return the next message; None if the peer is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > _LONGEST:
                return None
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()

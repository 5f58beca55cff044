"""Whole messages between two processes of one sidecar, over a socket pair that the parent made.

Rule: a message is MessagePack behind its length; the other end's death is an end of messages, never an exception.
"""

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
_LONGEST = 64 << 20
Message = TypeVar("Message")


class MessageChannel(Generic[Message]):
    """One end.

    Args:
        reader: Of the socket.
        writer: Of the socket.
        expected: The type of what comes in.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: type[Message]) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(expected)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, end: socket.socket, expected: type[Message]) -> "MessageChannel[Message]":
        """Use this end of a pair, which is the channel's from now on."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end), expected)

    def send(self, message: object) -> None:
        """Queue a message. Nothing happens when the other end is gone."""
        if not self._writer.is_closing():
            packed = self._encoder.encode(message)
            self._writer.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)

    async def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > _LONGEST:
                return None
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def close(self) -> None:
        """Say no more."""
        self._writer.close()

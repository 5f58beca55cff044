"""A channel of Redis, listened to for as long as the process lives.

Rule: what was said while nobody listened is lost, so `began` is called whenever listening begins anew: whoever cares asks again.
The log hears of it when listening ends and when it begins again, not of attempts in between.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import hiredis

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.connection import pack

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 1.0
_SILENCE_S: Final = 2.0
"""After so much silence Redis is asked whether it is still there; after twice as much it is not."""
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 1.6
_CHUNK: Final = 1 << 16


class ChannelSubscription:
    """Listens to one channel.

    Args:
        locate: Where Redis is; asked before every attempt to connect.
        channel: Its name.
        heard: Takes every message.
        began: Called when listening has begun, each time.
    """

    def __init__(
        self, locate: Callable[[], Awaitable[Address]], channel: str, heard: Callable[[bytes], None], began: Callable[[], None]
    ) -> None:
        self._locate = locate
        self._channel = channel
        self._heard = heard
        self._began = began
        self._pause_s = _FIRST_PAUSE_S
        self._away = False
        """Listening has ended, or never began."""

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            try:
                await self._listen()
            except (OSError, LimitsUnavailable, hiredis.HiredisError) as error:
                if not self._away:
                    _log.warning("redis: not listening to %s: %s", self._channel, str(error) or type(error).__name__)
                self._away = True
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - processes should not come back in step
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _listen(self) -> None:
        address, reader, writer = await self._connect()
        try:
            if address.password:
                writer.write(pack(("AUTH", *filter(None, (address.username, address.password)))))
            writer.write(pack(("SUBSCRIBE", self._channel)))
            await self._hear(reader, writer)
        finally:
            writer.close()

    async def _connect(self) -> tuple[Address, asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(_CONNECT_S):
                address = await self._locate()
                if address.path:
                    return address, *await asyncio.open_unix_connection(address.path, ssl=address.tls)
                return address, *await asyncio.open_connection(address.host, address.port, ssl=address.tls)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {_CONNECT_S:g} s") from error

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what is said until the other side goes or falls silent.

        Raises:
            OSError: it did.
        """
        parser = hiredis.Reader()
        asked = False
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    data = await reader.read(_CHUNK)
            except TimeoutError as error:
                if asked:
                    raise TimeoutError(f"no answer for {2 * _SILENCE_S:g} s") from error
                asked = True
                writer.write(pack(("PING",)))
                continue
            if not data:
                raise ConnectionResetError("Redis closed the connection")
            asked = False
            parser.feed(data)
            while (reply := parser.gets()) is not False:
                self._take(reply)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            raise ConnectionRefusedError(str(reply))
        if isinstance(reply, list) and reply[0] == b"message":
            self._heard(reply[2])
        elif isinstance(reply, list) and reply[0] == b"subscribe":
            if self._away:
                _log.warning("redis: listening to %s again", self._channel)
            self._away, self._pause_s = False, _FIRST_PAUSE_S
            self._began()

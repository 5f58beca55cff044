"""Subscription to a Redis channel that reconnects for the life of the process.

Invariant: messages published during an interruption are lost; `began` is called after every (re)subscription so that the receiver can
reload. The log shows the interruption and the recovery, not the attempts in between.
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
"""Silence after which a PING is sent; after twice as long the connection is closed."""
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 1.6
_CHUNK: Final = 1 << 16


class ChannelSubscription:
    """Subscription to one channel.

    Args:
        locate: Returns the address of Redis; called before every attempt to connect.
        channel: Name of the channel.
        on_message: Called with every message.
        on_subscribed: Called after every subscription.
    """

    def __init__(
        self, locate: Callable[[], Awaitable[Address]], channel: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[], None]
    ) -> None:
        self._locate = locate
        self._channel = channel
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._pause_s = _FIRST_PAUSE_S
        self._away = False
        """The subscription is interrupted or not yet established."""

    async def run(self) -> None:
        """Receive messages until cancelled."""
        while True:
            try:
                await self._listen()
            except (OSError, LimitsUnavailable, hiredis.HiredisError) as error:
                if not self._away:
                    _log.warning("redis: subscription to %s interrupted: %s", self._channel, str(error) or type(error).__name__)
                self._away = True
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter against simultaneous reconnects
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _listen(self) -> None:
        address, reader, writer = await self._connect()
        try:
            if address.password:
                writer.write(pack(("AUTH", *filter(None, (address.username, address.password)))))
            writer.write(pack(("SUBSCRIBE", self._channel)))
            await self._read_messages(reader, writer)
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

    async def _read_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive messages until the connection is closed or silent.

        Raises:
            OSError: The connection is closed or silent.
        """
        parser = hiredis.Reader()
        pinged = False
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    data = await reader.read(_CHUNK)
            except TimeoutError as error:
                if pinged:
                    raise TimeoutError(f"no answer for {2 * _SILENCE_S:g} s") from error
                pinged = True
                writer.write(pack(("PING",)))
                continue
            if not data:
                raise ConnectionResetError("Redis closed the connection")
            pinged = False
            parser.feed(data)
            while (reply := parser.gets()) is not False:
                self._on_reply(reply)

    def _on_reply(self, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            raise ConnectionRefusedError(str(reply))
        if isinstance(reply, list) and reply[0] == b"message":
            self._on_message(reply[2])
        elif isinstance(reply, list) and reply[0] == b"subscribe":
            if self._away:
                _log.warning("redis: subscription to %s restored", self._channel)
            self._away, self._pause_s = False, _FIRST_PAUSE_S
            self._on_subscribed()

"""One connection to Redis: what is asked for in one turn of the loop leaves in one write, answers come back in that order.

Rule: the oldest unanswered command decides: once it is overdue the connection is given up, for every later answer would be misread.
"""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import hiredis
from msgspec import Struct

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.turn import AT_ONCE

_GRACE_S: Final = 0.001
"""A late loop first reads what has arrived meanwhile, before an answer is called missing."""

Argument = bytes | str | int


class LuaScript:
    """A Lua script by its source, and how to call it: number of keys, keys, arguments follow."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._sha = bulk(hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())

    def evalsha(self, count: int, tail: bytes) -> bytes:
        """The call by digest; `tail` holds `count` bulk strings."""
        return b"*%d\r\n$7\r\nEVALSHA\r\n%b%b" % (count + 2, self._sha, tail)

    def eval(self, count: int, tail: bytes) -> bytes:
        """The call that brings the source along."""
        return b"*%d\r\n$4\r\nEVAL\r\n%b%b" % (count + 2, bulk(self.source), tail)


def bulk(text: bytes) -> bytes:
    """One argument as Redis reads it."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def bulks(*arguments: Argument) -> tuple[int, bytes]:
    """How many arguments, and all of them as Redis reads them."""
    packed = pack(arguments)
    return len(arguments), packed[packed.index(b"\n") + 1 :]


def pack(command: tuple[Argument, ...]) -> bytes:
    """A whole command as Redis reads it."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub asks for a tuple of one
    return packed


class CommandUnanswered(LimitsUnavailable):
    """The command was sent and no answer came: it may have been counted, or not."""


class RedisError(LimitsUnavailable):
    """Redis answered with an error."""


_INNER_ERROR: Final = re.compile(r"ERR Error running script .*?: -([A-Z]+ .*)", re.DOTALL)


def command_error(text: str) -> str:
    """The error of the command that failed. Before version 7, Redis wraps that of a command in a script in an error of its own."""
    inner = _INNER_ERROR.fullmatch(text)
    return text if inner is None else inner[1]


class CommandRetry(Struct, frozen=True, gc=False):
    """How to ask again: the call of a script or a plain command, and how often it was asked already."""

    script: "LuaScript | None"
    count: int
    tail: bytes
    """Of a script: `count` bulk strings. Of a plain command: all of it."""
    attempt: int = 0

    def again(self) -> "CommandRetry":
        """Asked once more."""
        return CommandRetry(self.script, self.count, self.tail, self.attempt + 1)


Sent = tuple[asyncio.Future[Any], float, CommandRetry | None]
"""Who waits, until when (the loop's clock), and how to ask again."""


class RedisConnection(asyncio.Protocol):
    """Commands out, answers in.

    Args:
        loop: the loop it lives on.
        timeout_s: how long the oldest command may stay unanswered.
        on_error: told of an error reply, and who waits for it; it settles the future.
        on_lost: told once, with the reason, when the connection is of no use any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        on_error: Callable[["RedisConnection", str, Sent], None],
        on_lost: Callable[["RedisConnection", str], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._pending: deque[Sent] = deque()
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._overdue: Sent | None = None
        self._reading = False
        """Answers that have come wait for their turn."""
        self._lost = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def newest(self) -> asyncio.Future[Any] | None:
        """Whoever waits for the last answer on its way."""
        return self._pending[-1][0] if self._pending else None

    def send(self, command: bytes, future: asyncio.Future[Any], deadline: float, run: CommandRetry | None = None) -> None:
        """Ask; the answer settles the future, be it that nobody waits for it any more."""
        if not self._out:
            self._loop.call_soon(self._flush)
            if self._timer is None or deadline < self._due:
                self._look_again(deadline)
        self._out.append(command)
        self._pending.append((future, deadline, run))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = transport  # type: ignore[assignment]  # a stream's transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of answers, cut anywhere."""
        self._reader.feed(data)
        if not self._reading:
            self._read()

    def _read(self) -> None:
        """Take the next few answers."""
        self._reading = False
        reader, pending = self._reader, self._pending
        try:
            for _ in range(AT_ONCE):
                if (reply := reader.gets()) is False:
                    return
                sent = pending.popleft()
                if isinstance(reply, hiredis.ReplyError):
                    if not sent[0].done():
                        self._on_error(self, command_error(str(reply)), sent)
                elif not sent[0].done():
                    sent[0].set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self.drop(f"Redis speaks out of turn: {error}")
        if not self._lost:
            self._reading = True
            self._loop.call_soon(self._read)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the other side has gone."""
        while self._reading:
            self._read()
        self.drop(str(exc) if exc else "Redis closed the connection")

    def drop(self, reason: str) -> None:
        """Give up: everybody who waits learns it now."""
        if self._lost:
            return
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(self, reason)
        waiting, self._pending = self._pending, deque()
        for future, _, _ in waiting:
            if not future.done():
                future.set_exception(CommandUnanswered(reason))

    def _flush(self) -> None:
        if self._transport is not None and not self._lost:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _check(self) -> None:
        """Is the oldest command overdue? Looked at when it could be, not per command."""
        self._timer = None
        if not self._pending:
            return
        oldest = self._pending[0]
        if self._loop.time() < oldest[1]:
            self._look_again(oldest[1])
        elif self._reading or self._overdue is not oldest:
            self._overdue = oldest
            self._look_again(self._loop.time() + _GRACE_S)
        else:
            self.drop(f"no answer within {self._timeout_s * 1000:.0f} ms")

    def _look_again(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when, self._check)

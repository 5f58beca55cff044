"""One pipelined connection to Redis. Commands of one event loop iteration leave in one write; replies arrive in the same order.

Invariant: the connection is closed when the oldest unanswered command is overdue, because later replies could not be matched.
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
from din_extproc.edge.background import STEPS_PER_ITERATION

_GRACE_S: Final = 0.001
"""Extra time after a deadline, so that a delayed event loop reads received replies before it reports a timeout."""

Argument = bytes | str | int


class LuaScript:
    """A Lua script and its calls. A call is followed by the number of keys, the keys and the arguments."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._sha = bulk(hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())

    def evalsha(self, count: int, tail: bytes) -> bytes:
        """Return the EVALSHA call; `tail` holds `count` bulk strings."""
        return b"*%d\r\n$7\r\nEVALSHA\r\n%b%b" % (count + 2, self._sha, tail)

    def eval(self, count: int, tail: bytes) -> bytes:
        """Return the EVAL call, which includes the source."""
        return b"*%d\r\n$4\r\nEVAL\r\n%b%b" % (count + 2, bulk(self.source), tail)


def bulk(text: bytes) -> bytes:
    """Encode one argument as a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


def bulks(*arguments: Argument) -> tuple[int, bytes]:
    """Return the number of arguments and their encoding as bulk strings."""
    packed = pack(arguments)
    return len(arguments), packed[packed.index(b"\n") + 1 :]


def pack(command: tuple[Argument, ...]) -> bytes:
    """Encode a command."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub asks for a tuple of one
    return packed


class CommandUnanswered(LimitsUnavailable):
    """The command was sent and no reply came: Redis may have executed it or not."""


class RedisError(LimitsUnavailable):
    """Redis replied with an error."""


_INNER_ERROR: Final = re.compile(r"ERR Error running script .*?: -([A-Z]+ .*)", re.DOTALL)


def command_error(text: str) -> str:
    """Return the error of the failed command. Redis before version 7 wraps the error of a command that fails inside a script."""
    inner = _INNER_ERROR.fullmatch(text)
    return text if inner is None else inner[1]


class CommandRetry(Struct, frozen=True, gc=False):
    """A script call or plain command to send again, with the number of attempts so far."""

    script: "LuaScript | None"
    count: int
    tail: bytes
    """The `count` bulk strings of a script call, or a whole plain command."""
    attempt: int = 0

    def again(self) -> "CommandRetry":
        """Return the retry with one more attempt counted."""
        return CommandRetry(self.script, self.count, self.tail, self.attempt + 1)


Sent = tuple[asyncio.Future[Any], float, CommandRetry | None]
"""The caller's future, the deadline by the clock of the event loop, and the retry."""


class RedisConnection(asyncio.Protocol):
    """Protocol of one connection: writes commands and matches replies.

    Args:
        loop: The event loop of the connection.
        timeout_s: Maximum time without a reply for the oldest command.
        on_error: Called with an error reply and its pending command; completes the future.
        on_lost: Called once with the reason when the connection is closed.
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
        """A callback that reads received replies is scheduled."""
        self._lost = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def newest(self) -> asyncio.Future[Any] | None:
        """Return the future of the newest unanswered command."""
        return self._pending[-1][0] if self._pending else None

    def send(self, command: bytes, future: asyncio.Future[Any], deadline: float, run: CommandRetry | None = None) -> None:
        """Send a command; the reply completes the future unless it was cancelled."""
        if not self._out:
            self._loop.call_soon(self._flush)
            if self._timer is None or deadline < self._due:
                self._schedule_check(deadline)
        self._out.append(command)
        self._pending.append((future, deadline, run))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the established connection (asyncio callback)."""
        self._transport = transport  # type: ignore[assignment]  # a stream's transport

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, which end at any position (asyncio callback)."""
        self._reader.feed(data)
        if not self._reading:
            self._read()

    def _read(self) -> None:
        """Process the next few replies."""
        self._reading = False
        reader, pending = self._reader, self._pending
        try:
            for _ in range(STEPS_PER_ITERATION):
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
        """Handle a connection that Redis closed (asyncio callback)."""
        while self._reading:
            self._read()
        self.drop(str(exc) if exc else "Redis closed the connection")

    def drop(self, reason: str) -> None:
        """Close the connection and fail all unanswered commands."""
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
        """Close the connection if the oldest command is overdue. Runs at its deadline, not per command."""
        self._timer = None
        if not self._pending:
            return
        oldest = self._pending[0]
        if self._loop.time() < oldest[1]:
            self._schedule_check(oldest[1])
        elif self._reading or self._overdue is not oldest:
            self._overdue = oldest
            self._schedule_check(self._loop.time() + _GRACE_S)
        else:
            self.drop(f"no answer within {self._timeout_s * 1000:.0f} ms")

    def _schedule_check(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when, self._check)

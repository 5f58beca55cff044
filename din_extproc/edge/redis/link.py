"""Persistent client of one Redis server: sends commands and returns plain futures.

Invariant: a call never waits for a connection. Without one it fails at once; the link reconnects by itself.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.connection import Argument, CommandRetry, LuaScript, RedisConnection, RedisError, Sent, bulks, pack

_log = logging.getLogger(__name__)

_CONNECT_S: Final = 1.0
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.8
_ATTEMPTS: Final = 3
_MOVED_ON: Final = ("READONLY", "MASTERDOWN", "LOADING", "NOREPLICAS")
"""Errors of a server that is not the current master or not ready; the link locates the server again."""

_NOT_ALLOWED: Final = re.compile(r"(?:NOPERM|ERR).*\b(?:script|evalsha)\b", re.IGNORECASE | re.DOTALL)
"""Errors for users without permission, and of proxies without the command."""
_NO_WORK: Final = LuaScript(b"return 1")

Locate = Callable[[], Awaitable[Address]]
Redirect = Callable[[str, asyncio.Future[Any], float, CommandRetry], bool]
"""Called with an error, the future, the deadline and the retry. Return True if it takes over the future."""


class LinkState(Struct, frozen=True):
    """State of a link for the status page and health checks."""

    up: bool
    since: float
    """Seconds since the epoch."""
    reason: str
    """Reason why it is down; "" when it is up."""
    address: str
    warning: str = ""
    """Problem that does not prevent operation."""


class Link:
    """A persistent connection. Call `start` before use and `close` at the end.

    Args:
        locate: Returns the address of the server; called before every attempt to connect.
        scripts: Scripts to load on every new connection.
        timeout_ms: Time without a reply after which the connection is closed.
        max_in_flight: Maximum unanswered commands; further commands fail.
        redirect: Handler of MOVED and ASK errors of a cluster.
        on_change: Called after every change of state.
    """

    def __init__(
        self,
        locate: Locate,
        scripts: tuple[LuaScript, ...],
        *,
        timeout_ms: int = 50,
        max_in_flight: int = 4096,
        redirect: Redirect | None = None,
        on_change: Callable[[LinkState], None] | None = None,
    ) -> None:
        self._locate = locate
        self._scripts = scripts
        self._timeout_s = timeout_ms / 1000
        self._max_in_flight = max_in_flight
        self._redirect = redirect
        self._on_change = on_change
        self._loop: asyncio.AbstractEventLoop
        self._connection: RedisConnection | None = None
        self._reloading: set[LuaScript] = set()
        self._sends_source = False
        """Send scripts with EVAL: the server allows neither SCRIPT LOAD nor EVALSHA."""
        self._at = "redis"
        """Address of the last attempt, for logs."""
        self._lost = asyncio.Event()
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.state = LinkState(up=False, since=time.time(), reason="not connected yet", address="")

    async def start(self, wait_s: float = _CONNECT_S) -> bool:
        """Connect and stay connected. Return whether it is connected within `wait_s` seconds; attempts continue."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._stay_connected(), name="redis link")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._up.wait()
        return self.state.up

    async def close(self) -> None:
        """Wait for outstanding replies for at most one timeout, then disconnect."""
        connection, self._connection = self._connection, None
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if connection is not None:
            if connection.newest is not None:
                await asyncio.wait([connection.newest], timeout=self._timeout_s)
            connection.drop("the link is closed")

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply.

        Raises:
            LimitsUnavailable: There is no connection, or too many commands are unanswered. The future raises it as well:
                `CommandUnanswered` when the connection broke, `RedisError` when Redis replied with an error.
        """
        connection = self._get_usable()
        future: asyncio.Future[Any] = self._loop.create_future()
        packed = pack(command)
        connection.send(packed, future, self._loop.time() + self._timeout_s, CommandRetry(None, 0, packed))
        return future

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script with `count` bulk strings: number of keys, keys, arguments. Raise as `call` does.

        A script that the server no longer knows is loaded again, transparently to the caller.
        """
        connection = self._get_usable()
        future: asyncio.Future[Any] = self._loop.create_future()
        deadline = self._loop.time() + self._timeout_s
        call = script.eval if self._sends_source else script.evalsha
        connection.send(call(count, tail), future, deadline, CommandRetry(script, count, tail))
        return future

    def resume(self, future: asyncio.Future[Any], deadline: float, run: CommandRetry, *, asking: bool) -> None:
        """Send a command that another server of the cluster redirected here.

        Raises:
            LimitsUnavailable: As in `call`.
        """
        connection = self._get_usable()
        if asking:
            connection.send(pack(("ASKING",)), self._watch_nothing(), deadline)
        self._send_again(connection, future, deadline, run)

    def _get_usable(self) -> RedisConnection:
        connection = self._connection
        if connection is None:
            raise LimitsUnavailable(self.state.reason)
        if len(connection) >= self._max_in_flight:
            raise LimitsUnavailable(f"{self._max_in_flight} commands are unanswered")
        return connection

    def _watch_nothing(self) -> asyncio.Future[Any]:
        """Return a future whose exception may stay unretrieved."""
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _on_error_reply(self, connection: RedisConnection, error: str, sent: Sent) -> None:
        future, deadline, run = sent
        kind = error.partition(" ")[0]
        if run is not None and run.attempt < _ATTEMPTS:
            if kind == "NOSCRIPT" and run.script is not None:
                self._reload(connection, future, deadline, run.again(), run.script)
                return
            if run.script is not None and not run.attempt and _NOT_ALLOWED.match(error):
                if not self._sends_source:
                    self._send_source(error)
                self._send_again(connection, future, deadline, run.again())
                return
            if self._redirect is not None and self._redirect(error, future, deadline, run.again()):
                return
        future.set_exception(RedisError(error))
        if kind in _MOVED_ON:
            connection.drop(f"Redis answered {error}")

    def _reload(
        self, connection: RedisConnection, future: asyncio.Future[Any], deadline: float, run: CommandRetry, script: LuaScript
    ) -> None:
        """Load the script once for all calls that need it, then retry them; if it is lost again, send its source."""
        if run.attempt > 1:
            connection.send(script.eval(run.count, run.tail), future, deadline, run)
            return
        if script not in self._reloading:
            self._reloading.add(script)
            loaded = self._watch_nothing()
            loaded.add_done_callback(lambda _: self._reloading.discard(script))
            connection.send(pack(("SCRIPT", "LOAD", script.source)), loaded, deadline)
        self._send_again(connection, future, deadline, run)

    def _send_again(self, connection: RedisConnection, future: asyncio.Future[Any], deadline: float, run: CommandRetry) -> None:
        if run.script is None:
            connection.send(run.tail, future, deadline, run)
        else:
            call = run.script.eval if self._sends_source else run.script.evalsha
            connection.send(call(run.count, run.tail), future, deadline, run)

    def _send_source(self, error: str) -> None:
        """Send the source with every script call until the next connection."""
        self._sends_source = True
        warning = f"scripts are sent whole with every call (EVAL), because this user may not use SCRIPT LOAD and EVALSHA: {error}"
        _log.warning("redis %s: %s", self._at, warning)
        self.state = replace(self.state, warning=warning)

    async def _stay_connected(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._lost.clear()
            began = self._loop.time()
            try:
                await self._connect()
            except TimeoutError:
                self._on_down(f"no connection to {self._at} within {_CONNECT_S:.0f} s")
            except OSError as error:
                self._on_down(f"no connection to {self._at}: {error}")
            except LimitsUnavailable as error:
                self._on_down(str(error))
            else:
                await self._lost.wait()
            if self._loop.time() - began > 2 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter against simultaneous reconnects
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        """Connect, authenticate and load the scripts; the link is up after the last reply."""
        async with asyncio.timeout(_CONNECT_S):
            address = await self._locate()
            self._at = str(address)

            def protocol() -> RedisConnection:
                return RedisConnection(self._loop, self._timeout_s, self._on_error_reply, self._on_disconnected)

            if address.path:
                _, connection = await self._loop.create_unix_connection(protocol, address.path, ssl=address.tls)
            else:
                _, connection = await self._loop.create_connection(protocol, address.host, address.port, ssl=address.tls)
            try:
                await self._greet(connection, address)
            except BaseException:
                connection.drop("the greeting failed")
                raise
        self._connection = connection
        self._set_state(LinkState(up=True, since=time.time(), reason="", address=str(address), warning=self.state.warning))

    async def _greet(self, connection: RedisConnection, address: Address) -> None:
        commands: list[tuple[Argument, ...]] = []
        if address.password:
            commands.append(("AUTH", address.username, address.password) if address.username else ("AUTH", address.password))
        if address.db:
            commands.append(("SELECT", address.db))
        commands.append(("PING",))
        await self._check_server(connection, *map(pack, commands))
        self._sends_source, self.state = False, replace(self.state, warning="")
        try:
            await self._check_server(connection, *(pack((b"SCRIPT", b"LOAD", script.source)) for script in self._scripts))
        except RedisError as error:
            if not _NOT_ALLOWED.match(str(error)):
                raise
            await self._check_server(connection, _NO_WORK.eval(*bulks(0)))
            self._send_source(str(error))

    async def _check_server(self, connection: RedisConnection, *commands: bytes) -> None:
        """Send the commands and wait for all replies.

        Raises:
            RedisError: A command failed.
        """
        answers: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in commands]
        deadline = self._loop.time() + _CONNECT_S
        for command, answer in zip(commands, answers, strict=True):
            connection.send(command, answer, deadline)
        for answered in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answered, BaseException):
                raise answered

    def _on_disconnected(self, connection: RedisConnection, reason: str) -> None:
        if self._connection is connection:
            self._connection = None
            self._on_down(reason)
        self._lost.set()

    def _on_down(self, reason: str) -> None:
        never_up = not self.state.address
        if self.state.up or (never_up and reason != self.state.reason):
            self._set_state(LinkState(up=False, since=time.time(), reason=reason, address=self.state.address))

    def _set_state(self, state: LinkState) -> None:
        level = logging.WARNING if self.state.address else logging.INFO  # the caller of `start` logs the first state
        self.state = state
        if state.up:
            self._up.set()
            _log.log(level, "redis %s: connected", state.address)
        else:
            self._up.clear()
            _log.log(level, "redis %s: disconnected: %s", state.address or "at start", state.reason)
        if self._on_change is not None:
            self._on_change(state)

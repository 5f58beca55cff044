"""One standing link to one Redis: commands of the hot path out, plain futures back.

Rule: a caller never waits for a connection. While there is none, every call fails at once; the link comes back by itself.
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
"""Errors of a server that is not, or not yet, the one to ask: the link looks for it again."""

_NOT_ALLOWED: Final = re.compile(r"(?:NOPERM|ERR).*\b(?:script|evalsha)\b", re.IGNORECASE | re.DOTALL)
"""What users without the permission are told, and those of proxies that don't know the command."""
_NO_WORK: Final = LuaScript(b"return 1")

Locate = Callable[[], Awaitable[Address]]
Redirect = Callable[[str, asyncio.Future[Any], float, CommandRetry], bool]
"""Told of an error, who waits, until when and how to ask again; True: taken care of."""


class LinkState(Struct, frozen=True):
    """How the link is, for people and health checks."""

    up: bool
    since: float
    """Seconds since the epoch."""
    reason: str
    """Why it is down; "" when it is up."""
    address: str
    warning: str = ""
    """What is not as it should be although it is up."""


class Link:
    """A standing link. `start` it, `close` it.

    Args:
        locate: where the server is; asked before every attempt to connect.
        scripts: loaded on every new connection.
        timeout_ms: how long a command may stay unanswered before the link is given up.
        max_in_flight: unanswered commands at once; more are refused.
        redirect: for a cluster: who takes care of MOVED and ASK.
        on_change: told of every change of state.
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
        """Scripts go out whole: this server lets us neither load them nor call them by digest."""
        self._at = "redis"
        """Where it was last tried, for people."""
        self._lost = asyncio.Event()
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.state = LinkState(up=False, since=time.time(), reason="not connected yet", address="")

    async def start(self, wait_s: float = _CONNECT_S) -> bool:
        """Begin to connect, and stay connected. True: connected within `wait_s` seconds; False: it goes on trying."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._stay_connected(), name="redis link")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._up.wait()
        return self.state.up

    async def close(self) -> None:
        """Wait for the answers on their way, at most one timeout, then disconnect."""
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
        """Ask for one command's answer.

        Raises:
            LimitsUnavailable: no connection, or too many commands unanswered. The future raises it as well:
                `Unanswered` when the link broke, `RedisError` when Redis answered with an error.
        """
        connection = self._usable()
        future: asyncio.Future[Any] = self._loop.create_future()
        packed = pack(command)
        connection.send(packed, future, self._loop.time() + self._timeout_s, CommandRetry(None, 0, packed))
        return future

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script: `count` bulk strings (number of keys, keys, arguments). Errors as with `call`.

        A server that forgot the script is told again, which the caller does not notice.
        """
        connection = self._usable()
        future: asyncio.Future[Any] = self._loop.create_future()
        deadline = self._loop.time() + self._timeout_s
        call = script.eval if self._sends_source else script.evalsha
        connection.send(call(count, tail), future, deadline, CommandRetry(script, count, tail))
        return future

    def resume(self, future: asyncio.Future[Any], deadline: float, run: CommandRetry, *, asking: bool) -> None:
        """Ask here what another server of the cluster sent away.

        Raises:
            LimitsUnavailable: as with `call`.
        """
        connection = self._usable()
        if asking:
            connection.send(pack(("ASKING",)), self._unwatched(), deadline)
        self._send_again(connection, future, deadline, run)

    def _usable(self) -> RedisConnection:
        connection = self._connection
        if connection is None:
            raise LimitsUnavailable(self.state.reason)
        if len(connection) >= self._max_in_flight:
            raise LimitsUnavailable(f"{self._max_in_flight} commands are unanswered")
        return connection

    def _unwatched(self) -> asyncio.Future[Any]:
        """A future whose error nobody needs to look at."""
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _answered_with_error(self, connection: RedisConnection, error: str, sent: Sent) -> None:
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
        """Load the script once for all that wait for it, then ask again; if it is forgotten in between, send it along."""
        if run.attempt > 1:
            connection.send(script.eval(run.count, run.tail), future, deadline, run)
            return
        if script not in self._reloading:
            self._reloading.add(script)
            loaded = self._unwatched()
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
        """From here on, until the next connection, every call of a script brings its source along."""
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
                self._went_down(f"no connection to {self._at} within {_CONNECT_S:.0f} s")
            except OSError as error:
                self._went_down(f"no connection to {self._at}: {error}")
            except LimitsUnavailable as error:
                self._went_down(str(error))
            else:
                await self._lost.wait()
            if self._loop.time() - began > 2 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - replicas should not come back in step
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        """Connect and greet; the link is up only after the greeting was answered."""
        async with asyncio.timeout(_CONNECT_S):
            address = await self._locate()
            self._at = str(address)

            def protocol() -> RedisConnection:
                return RedisConnection(self._loop, self._timeout_s, self._answered_with_error, self._disconnected)

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
        self._change(LinkState(up=True, since=time.time(), reason="", address=str(address), warning=self.state.warning))

    async def _greet(self, connection: RedisConnection, address: Address) -> None:
        commands: list[tuple[Argument, ...]] = []
        if address.password:
            commands.append(("AUTH", address.username, address.password) if address.username else ("AUTH", address.password))
        if address.db:
            commands.append(("SELECT", address.db))
        commands.append(("PING",))
        await self._ask(connection, *map(pack, commands))
        self._sends_source, self.state = False, replace(self.state, warning="")
        try:
            await self._ask(connection, *(pack((b"SCRIPT", b"LOAD", script.source)) for script in self._scripts))
        except RedisError as error:
            if not _NOT_ALLOWED.match(str(error)):
                raise
            await self._ask(connection, _NO_WORK.eval(*bulks(0)))
            self._send_source(str(error))

    async def _ask(self, connection: RedisConnection, *commands: bytes) -> None:
        """Wait for the answers to all of these.

        Raises:
            RedisError: one of them was refused.
        """
        answers: list[asyncio.Future[Any]] = [self._loop.create_future() for _ in commands]
        deadline = self._loop.time() + _CONNECT_S
        for command, answer in zip(commands, answers, strict=True):
            connection.send(command, answer, deadline)
        for answered in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answered, BaseException):
                raise answered

    def _disconnected(self, connection: RedisConnection, reason: str) -> None:
        if self._connection is connection:
            self._connection = None
            self._went_down(reason)
        self._lost.set()

    def _went_down(self, reason: str) -> None:
        never_up = not self.state.address
        if self.state.up or (never_up and reason != self.state.reason):
            self._change(LinkState(up=False, since=time.time(), reason=reason, address=self.state.address))

    def _change(self, state: LinkState) -> None:
        level = logging.WARNING if self.state.address else logging.INFO  # what it is like at the start, whoever starts it says
        self.state = state
        if state.up:
            self._up.set()
            _log.log(level, "redis %s: connected", state.address)
        else:
            self._up.clear()
            _log.log(level, "redis %s: away: %s", state.address or "at start", state.reason)
        if self._on_change is not None:
            self._on_change(state)

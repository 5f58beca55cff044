"""Child processes: started, waited for until they serve, ended in the reverse order. None outlives us, not even when we are killed.

Rule: a child is ended by its own process group, never by name.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import ClientError, ClientSession, ClientTimeout

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_TAIL_LINES = 15
_libc = ctypes.CDLL(None, use_errno=True)

Probe = Callable[[], Awaitable[bool]]


class ChildFailed(Exception):  # noqa: N818 - it is what happened
    """A child could not be started, died, or never served. The message ends with the last lines it wrote."""


class Child:
    """One running child process. Its output goes to `log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def exited(self) -> int:
        """Wait until it ends; returns the exit code."""
        return await self._process.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask it to end (SIGTERM), then end its whole group. Returns when it is gone."""
        if self.exit_code is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        # What the child itself has started goes too, and a child that did not listen.
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def failure(self, what: str) -> ChildFailed:
        """An error that says what happened and shows the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if self.log.exists() else []
        tail = "".join(f"\n    {line}" for line in lines)
        return ChildFailed(f"{self.name} {what}; its last words:{tail or ' none'}")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Children:
    """The children of one role. An async context manager: leaving it ends them all, the last started first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    async def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        ready: Probe,
        timeout_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a child and wait until `ready` says that it serves.

        Args:
            name: for messages, and of its log file.
            command: the program and its arguments.
            ready: asked again and again until it is true.
            timeout_s: how long that may take.
            environment: on top of our own.

        Raises:
            ChildFailed: it can't be started, ended, or did not serve in time.
        """
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *map(str, command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    preexec_fn=partial(_die_with, os.getpid()),
                )
            except OSError as error:
                raise ChildFailed(f"{name} can't be started: {error}") from error
        child = Child(name, process, log)
        self._children.append(child)
        await _wait_until(child, ready, timeout_s)
        return child

    @property
    def newest(self) -> Child:
        """The child started last."""
        return self._children[-1]

    async def first_death(self) -> Child:
        """Wait until some child ends by itself: one that `stop` has not taken off the list."""
        while True:
            waits = {asyncio.ensure_future(child.exited()): child for child in self._children}
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            for wait in done:
                if waits[wait] in self._children:
                    return waits[wait]

    async def stop(self, child: Child, grace_s: float = 5.0) -> None:
        """End one child; it no longer counts as a death."""
        self._children.remove(child)
        await child.stop(grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._children:
            await self._children.pop().stop()


async def _wait_until(child: Child, ready: Probe, timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        # The exit first: another process may answer on the port that the child could not get.
        if child.exit_code is not None:
            raise child.failure(f"ended with exit code {child.exit_code} before it served")
        if await ready():
            return
        if asyncio.get_running_loop().time() > deadline:
            raise child.failure(f"did not serve within {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)


def serves(url: str) -> Probe:
    """Ready when the URL answers 200."""

    async def probe() -> bool:
        try:
            async with ClientSession(timeout=ClientTimeout(total=2)) as session, session.get(url) as response:
                return response.status == 200  # noqa: PLR2004 - HTTP's own number
        except (ClientError, OSError, TimeoutError):
            return False

    return probe


def accepts(host: str, port: int) -> Probe:
    """Ready when the port accepts a connection."""

    async def probe() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return probe


def accepts_unix(path: Path) -> Probe:
    """Ready when the Unix socket accepts a connection."""

    async def probe() -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return probe


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def _die_with(parent: int) -> None:
    """In the child, before it becomes its program: the kernel ends it when its parent ends, however that happens."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

"""Child processes: started, awaited until ready, ended in reverse order. None outlives this process, even if it is killed.

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


class ChildFailed(Exception):  # noqa: N818 - the name says what happened
    """A child could not be started, exited, or did not become ready. The message ends with its last log lines."""


class Child:
    """One running child process. Its output goes to `log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def exited(self) -> int:
        """Wait until the child ends; return the exit code."""
        return await self._process.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Send SIGTERM, then kill its whole group after `grace_s`. Return when it has ended."""
        if self.exit_code is None:
            self._send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        # The group includes what the child has started, and a child that ignored SIGTERM.
        self._send_signal(signal.SIGKILL)
        await self._process.wait()

    def failure(self, what: str) -> ChildFailed:
        """Return an error that says what happened and shows the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if self.log.exists() else []
        tail = "".join(f"\n    {line}" for line in lines)
        return ChildFailed(f"{self.name} {what}; its last words:{tail or ' none'}")

    def _send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Children:
    """The children of one process. An async context manager: leaving it ends all, in reverse order."""

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
        """Start a child and wait until it is ready.

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
                    preexec_fn=partial(_make_parent_death_signal, os.getpid()),
                )
            except OSError as error:
                raise ChildFailed(f"{name} failed to start: {error}") from error
        child = Child(name, process, log)
        self._children.append(child)
        await _wait_until(child, ready, timeout_s)
        return child

    @property
    def newest(self) -> Child:
        """The child started last."""
        return self._children[-1]

    async def first_death(self) -> Child:
        """Wait until a child exits that `stop` has not removed."""
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
        """End one child; its exit is not reported by `first_death`."""
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
        # Exit is checked first: another process may answer on a port that the child could not bind.
        if child.exit_code is not None:
            raise child.failure(f"ended with exit code {child.exit_code} before it was ready")
        if await ready():
            return
        if asyncio.get_running_loop().time() > deadline:
            raise child.failure(f"was not ready within {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)


def http_ready(url: str) -> Probe:
    """Return a readiness check: the URL answers 200."""

    async def probe() -> bool:
        try:
            async with ClientSession(timeout=ClientTimeout(total=2)) as session, session.get(url) as response:
                return response.status == 200  # noqa: PLR2004 - an HTTP status
        except (ClientError, OSError, TimeoutError):
            return False

    return probe


def tcp_ready(host: str, port: int) -> Probe:
    """Return a readiness check: the port accepts a connection."""
    return _make_probe(lambda: asyncio.open_connection(host, port))


def unix_ready(path: Path) -> Probe:
    """Return a readiness check: the Unix socket accepts a connection."""
    return _make_probe(lambda: asyncio.open_unix_connection(path))


def _make_probe(connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]) -> Probe:
    async def probe() -> bool:
        try:
            _, writer = await connect()
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return probe


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different TCP ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def _make_parent_death_signal(parent: int) -> None:
    """Run in the child before exec: the kernel ends the child when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

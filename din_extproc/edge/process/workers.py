"""Pool of the worker processes of one sidecar: start, reports, restart after a crash, rolling replacement.

Invariant: a worker is in service after its first report; only then its predecessor drains and exits.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from din_extproc.edge.process.channel import MessageChannel

_log = logging.getLogger(__name__)

Report = TypeVar("Report")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_HEALTHY_S = 10.0
_READY_S = 60.0


class WorkerFailed(Exception):  # noqa: N818 - named for the event
    """A worker exited or timed out before it was ready."""


class WorkerProcess(Generic[Report]):
    """One running worker process."""

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, channel: MessageChannel[Report], on_report: Callable[[Report], None]
    ) -> None:
        self._on_report = on_report
        self.number = number
        self.process = process
        self.channel = channel
        self.report: Report | None = None
        """Latest report."""
        self._ready = asyncio.Event()
        self.listening = asyncio.get_running_loop().create_task(self._listen(), name=f"worker {number}")

    async def wait_ready(self) -> None:
        """Wait for its first report.

        Raises:
            WorkerFailed: It exited or did not report in time.
        """
        waiting = asyncio.ensure_future(self._ready.wait())
        done, _ = await asyncio.wait((waiting, self.listening), timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        if waiting not in done:
            waiting.cancel()
            await self.stop(0.0)
            raise WorkerFailed(f"worker {self.number} ended before it was ready (exit code {self.process.returncode})")

    async def stop(self, grace_s: float) -> None:
        """Drain the worker for `grace_s` seconds, then kill it."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            if self.process.returncode is None:
                self.process.kill()
        await self.process.wait()
        await self.listening
        self.channel.close()

    async def _listen(self) -> None:
        while (report := await self.channel.receive()) is not None:
            self._on_report(report)
            self.report = report
            self._ready.set()


class WorkerPool(Generic[Report]):
    """All workers of one sidecar.

    Args:
        count: Number of workers.
        command: The command line of a worker, by its number and the descriptor of its end of the channel.
        expected: The type of their reports.
        grace_s: Drain time of a worker.
        greeting: The first message to a worker.
        farewell: Called with the last report of an exited worker.
        on_report: Called with every report.
    """

    def __init__(
        self,
        count: int,
        command: Callable[[int, int], Sequence[str]],
        expected: type[Report],
        grace_s: float,
        greeting: Callable[[], object],
        farewell: Callable[[Report], None],
        on_report: Callable[[Report], None],
    ) -> None:
        self._count = count
        self._command = command
        self._expected = expected
        self._grace_s = grace_s
        self._greeting = greeting
        self._farewell = farewell
        self._on_report = on_report
        self._living: set[WorkerProcess[Report]] = set()
        """All workers, including those that start or drain."""
        self._current: dict[int, WorkerProcess[Report]] = {}
        self._tending: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self.restarts = 0

    async def start(self) -> None:
        """Start all workers and restart them after crashes.

        Raises:
            WorkerFailed: A worker did not become ready.
        """
        workers = await asyncio.gather(*(self._launch(number) for number in range(self._count)))
        for worker in workers:
            await worker.wait_ready()
            self._current[worker.number] = worker
        loop = asyncio.get_running_loop()
        self._tending = [loop.create_task(self._supervise(number), name=f"tending worker {number}") for number in range(self._count)]

    def broadcast(self, message: object) -> None:
        """Send a message to every worker, including those that start or drain."""
        for worker in self._living:
            worker.channel.send(message)

    @property
    def reports(self) -> list[Report]:
        """Return the latest report of each worker, including draining ones."""
        return [worker.report for worker in self._living if worker.report is not None]

    async def replace(self) -> None:
        """Replace the workers one by one; a worker whose replacement fails stays."""
        for number in range(self._count):
            successor = await self._launch(number)
            try:
                await successor.wait_ready()
            except WorkerFailed as error:
                _log.error("replacement worker failed to start: %s", error)
                return
            predecessor, self._current[number] = self._current[number], successor
            self._retire(predecessor)

    async def stop(self) -> None:
        """Drain and stop all workers."""
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        await asyncio.gather(*(worker.stop(self._grace_s) for worker in self._current.values()), *self._leaving)

    def _retire(self, worker: WorkerProcess[Report]) -> None:
        task = asyncio.get_running_loop().create_task(worker.stop(self._grace_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _supervise(self, number: int) -> None:
        """Restart a worker whenever it crashes."""
        pause = _FIRST_PAUSE_S
        while True:
            worker = self._current[number]
            began = asyncio.get_running_loop().time()
            code = await worker.process.wait()
            if self._current[number] is not worker:
                continue
            pause = _FIRST_PAUSE_S if asyncio.get_running_loop().time() - began > _HEALTHY_S else min(2 * pause, _LONGEST_PAUSE_S)
            _log.error("worker %d exited with code %d; restarting it", number, code)
            self.restarts += 1
            await worker.stop(0.0)
            while self._current[number] is worker:
                await asyncio.sleep(pause)
                successor = await self._launch(number)
                try:
                    await successor.wait_ready()
                except WorkerFailed as error:
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    _log.error("%s", error)
                else:
                    self._current[number] = successor

    def _on_worker_lost(self, worker: WorkerProcess[Report]) -> None:
        self._living.discard(worker)
        if worker.report is not None:
            self._farewell(worker.report)

    async def _launch(self, number: int) -> WorkerProcess[Report]:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            command = self._command(number, descriptor)
            process = await asyncio.create_subprocess_exec(*command, pass_fds=(descriptor,), stdin=asyncio.subprocess.DEVNULL)
        worker = WorkerProcess(number, process, await MessageChannel.over(ours, self._expected), self._on_report)
        worker.channel.send(self._greeting())
        self._living.add(worker)
        worker.listening.add_done_callback(lambda _: self._on_worker_lost(worker))
        return worker

"""Background work of a process: coroutines without a caller, and periodic steps.

Invariant: a failure is logged with its traceback and ends only its own work; at exit all work is cancelled and awaited.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

from din_extproc.edge.inline_task import InlineTask

_log = logging.getLogger(__name__)

T = TypeVar("T")
STEPS_PER_ITERATION: Final = 8
"""Messages, responses or steps of one connection or burst per event loop iteration: at most two milliseconds. Writes leave at the end of an
iteration, so a burst is processed in slices: its first results leave before its last ones are ready."""


class Background:
    """Background coroutines of one process."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Start a coroutine at once without a task. It may await futures only (see `inline_task.py`)."""
        self._begin()
        InlineTask(coroutine, self._on_done, self._on_failed)

    def trickle(self, items: Iterator[T], step: Callable[[list[T]], None], *, most: int = STEPS_PER_ITERATION) -> None:
        """Process items, at most `most` per event loop iteration, so that a burst does not delay other work."""
        self._begin()
        self._trickle(items, step, most)

    def every(self, seconds: float, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run a step periodically, never concurrently, until `close`."""
        self._tasks.append(asyncio.get_running_loop().create_task(_run_repeatedly(seconds, name, step), name=name))

    def run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work as a task until it ends or `close`."""
        self._tasks.append(asyncio.get_running_loop().create_task(_run_once(name, work), name=name))

    async def quiet(self, wait_s: float) -> None:
        """Wait until all started coroutines have ended, at most `wait_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._idle.wait()

    async def close(self) -> None:
        """Cancel all work and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self) -> None:
        if not self._open:
            self._idle.clear()
        self._open += 1

    def _trickle(self, items: Iterator[T], step: Callable[[list[T]], None], most: int) -> None:
        few = list(islice(items, most))
        try:
            step(few)
        except Exception:  # noqa: BLE001 - last guard: a failure must not end other work
            _log.exception("a background step failed")
        if len(few) == most:
            asyncio.get_running_loop().call_soon(self._trickle, items, step, most)
        else:
            self._on_done(None)

    def _on_done(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()

    def _on_failed(self, error: BaseException) -> None:
        self._on_done(None)
        if not isinstance(error, asyncio.CancelledError):
            _log.error("a background step failed", exc_info=error)


async def _run_once(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001 - last guard of background work
        _log.exception("%s failed", name)


async def _run_repeatedly(seconds: float, name: str, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await step()
        except Exception:  # noqa: BLE001 - last guard of periodic work
            _log.exception("%s failed; next attempt in %g s", name, seconds)

"""What runs beside requests: coroutines nobody waits for, and things done again and again.

Rule: a failure is logged with its traceback and ends only itself; at the end of the process everything is cancelled and waited for.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, TypeVar

from din_extproc.edge.inline_task import InlineTask
from din_extproc.edge.turn import AT_ONCE

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """The coroutines of one process that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run it, beginning now, without a task of its own. It may await futures only (see `edge/drive.py`)."""
        self._begin()
        InlineTask(coroutine, self._done, self._failed)

    def trickle(self, items: Iterator[T], step: Callable[[T], None]) -> None:
        """Take one step per item, a few in each turn of the loop, beginning now: what comes in a burst holds nobody else up for long."""
        self._begin()
        self._trickle(items, step)

    def every(self, seconds: float, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Do it every so many seconds, one after the other, until `close`."""
        self._tasks.append(asyncio.get_running_loop().create_task(_repeat(seconds, name, step), name=name))

    def run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run it as a task, until it ends or `close`."""
        self._tasks.append(asyncio.get_running_loop().create_task(_once(name, work), name=name))

    async def quiet(self, wait_s: float) -> None:
        """Wait until everything that was started has ended, for so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._idle.wait()

    async def close(self) -> None:
        """Stop what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self) -> None:
        if not self._open:
            self._idle.clear()
        self._open += 1

    def _trickle(self, items: Iterator[T], step: Callable[[T], None]) -> None:
        few = list(islice(items, AT_ONCE))
        for item in few:
            try:
                step(item)
            except Exception:  # noqa: BLE001 - the last guard: the others have nothing to do with it
                _log.exception("a background step failed")
        if len(few) == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._trickle, items, step)
        else:
            self._done(None)

    def _done(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()

    def _failed(self, error: BaseException) -> None:
        self._done(None)
        if not isinstance(error, asyncio.CancelledError):
            _log.error("a background step failed", exc_info=error)


async def _once(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001 - the last guard of work that nobody waits for
        _log.exception("%s failed", name)


async def _repeat(seconds: float, name: str, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await step()
        except Exception:  # noqa: BLE001 - the last guard of what repeats: said, and done again
            _log.exception("%s failed; it is tried again in %g s", name, seconds)

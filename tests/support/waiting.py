"""Wait in tests for a condition, never for a time: nothing else in unit, contract and property tests sleeps.

Rule: a limit here only ends a test that would wait for ever. It is far longer than any machine needs, and no test passes by it.
"""

import asyncio
import inspect
import math
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 60.0


async def until(holds: Callable[[], Any], what: Any = "it") -> Any:
    """Wait until `holds()` is true, and return what it returned. It may be a coroutine function."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"never happened: {_describe(what)}"
        await asyncio.sleep(0.005)


def eventually(holds: Callable[[], Any], what: Any = "it") -> Any:
    """Block until `holds()` is true, and return what it returned. `what` may be a function that returns the message."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"never happened: {_describe(what)}"
        time.sleep(0.02)
    return found


async def turns(count: int = 1) -> None:
    """Let everything that is ready run, `count` times over."""
    for _ in range(count):
        await asyncio.sleep(0)


async def repeatedly(step: Callable[[], Awaitable[Any]]) -> None:
    """Run a step again and again until cancelled, as something beside the test does."""
    while True:
        await step()
        await asyncio.sleep(0.02)


async def let_pass(seconds: float) -> None:
    """Let time pass on a loop whose clock jumps, and whatever happens meanwhile happen."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "mark the test with virtual_time"
    await asyncio.sleep(seconds)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready: hours pass at once, and exactly.

    Sockets work as long as both ends are in this process. Mark a test with `virtual_time` to run it on such a loop.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Let so much time have passed, and never none: who rounds a timer to the time that it is would wait for ever."""
        self._now = max(self._now + seconds, math.nextafter(self._now, math.inf))


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        self._loop.jump(0.0 if ready or not timeout else timeout)
        return ready


def _describe(what: Any) -> Any:
    return what() if callable(what) else what

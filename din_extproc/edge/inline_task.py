"""Runner of coroutines without a task: the first step runs at once, in the caller's event loop iteration.

Invariant: the coroutine receives results, errors and `CancelledError` as in a task, and exactly one callback is called, once.

Not a task: `asyncio.current_task()` is not the coroutine's, so `asyncio.timeout` and task groups don't work inside.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class InlineTask(Generic[T]):
    """A running coroutine. It starts in the constructor, which may call `done` or `failed`."""

    __slots__ = ("_cancelled", "_coroutine", "_done", "_failed", "_next_step", "_running", "_waiting_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._done = done
        self._failed = failed
        self._waiting_for: asyncio.Future[Any] | None = None
        self._next_step: asyncio.Handle | None = None
        self._cancelled = False
        self._running = False
        self._run_step()

    def cancel(self) -> None:
        """Throw `CancelledError` into the coroutine at once and cancel the awaited future. Ignored after its end."""
        if self._coroutine is None:
            return
        if self._running:
            self._cancelled = True
            return
        if self._next_step is not None:
            self._next_step.cancel()
            self._next_step = None
        waiting_for, self._waiting_for = self._waiting_for, None
        if waiting_for is not None:
            waiting_for.remove_done_callback(self._wake)
            waiting_for.cancel()
        self._run_step(asyncio.CancelledError())

    def _wake(self, future: asyncio.Future[Any]) -> None:
        if self._waiting_for is future:
            self._waiting_for = None
            self._run_step()

    def _schedule_step(self) -> None:
        self._next_step = None
        self._run_step()

    def _run_step(self, error: BaseException | None = None) -> None:
        coroutine = self._coroutine
        assert coroutine is not None  # noqa: S101 - all callers have checked it
        self._running = True
        try:
            while True:
                yielded = coroutine.send(None) if error is None else coroutine.throw(error)
                error = self._wait(yielded)
                if error is None:
                    return
        except StopIteration as stop:
            self._coroutine = None
            result: T = stop.value
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - passed to the callback, as in a task
            self._coroutine = None
            self._failed(raised)
            return
        finally:
            self._running = False
        self._done(result)

    def _wait(self, yielded: Any) -> BaseException | None:
        """Schedule the next step on the yielded future, or return the error to throw at once."""
        if self._cancelled:
            self._cancelled = False
            if yielded is not None:
                yielded.cancel()
            return asyncio.CancelledError()
        if yielded is None:
            self._next_step = asyncio.get_running_loop().call_soon(self._schedule_step)
            return None
        if getattr(yielded, "_asyncio_future_blocking", None) is not True:
            return RuntimeError(f"a coroutine that is driven may await asyncio futures only, not {type(yielded).__name__}")
        yielded._asyncio_future_blocking = False  # noqa: SLF001 - asyncio's protocol of awaited futures
        yielded.add_done_callback(self._wake)
        self._waiting_for = yielded
        return None

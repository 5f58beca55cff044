"""Batch window on a real clock: requests wait in futures, one timer releases the next due bucket.

Invariant: a waiting request is in exactly one bucket; a cancelled wait leaves its bucket at once.
"""

import asyncio
import math
from itertools import count

from din_extproc.schedule.batch import BatchBuckets, BatchLimits


class BatchGate:
    """Gate that holds the requests of one node until their batch is released."""

    def __init__(self, window: BatchLimits) -> None:
        self._batches = BatchBuckets(window)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0
        self._open = False

    @property
    def held(self) -> int:
        """Return the number of waiting requests."""
        return self._batches.held_count

    def open(self) -> None:
        """Release all requests and hold no further ones: the node drains."""
        self._open = True
        self._release(self._batches.release_due(math.inf))

    async def hold(self, tokens: int) -> None:
        """Wait until a request with a prompt of `tokens` tokens is released."""
        if self._open:
            return
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        going = self._batches.join(number, tokens, loop.time())
        waits = self._waiting[number] = loop.create_future()
        if going:
            loop.call_soon(self._release, going)  # after this one has started to wait, so that all are released in order of arrival
        self._set_timer()
        try:
            await waits
        finally:
            self._waiting.pop(number, None)
            self._batches.leave(number)

    def _release(self, going: tuple[int, ...]) -> None:
        for number in going:
            waits = self._waiting.pop(number, None)
            if waits is not None and not waits.done():
                waits.set_result(None)

    def _set_timer(self) -> None:
        due = self._batches.next_due
        if due is None or (self._timer is not None and self._rings_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = due
        self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._release(self._batches.release_due(max(asyncio.get_running_loop().time(), self._rings_at)))  # a timer may fire early
        self._set_timer()

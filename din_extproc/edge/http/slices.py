"""Generation of long pages in slices, so that requests are not delayed.

Invariant: other callbacks run between two slices, and a pause follows each: a page takes a few percent of a busy process.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from din_extproc.edge.clock import SystemClock

_PAUSE_S = 0.002
_READ_TIMEOUT_S = 4.0
"""Time after which pauses end: Prometheus' scrape timeout is 10 s."""
_PIECE_BYTES = 1 << 16


async def pace_slices(slices: Iterable[bytes], timeout_s: float = _READ_TIMEOUT_S) -> AsyncIterator[bytes]:
    """Yield the same bytes in larger pieces, because each write is a system call.

    Args:
        slices: Generated on demand, each within a tenth of a millisecond.
        timeout_s: Seconds after which pauses end; other callbacks still run between slices.
    """
    hurried = SystemClock.monotonic() + timeout_s
    held: list[bytes] = []
    size = 0
    for part in slices:
        held.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
        await asyncio.sleep(_PAUSE_S if SystemClock.monotonic() < hurried else 0)
    if held:
        yield b"".join(held)

"""A long page, made and sent beside requests.

Rule: whoever waits goes first between two slices, and a pause follows each: of a busy process it takes a few hundredths.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from din_extproc.edge.clock import SystemClock

_PAUSE_S = 0.002
_PATIENCE_S = 4.0
"""A page that takes longer has no more pauses: Prometheus gives one up after 10 s."""
_PIECE_BYTES = 1 << 16


async def paced(slices: Iterable[bytes], patience_s: float = _PATIENCE_S) -> AsyncIterator[bytes]:
    """The same bytes in larger pieces: each costs a system call.

    Args:
        slices: Each is made when it is asked for, in a tenth of a millisecond or less.
        patience_s: Seconds after which no more pauses are made; others still go first.
    """
    hurried = SystemClock.monotonic() + patience_s
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

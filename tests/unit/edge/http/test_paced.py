"""A scrape of a great many series beside everything else that a process does."""

import asyncio
import time

from din_extproc.edge.http.paced import paced
from din_extproc.observe import instruments as of
from din_extproc.observe.exposition import slices
from din_extproc.observe.families import Distributions

SERIES = 100_000
LONGEST_S = 0.003
"""CPU at one go. A slice takes less than a tenth of a millisecond; now and then something else of the process runs in between."""
LARGEST_SHARE = 0.15
"""Of the time of a process that has nothing else to do. On a quiet machine it is 0.03."""


def spread_of(series: int) -> Distributions:
    spread = Distributions(of.NODE_DURATION, cap=series)
    for at in range(1 + series // (len(of.NODE_DURATION.bounds) + 3)):
        spread.record((f"node-{at}", "m"), at % 90)
    return spread


async def test_a_scrape_of_a_hundred_thousand_series_leaves_the_loop_to_others_after_every_slice():
    spread = spread_of(SERIES)
    size = lines = 0
    held: list[float] = []
    done = asyncio.Event()

    async def others() -> None:
        while not done.is_set():
            began = time.thread_time()
            await asyncio.sleep(0)
            held.append(time.thread_time() - began)

    beside = asyncio.ensure_future(others())
    async for piece in paced(slices([spread.family()])):
        size += len(piece)
        lines += piece.count(b"\n")
    done.set()
    await beside
    assert lines >= SERIES
    assert len(held) > SERIES / 200, "others had a turn for each slice"
    held.sort()
    print(f"{lines} lines, {size} bytes; held for {held[-1] * 1e3:.2f} ms at most, P99 {held[int(len(held) * 0.99)] * 1e3:.3f} ms")
    assert held[int(len(held) * 0.999)] < LONGEST_S


async def test_a_scrape_of_a_hundred_thousand_series_takes_a_small_part_of_a_process():
    page = [spread_of(SERIES).family()]
    used, began = time.thread_time(), time.perf_counter()
    async for _ in paced(slices(page)):
        pass
    share = (time.thread_time() - used) / (time.perf_counter() - began)
    print(f"{share:.3f} of the process's time")
    assert share < LARGEST_SHARE


async def test_a_page_that_takes_long_has_no_more_pauses():
    parts = [b"x"] * 100
    took = []
    for patience_s in (60.0, 0.0):
        began = time.perf_counter()
        assert [piece async for piece in paced(parts, patience_s)] == [b"x" * 100]
        took.append(time.perf_counter() - began)
    assert took[0] > 0.1
    assert took[1] < took[0] / 2


async def test_what_is_paced_is_the_same_bytes_in_few_pieces():
    parts = [b"x" * 1000, b"", b"y"] * 200
    pieces = [piece async for piece in paced(parts)]
    assert b"".join(pieces) == b"".join(parts)
    assert len(pieces) == 4
    assert [piece async for piece in paced([])] == []

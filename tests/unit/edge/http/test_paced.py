"""A scrape of a great many series beside everything else that a process does."""

import asyncio

import pytest

from din_extproc.edge.http.slices import pace_slices
from din_extproc.observe import instruments as of
from din_extproc.observe.exposition import render_slices
from din_extproc.observe.families import Distributions
from tests.support.waiting import turns

SERIES = 100_000
MOST_LINES = 200
"""Of one slice: it is made in less than a tenth of a millisecond."""
PAUSE_S = 0.002
NEVER_S = 3600.0


def spread_of(series: int) -> Distributions:
    spread = Distributions(of.NODE_DURATION, cap=series)
    for at in range(1 + series // (len(of.NODE_DURATION.bounds) + 3)):
        spread.record((f"node-{at}", "m"), at % 90)
    return spread


@pytest.mark.virtual_time
async def test_a_scrape_of_a_hundred_thousand_series_is_small_slices_and_a_pause_after_each():
    parts = list(render_slices([spread_of(SERIES).family()]))
    assert sum(part.count(b"\n") for part in parts) >= SERIES
    assert max(part.count(b"\n") for part in parts) <= MOST_LINES
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert b"".join([piece async for piece in pace_slices(parts, NEVER_S)]) == b"".join(parts)
    assert loop.time() - began == pytest.approx(len(parts) * PAUSE_S)


@pytest.mark.virtual_time
async def test_others_have_a_turn_for_each_slice_of_a_page_that_takes_long_though_it_has_no_more_pauses():
    loop, turns_of_others, done = asyncio.get_running_loop(), 0, False

    async def others() -> None:
        nonlocal turns_of_others
        while not done:
            turns_of_others += 1
            await turns()

    beside = asyncio.ensure_future(others())
    assert [piece async for piece in pace_slices([b"x"] * 100, 0.0)] == [b"x" * 100]
    done = True
    await beside
    assert turns_of_others >= 100
    assert loop.time() == pytest.approx(0, abs=PAUSE_S / 2)


@pytest.mark.virtual_time
async def test_what_is_paced_is_the_same_bytes_in_few_pieces():
    parts = [b"x" * 1000, b"", b"y"] * 200
    pieces = [piece async for piece in pace_slices(parts)]
    assert b"".join(pieces) == b"".join(parts)
    assert len(pieces) == 4
    assert [piece async for piece in pace_slices([])] == []

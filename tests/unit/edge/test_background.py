"""What runs beside requests: bursts that are worked off in turns of the loop."""

import logging

import pytest

from din_extproc.edge.background import Background
from tests.support.waiting import turns


async def test_a_burst_is_worked_off_in_turns_between_which_others_run() -> None:
    background, done, seen_between = Background(), [], []
    background.trickle(iter(range(50)), done.extend)
    assert 0 < len(done) < 50
    while len(done) < 50:
        seen_between.append(len(done))
        await turns()
    assert done == list(range(50))
    assert len(seen_between) > 5
    await background.quiet(1)


async def test_quiet_waits_for_what_trickles() -> None:
    background, done = Background(), []
    background.trickle(iter(range(21)), done.extend)
    await background.quiet(5)
    assert len(done) == 21


@pytest.mark.parametrize("count", [0, 1, 4, 8])
async def test_any_number_of_items_comes_to_an_end(count: int) -> None:
    background, done = Background(), []
    background.trickle(iter(range(count)), done.extend)
    await background.quiet(5)
    assert len(done) == count


async def test_a_step_that_fails_is_logged_and_the_next_ones_run(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(), []

    def step(items: list[int]) -> None:
        if 3 in items:
            raise ValueError("three")
        done.extend(items)

    with caplog.at_level(logging.ERROR):
        background.trickle(iter(range(10)), step, most=2)
        await background.quiet(5)
    assert done == [0, 1, 4, 5, 6, 7, 8, 9]
    assert [record.message for record in caplog.records] == ["a background step failed"]

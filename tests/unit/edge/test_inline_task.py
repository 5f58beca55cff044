"""A driven coroutine hears what a task would tell it."""

import asyncio
import gc
import weakref

import pytest

from din_extproc.edge.inline_task import InlineTask
from tests.support.waiting import let_pass, turns, until


class Callbacks:
    """The arguments of the two callbacks."""

    def __init__(self):
        self.results = []
        self.errors = []

    def drive(self, coroutine):
        return InlineTask(coroutine, self.results.append, self.errors.append)


@pytest.fixture
def callbacks():
    return Callbacks()


async def test_a_coroutine_that_never_waits_is_done_before_drive_returns(callbacks):
    async def answer():
        return 42

    callbacks.drive(answer())
    assert callbacks.results == [42]


async def test_a_coroutine_that_raises_at_once_has_failed(callbacks):
    error = ValueError("no")

    async def fail():
        raise error

    callbacks.drive(fail())
    assert (callbacks.results, callbacks.errors) == ([], [error])


async def test_a_result_that_is_there_already_costs_no_turn(callbacks):
    future = asyncio.get_running_loop().create_future()
    future.set_result("here")

    async def wait():
        return await future

    callbacks.drive(wait())
    assert callbacks.results == ["here"]


async def test_a_coroutine_goes_on_when_what_it_waits_for_is_there(callbacks):
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))

    async def wait():
        return await first + await second

    callbacks.drive(wait())
    first.set_result(1)
    await turns(3)
    assert callbacks.results == []
    second.set_result(2)
    await turns(3)
    assert callbacks.results == [3]


async def test_an_error_of_what_it_waits_for_is_raised_inside(callbacks):
    future = asyncio.get_running_loop().create_future()

    async def wait():
        try:
            await future
        except KeyError:
            return "caught"

    callbacks.drive(wait())
    future.set_exception(KeyError("x"))
    await turns(3)
    assert callbacks.results == ["caught"]


async def test_a_bare_yield_gives_others_their_turn(callbacks):
    order = []

    async def polite():
        order.append("before")
        await turns()
        order.append("after")
        return "done"

    callbacks.drive(polite())
    order.append("other")
    await turns(3)
    assert order == ["before", "other", "after"]
    assert callbacks.results == ["done"]


@pytest.mark.virtual_time
async def test_tasks_and_timers_can_be_waited_for(callbacks):
    async def work():
        await let_pass(10)
        return "slept"

    async def wait():
        return await asyncio.ensure_future(work()), await asyncio.wait_for(work(), 20)

    callbacks.drive(wait())
    await until(lambda: callbacks.results)
    assert callbacks.results == [("slept", "slept")]


async def test_cancel_is_raised_at_once_and_what_was_waited_for_is_cancelled(callbacks):
    future = asyncio.get_running_loop().create_future()
    cancellations = []

    async def wait():
        try:
            await future
        except asyncio.CancelledError:
            cancellations.append(True)
            raise

    drive = callbacks.drive(wait())
    drive.cancel()
    assert cancellations == [True]
    assert future.cancelled()
    assert isinstance(callbacks.errors[0], asyncio.CancelledError)
    await turns(3)
    assert (len(callbacks.errors), callbacks.results) == (1, [])


async def test_cancel_during_a_bare_yield_is_raised_once(callbacks):
    async def polite():
        await turns()
        return "done"

    callbacks.drive(polite()).cancel()
    await turns(3)
    assert callbacks.results == []
    assert len(callbacks.errors) == 1


async def test_cancel_beats_a_result_that_has_not_been_delivered(callbacks):
    future = asyncio.get_running_loop().create_future()

    async def wait():
        return await future

    drive = callbacks.drive(wait())
    future.set_result("late")
    drive.cancel()
    await turns(3)
    assert callbacks.results == []
    assert isinstance(callbacks.errors[0], asyncio.CancelledError)


async def test_a_cancelled_coroutine_may_still_wait_to_tidy_up(callbacks):
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    tidied = []

    async def wait():
        try:
            await first
        finally:
            tidied.append(await second)

    drive = callbacks.drive(wait())
    drive.cancel()
    assert callbacks.errors == []
    second.set_result("tidy")
    await turns(3)
    assert tidied == ["tidy"]
    assert isinstance(callbacks.errors[0], asyncio.CancelledError)


async def test_a_coroutine_that_ignores_its_cancellation_gives_its_result(callbacks):
    async def stubborn():
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "anyway"

    callbacks.drive(stubborn()).cancel()
    assert callbacks.results == ["anyway"]


async def test_cancel_from_inside_is_raised_at_the_next_wait(callbacks):
    drives = []
    future = asyncio.get_running_loop().create_future()

    async def suicidal():
        await turns()
        drives[0].cancel()
        await future

    drives.append(callbacks.drive(suicidal()))
    await turns(3)
    assert isinstance(callbacks.errors[0], asyncio.CancelledError)
    assert future.cancelled()


async def test_cancel_after_the_end_does_nothing(callbacks):
    async def answer():
        return 1

    drive = callbacks.drive(answer())
    drive.cancel()
    assert (callbacks.results, callbacks.errors) == ([1], [])


async def test_awaiting_something_foreign_raises_in_the_coroutine(callbacks):
    class Foreign:
        def __await__(self):
            yield "not a future"

    async def wait():
        await Foreign()

    callbacks.drive(wait())
    assert "asyncio futures only, not str" in str(callbacks.errors[0])


async def test_an_error_in_a_callback_is_the_callers(callbacks):
    async def answer():
        return 1

    def broken(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        InlineTask(answer(), broken, callbacks.errors.append)
    assert callbacks.errors == []


async def test_a_drive_that_has_ended_keeps_nothing_alive(callbacks):
    class Weighty:
        pass

    async def hold(weight):
        await turns()
        return type(weight).__name__

    weights = [Weighty() for _ in range(10)]
    alive = [weakref.ref(weight) for weight in weights]
    kept = [callbacks.drive(hold(weight)) for weight in weights]
    await turns(3)
    assert callbacks.results == ["Weighty"] * 10
    del weights
    gc.collect()
    assert [each() for each in alive] == [None] * 10
    assert len(kept) == 10


@pytest.mark.parametrize("future_class", [asyncio.Future, asyncio.futures._PyFuture, asyncio.Task], ids=["c", "python", "task"])
async def test_an_awaited_future_yields_itself_and_marks_itself_as_blocking(future_class):
    future = asyncio.create_task(turns()) if future_class is asyncio.Task else future_class()
    assert future._asyncio_future_blocking is False
    yielded = future.__await__().send(None)
    assert yielded is future
    assert yielded._asyncio_future_blocking is True
    future.cancel()


async def test_a_bare_yield_of_asyncio_is_none():
    coroutine = turns()
    assert coroutine.send(None) is None
    coroutine.close()

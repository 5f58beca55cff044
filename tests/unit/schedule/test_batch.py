"""The batch window: full or late, whichever comes first, and never two lengths in one bucket."""

import pytest

from din_extproc.schedule.batch import BatchBuckets, BatchLimits

WINDOW = BatchLimits(max_batch_tokens=1_000, max_wait_s=0.05)


def test_a_bucket_waits_until_its_first_request_has_waited_long_enough():
    batches = BatchBuckets(WINDOW)
    assert batches.join(1, 100, 0.0) == ()
    assert batches.join(2, 100, 0.04) == ()
    assert batches.next_due == 0.05
    assert batches.release_due(0.049) == ()
    assert batches.release_due(0.05) == (1, 2)
    assert batches.next_due is None


def test_a_full_bucket_goes_at_once():
    batches = BatchBuckets(WINDOW)
    for request in range(9):
        assert batches.join(request, 100, 0.0) == ()
    assert batches.join(9, 100, 0.0) == tuple(range(10))
    assert batches.held_count == 0


def test_a_request_that_does_not_fit_sends_the_others_ahead():
    batches = BatchBuckets(WINDOW)
    batches.join(1, 400, 0.0)
    batches.join(2, 400, 0.01)
    assert batches.join(3, 400, 0.02) == (1, 2)
    assert batches.next_due == pytest.approx(0.07)


def test_a_request_larger_than_a_batch_waits_for_nobody():
    assert BatchBuckets(WINDOW).join(1, 5_000, 0.0) == (1,)


def test_a_short_request_does_not_wait_for_a_long_one():
    batches = BatchBuckets(WINDOW)
    batches.join(1, 600, 0.0)
    batches.join(2, 10, 0.03)
    assert batches.release_due(0.05) == (1,)
    assert batches.release_due(0.08) == (2,)


def test_a_client_that_is_gone_leaves_its_bucket():
    batches = BatchBuckets(WINDOW)
    batches.join(1, 400, 0.0)
    batches.join(2, 500, 0.0)
    batches.leave(1)
    batches.leave(1)
    assert batches.join(3, 450, 0.0) == ()
    assert batches.release_due(1.0) == (2, 3)
    batches.join(4, 1, 2.0)
    batches.leave(4)
    assert (batches.next_due, batches.held_count) == (None, 0)


def test_a_window_that_holds_nothing_is_none():
    with pytest.raises(ValueError, match="at least 1"):
        BatchLimits(max_batch_tokens=0)

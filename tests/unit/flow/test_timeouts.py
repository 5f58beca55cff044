"""Envoy's timeouts: the shortest of client, pool and long tail, less the time that the request has waited."""

import pytest

from din_extproc.domain.node import Pool, PoolTimeouts
from din_extproc.domain.request import Estimate, Intent, Operation
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.node_selector import NodeSelection
from din_extproc.flow.timeouts import RequestTimeouts, compute_timeouts, deduct_wait
from din_extproc.schedule.load import NodeLease


def pool(first_byte_ms=None, total_ms=None):
    timeouts = PoolTimeouts(first_byte_ms, total_ms)
    return Pool(name="p", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=(), timeouts=timeouts)


def intent(timeout_ms=None, *, stream=True, operation=Operation.CHAT):
    return Intent(operation, "m", Estimate(1), stream=stream, timeout_ms=timeout_ms)


def picked(long_ms=None):
    return NodeSelection((), NodeLease("n", 1, 1), long_ms)


@pytest.mark.parametrize(
    ("client", "of_pool", "long_tail", "total"),
    [
        (None, None, None, None),
        (1500, None, None, 1500),
        (None, 2000, None, 2000),
        (1500, 2000, None, 1500),
        (2500, 2000, None, 2000),
        (None, 2000, 9000, 9000),
        (1500, 2000, 9000, 1500),
    ],
)
def test_the_whole_answer_has_the_shortest_limit_and_a_long_request_the_long_tail_s_in_place_of_the_pool_s(
    client, of_pool, long_tail, total
):
    assert compute_timeouts(intent(client), pool(total_ms=of_pool), picked(long_tail)).total_ms == total


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        (intent(), 800),
        (intent(stream=False), None),
        (intent(stream=False, operation=Operation.EMBEDDINGS), 800),
        (intent(stream=False, operation=Operation.RERANK), 800),
        (intent(801), 800),
        (intent(800), None),
    ],
)
def test_only_what_is_bound_to_begin_soon_has_a_limit_for_its_beginning_and_only_one_that_can_run_out(asked, first):
    assert compute_timeouts(asked, pool(first_byte_ms=800), picked()).first_byte_ms == first


def test_envoy_gets_only_timeouts_that_are_set():
    assert RequestTimeouts(None, None).headers() == ()
    assert [name for name, _ in RequestTimeouts(None, 5).headers()] == ["x-envoy-upstream-rq-per-try-timeout-ms"]
    assert RequestTimeouts(9, 5).headers() == (("x-envoy-upstream-rq-timeout-ms", "9"), ("x-envoy-upstream-rq-per-try-timeout-ms", "5"))


def test_what_was_waited_here_comes_off_the_patience_and_none_left_is_a_refusal():
    patient, asked = intent(), intent(1000)
    assert deduct_wait(patient, 99.0) is patient
    assert deduct_wait(asked, 0.0004) is asked
    assert deduct_wait(asked, 0.25).timeout_ms == 750
    refused = deduct_wait(asked, 1.0)
    assert isinstance(refused, Refusal)
    assert refused.code is RefusalCode.UPSTREAM_TIMEOUT

"""Timelines keep the last 15 minutes per pool and tenant."""

import pytest
from msgspec.structs import replace

from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.observe.timelines import STEPS, Timelines
from tests.unit.observe.test_recent import DONE


def finished(pool: str = "p", tenant: str = "t", **changed: object) -> ExchangeRecord:
    return replace(DONE, pool=pool, tenant=tenant, **changed)


def test_a_step_counts_requests_refusals_and_tokens_once_it_is_over():
    lines = Timelines()
    lines.add(finished(usage=Usage(30, 20)), 7)
    lines.add(finished(pool="", outcome=Outcome.REFUSED, usage=Usage(0, 0)), 7)
    assert lines.snapshot(7).tenants == {}
    recent = lines.snapshot(8)
    assert (recent.pools["p"].requests[-1], recent.pools["p"].refused[-1], recent.pools["p"].tokens_per_s[-1]) == (1, 0, 5.0)
    assert (recent.tenants["t"].requests[-1], recent.tenants["t"].refused[-1]) == (2, 1)
    assert lines.snapshot(8) is recent


def test_percentiles_of_the_first_token_are_at_most_a_bucket_too_large():
    lines = Timelines()
    for milliseconds in range(1, 101):
        lines.add(finished(first_token_ms=float(milliseconds)), 1)
    series = lines.snapshot(2).pools["p"]
    assert 50 <= series.ttft_p50_ms[-1] <= 50 * 1.15 + 1
    assert 99 <= series.ttft_p99_ms[-1] <= 99 * 1.15 + 1
    assert series.ttft_p50_ms[-2] is None


def test_what_is_older_than_the_window_goes_and_gaps_are_empty():
    lines = Timelines()
    lines.add(finished(), 0)
    lines.add(finished(), STEPS - 1)
    assert lines.snapshot(STEPS).pools["p"].requests == (1, *[0] * (STEPS - 2), 1)
    assert lines.snapshot(STEPS + 1).pools["p"].requests == (*[0] * (STEPS - 2), 1, 0)
    assert lines.snapshot(3 * STEPS).pools == {}


@pytest.mark.parametrize("kind", ["pools", "tenants"])
def test_names_are_bounded_and_the_busiest_are_shown(kind):
    lines = Timelines()
    for number in range(2_000):
        lines.add(finished(**{kind[:-1]: f"n{number:04d}"}), 1)
    lines.add(finished(**{kind[:-1]: "n0003"}), 1)
    recent = getattr(lines.snapshot(2), kind)
    assert len(recent) == 12
    assert recent["n0003"].requests[-1] == 2

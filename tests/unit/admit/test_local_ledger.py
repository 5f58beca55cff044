"""A replica's share of the limits, and how little the twin remembers."""

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.admit.local import LocalLedger, scale_claim
from din_extproc.domain.tenant import Budget, RateLimits


def claim(limits: RateLimits, tokens: int, request_id: str = "r") -> Claim:
    return Claim(request_id, "finance", (Budget("tenant", limits),), tokens, 1000)


def test_a_share_is_the_limit_divided_but_never_zero():
    parts = scale_claim(claim(RateLimits(rpm=10, tpm=1000, max_streams=2), 1), 3)
    assert parts.budgets == (Budget("tenant", RateLimits(rpm=3, tpm=333, max_streams=1)),)
    assert scale_claim(claim(RateLimits(rpm=10), 1), 0).budgets == (Budget("tenant", RateLimits(rpm=10)),)


def test_what_fits_the_whole_bucket_is_not_too_large_for_a_share_of_it():
    in_memory = InMemoryLedger()
    assert isinstance(in_memory.reserve(scale_claim(claim(RateLimits(tpm=900), 800), 3), 0), Granted)
    again = in_memory.reserve(scale_claim(claim(RateLimits(tpm=900), 800, "s"), 3), 0)
    assert isinstance(again, Denied)
    assert (again.dimension, again.retry_after_ms) == ("tpm", 60_000)


def test_what_no_bucket_holds_is_too_large_for_its_share_as_well():
    answer = InMemoryLedger().reserve(scale_claim(claim(RateLimits(tpm=900), 901), 3), 0)
    assert isinstance(answer, Denied)
    assert answer.dimension == "oversize"


async def test_a_sweep_leaves_nothing_of_what_has_expired():
    now_ms = 0
    ledger = LocalLedger(lambda: now_ms)
    for number in range(100):
        await ledger.reserve(claim(RateLimits(rpm=1000, tpm=10_000, max_streams=1000), 10, f"r{number}"))
    now_ms = 119_999
    ledger.sweep()
    assert ledger.has_record("finance", "r0")
    now_ms = 120_000
    ledger.sweep()
    assert (ledger._ledger.records, ledger._ledger.leases, ledger._ledger.counters) == ({}, {}, {})

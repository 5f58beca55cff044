"""Finished exchanges, as the access log tells of them."""

from msgspec.structs import replace

from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage

MIDNIGHT = 1_798_761_600.0
"""2027-01-01T00:00:00Z."""


def record(**fields) -> ExchangeRecord:
    """A chat of ten tokens that ended well just before midnight."""
    plain = ExchangeRecord(
        request_id="r", trace_id="t", tenant="finance", key_id="k", model="m", alias="a", pool="p", rule="", node_id="n", status=200,
        outcome=Outcome.COMPLETED, stream=False, usage=Usage(7, 3, 2), reserved_tokens=20, prompt_estimate=7, features=(), fixed=0,
        attempts=1, degraded=False, started_at=MIDNIGHT - 1,
    )  # fmt: skip
    return replace(plain, **fields)

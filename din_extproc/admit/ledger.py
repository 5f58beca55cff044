"""The port to the counters: reserve before a request is sent, release its slot when it ends, settle what it cost.

Rule: every verb names the request, so that saying it twice counts once.
"""

from typing import Protocol

from msgspec import Struct

from din_extproc.domain.tenant import Budget


class LimitsUnavailable(Exception):  # noqa: N818 - the name says what is the matter
    """The counters can't be reached or did not answer in time."""


class Claim(Struct, frozen=True, gc=False):
    """What one request asks of its tenant's budgets. All of them must have room, or none is charged."""

    request_id: str
    tenant: str
    budgets: tuple[Budget, ...]
    tokens: int
    """Prompt estimate plus expected output."""
    lease_ms: int
    """How long the slots stay taken if nobody renews or releases them."""


class RateLimitStatus(Struct, frozen=True, gc=False):
    """Where the tightest budget stands after the verdict: the `x-ratelimit-*` headers. None: no such limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int | None = None
    """Until the whole request allowance is there again."""
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int | None = None


class Denied(Struct, frozen=True, gc=False):
    """The request may not go; nothing was charged."""

    scope: str
    dimension: str
    """`rpm`, `tpm`, `max_streams`; or `oversize`: `tokens` is more than the whole `tpm` of the scope, waiting won't help."""
    limit: int
    retry_after_ms: int
    """True waiting time, at least 1. 0 with `oversize`."""
    standing: RateLimitStatus


class Granted(Struct, frozen=True, gc=False):
    """The request may go; its tokens and slots are taken."""

    standing: RateLimitStatus
    overlooked: Denied | None = None
    """What would have refused it, were that budget enforced."""


class Ledger(Protocol):
    """Counters of all tenants, shared by every replica. Every verb may raise `LimitsUnavailable`."""

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Keep the slots of a request that still runs. False: it is unknown, or has ended."""

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back: the request has ended. Its settlement is to come."""

    async def settle(self, tenant: str, request_id: str, tokens: int) -> bool:
        """Replace the reserved tokens by the actual ones, both ways, once, and give back slots still held. False: unknown or settled."""

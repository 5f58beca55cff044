"""The port to the counters: reserve before a request is sent, release its slot when it ends, settle its cost.

Every operation names the request and is idempotent.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget


class LimitsUnavailable(Exception):  # noqa: N818 - the name says what is the matter
    """The counters are unreachable or did not answer in time."""


class Claim(Struct, frozen=True, gc=False):
    """The demand of one request on its tenant's budgets. Either all budgets are charged or none."""

    request_id: str
    tenant: str
    budgets: tuple[Budget, ...]
    tokens: int
    """Prompt estimate plus expected output."""
    lease_ms: int
    """How long the slots stay taken unless they are renewed or released."""
    spending: tuple[SpendingWindow, ...] = ()
    """A limit on the spending in a period; charged with the budgets."""
    cost: int = 0
    """Of `tokens`, in 10**-9 of the currency; 0 without `spending`."""


class RateLimitStatus(Struct, frozen=True, gc=False):
    """Status of the tightest budgets after the verdict, for the `x-ratelimit-*` headers. None: no such limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int | None = None
    """Time until the whole request allowance is available."""
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int | None = None
    exceeded: str = ""
    """The scope of a soft budget that is exceeded."""


class Denied(Struct, frozen=True, gc=False):
    """The request is refused; nothing was charged."""

    scope: str
    dimension: str
    """`rpm`, `tpm`, `max_streams`; `token_budget` or `cost_budget` of a period; or `oversize`: `tokens` exceeds the scope's whole `tpm`,
    so waiting does not help."""
    limit: int
    retry_after_ms: int
    """Exact waiting time, at least 1; 0 with `oversize`."""
    status: RateLimitStatus


class Granted(Struct, frozen=True, gc=False):
    """The request is admitted; its tokens and slots are taken."""

    status: RateLimitStatus
    shadow_denial: Denied | None = None
    """The denial by budgets that are not enforced."""
    roomy: bool = False
    """At most half of the slots of every budget are taken, so their release can wait for the settlement."""
    recorded: bool = True
    """False: nothing was charged, because no limit applies or limits can't be checked; there is nothing to settle."""


class Settlement(Struct, frozen=True, gc=False):
    """The usage of one finished request."""

    tenant: str
    request_id: str
    tokens: int | None
    """None: no node was reached, so the request's places in the windows of requests come back as well."""
    cost: int = 0
    """In 10**-9 of the currency."""


class SettlementLedger(Protocol):
    """The counters as settlement uses them."""

    async def settle_all(self, settlements: Sequence[Settlement]) -> int:
        """Replace the reserved tokens and cost of requests by the actual ones, once each, and release slots still held.

        Returns:
            The number of requests that were neither unknown nor settled before.

        Raises:
            LimitsUnavailable: Any of them may have been settled or not; repeating the call is harmless.
        """


class Ledger(Protocol):
    """Counters of all tenants, shared by every replica. Every operation may raise `LimitsUnavailable`."""

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Extend the slots of a running request. False: it is unknown or has ended."""

    async def release(self, tenant: str, request_id: str) -> None:
        """Release the slots of a request that has ended, before its settlement."""

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens and cost by the actual ones, once, and release slots still held. False: unknown or settled.

        Tokens None: no node was reached, so the request's places in the windows of requests come back as well.
        """

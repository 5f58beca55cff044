"""The in-memory ledger behind the `Ledger` port, and one replica's share of a budget.

A share is never zero, and a request that fits the whole bucket is never oversized for a share.
"""

from collections.abc import Callable
from functools import lru_cache

import msgspec

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.domain.tenant import Budget, RateLimits


class LocalLedger:
    """A `Ledger` of one process.

    Args:
        now_ms: Returns monotonic milliseconds.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._ledger = InMemoryLedger()
        self._now_ms = now_ms

    def has_record(self, tenant: str, request_id: str) -> bool:
        """Return whether the request was granted here recently."""
        return self._ledger.has_record(tenant, request_id)

    def sweep(self) -> None:
        """Delete expired state. Call it every few seconds."""
        self._ledger.sweep(self._now_ms())

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""
        return self._ledger.reserve(claim, self._now_ms())

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Extend the slots of a running request. False: it is unknown or has ended."""
        return self._ledger.renew(tenant, request_id, lease_ms, self._now_ms())

    async def release(self, tenant: str, request_id: str) -> None:
        """Release the slots of a request that has ended."""
        self._ledger.release(tenant, request_id, self._now_ms())

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens by the actual ones, once, and release slots still held. False: unknown or settled."""
        return self._ledger.settle(tenant, request_id, tokens, self._now_ms(), cost)


def scale_claim(claim: Claim, replicas: int) -> Claim:
    """Return the claim against one replica's share of its budgets.

    A claim larger than the share, but not than the bucket, takes the whole share. What may be spent in a period has no shares: only the
    common counters know what is left of it.
    """
    budgets = _scale_budgets(claim.budgets, max(1, replicas))
    tokens = claim.tokens
    if all(tokens <= budget.limits.tpm for budget in claim.budgets if budget.limits.tpm is not None):
        tokens = min([tokens, *(budget.limits.tpm for budget in budgets if budget.limits.tpm is not None)])
    return msgspec.structs.replace(claim, budgets=budgets, tokens=tokens, spending=())


@lru_cache(maxsize=4096)
def _scale_budgets(budgets: tuple[Budget, ...], replicas: int) -> tuple[Budget, ...]:
    return tuple(msgspec.structs.replace(budget, limits=_divide_limits(budget.limits, replicas)) for budget in budgets)


def _divide_limits(limits: RateLimits, replicas: int) -> RateLimits:
    def part(limit: int | None) -> int | None:
        return limit if limit is None else max(1, limit // replicas)

    return RateLimits(part(limits.rpm), part(limits.tpm), part(limits.max_streams))

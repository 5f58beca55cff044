"""The ledger of one process alone: the counters in memory behind the port, and one replica's share of a budget.

Rule: a share is never zero, and what fits the whole bucket is never called too large for its share.
"""

from collections.abc import Callable
from functools import lru_cache

import msgspec

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.domain.tenant import Budget, RateLimits


class LocalLedger:
    """A `Ledger` that no other process shares.

    Args:
        now_ms: milliseconds that only move on, from any start.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._twin = InMemoryLedger()
        self._now_ms = now_ms

    def knows(self, tenant: str, request_id: str) -> bool:
        """Whether the request was granted here and not long ago."""
        return self._twin.knows(tenant, request_id)

    def sweep(self) -> None:
        """Forget what has expired: to be called every few seconds."""
        self._twin.sweep(self._now_ms())

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""
        return self._twin.reserve(claim, self._now_ms())

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Keep the slots of a request that still runs. False: it is unknown, or has ended."""
        return self._twin.renew(tenant, request_id, lease_ms, self._now_ms())

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back: the request has ended."""
        self._twin.release(tenant, request_id, self._now_ms())

    async def settle(self, tenant: str, request_id: str, tokens: int) -> bool:
        """Replace the reserved tokens by the actual ones, both ways, once, and give back slots still held. False: unknown or settled."""
        return self._twin.settle(tenant, request_id, tokens, self._now_ms())


def share(claim: Claim, replicas: int) -> Claim:
    """The claim against this replica's share of its budgets. A claim that only the whole bucket holds takes the whole share."""
    budgets = _shares(claim.budgets, max(1, replicas))
    tokens = claim.tokens
    if all(tokens <= budget.limits.tpm for budget in claim.budgets if budget.limits.tpm is not None):
        tokens = min([tokens, *(budget.limits.tpm for budget in budgets if budget.limits.tpm is not None)])
    return msgspec.structs.replace(claim, budgets=budgets, tokens=tokens)


@lru_cache(maxsize=4096)
def _shares(budgets: tuple[Budget, ...], replicas: int) -> tuple[Budget, ...]:
    return tuple(msgspec.structs.replace(budget, limits=_divided(budget.limits, replicas)) for budget in budgets)


def _divided(limits: RateLimits, replicas: int) -> RateLimits:
    def part(limit: int | None) -> int | None:
        return limit if limit is None else max(1, limit // replicas)

    return RateLimits(part(limits.rpm), part(limits.tpm), part(limits.max_streams))

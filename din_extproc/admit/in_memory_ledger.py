"""The counters in memory: what the Lua scripts do in Redis, step for step, in Python.

Rule: the same answers and the same state as `edge/redis/lua/*.lua` for the same calls at the same times; time is an argument (ms).
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from din_extproc.admit.budget import CLOSED_MS, KEEP_MS, BudgetCounters, standing
from din_extproc.admit.ledger import Claim, Denied, Granted, RateLimitStatus
from din_extproc.domain.tenant import Budget, RateLimits

_EMPTY = BudgetCounters()
NETWORK = "\0network"
"""Stands for the tenant in the names of shared counters; no tenant is called so."""
_OVERSIZE_MS = 1 << 62
"""Longer than any wait."""


class LedgerRecord(Struct, gc=False):
    """What is remembered of one request."""

    expires_ms: int
    tokens: int
    answer: Granted
    budgets: tuple[Budget, ...]
    settled: bool = False
    released: bool = False


class InMemoryLedger:
    """All tenants' counters of one process."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], BudgetCounters] = {}
        """By owner (the tenant, or `NETWORK`) and scope."""
        self.leases: dict[tuple[str, str], dict[str, int]] = {}
        """By owner and scope: when each request's slot expires."""
        self.records: dict[tuple[str, str], LedgerRecord] = {}
        """By tenant and request id."""

    def reserve(self, claim: Claim, now_ms: int) -> Granted | Denied:
        """Check every budget, then charge every budget. A request that was granted before gets the same answer again."""
        record = self._record(claim.tenant, claim.request_id, now_ms)
        if record is not None:
            return Granted(record.answer.standing)
        states = [self._state(claim.tenant, budget, now_ms) for budget in claim.budgets]
        denied = self._refusal(claim, states, now_ms, enforced=True)
        if denied is not None:
            return denied
        shadow = not all(budget.enforced for budget in claim.budgets)
        overlooked = self._refusal(claim, states, now_ms, enforced=False) if shadow else None
        states = [_charge(budget.limits, state, claim.tokens, now_ms) for budget, state in zip(claim.budgets, states, strict=True)]
        after = _standing(claim.budgets, states, now_ms)
        answer = Granted(after, None if overlooked is None else msgspec.structs.replace(overlooked, standing=after))
        self._write(claim, states, answer, now_ms)
        return answer

    def renew(self, tenant: str, request_id: str, lease_ms: int, now_ms: int) -> bool:
        """Keep the slots and the record of a request that still runs, even if its lease has run out meanwhile. False: it does not run."""
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.released:
            return False
        for budget in record.budgets:
            if budget.limits.max_streams is not None:
                self.leases.setdefault((_owner(tenant, budget), budget.scope), {})[request_id] = now_ms + lease_ms
        record.expires_ms = max(record.expires_ms, now_ms + max(KEEP_MS, lease_ms))
        return True

    def release(self, tenant: str, request_id: str, now_ms: int) -> None:
        """Give the slots back."""
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.released:
            return
        self._free(record, tenant, request_id)
        record.expires_ms = now_ms + KEEP_MS

    def settle(self, tenant: str, request_id: str, tokens: int, now_ms: int) -> bool:
        """Replace the reserved tokens by the actual ones, once, and give back slots still held. False: unknown, expired or settled."""
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.settled:
            return False
        for budget in record.budgets:
            tpm = budget.limits.tpm
            if tpm is not None and tokens != record.tokens:
                key = _owner(tenant, budget), budget.scope
                state = self.counters.get(key, _EMPTY)
                self.counters[key] = state.drained(tpm, now_ms).charged(tokens - record.tokens, tpm)
        record.settled = True
        self._free(record, tenant, request_id)
        record.expires_ms = min(record.expires_ms, now_ms + CLOSED_MS)
        return True

    def knows(self, tenant: str, request_id: str) -> bool:
        """Whether a record of the request is here, be it expired."""
        return (tenant, request_id) in self.records

    def sweep(self, now_ms: int) -> None:
        """Forget what Redis would have expired. Reads don't need it; it bounds the memory."""
        self.records = {key: record for key, record in self.records.items() if record.expires_ms > now_ms}
        self.leases = {key: held for key, held in self.leases.items() if any(expiry > now_ms for expiry in held.values())}
        self.counters = {key: state for key, state in self.counters.items() if _alive(state, now_ms)}

    def _free(self, record: LedgerRecord, tenant: str, request_id: str) -> None:
        for budget in record.budgets:
            self.leases.get((_owner(tenant, budget), budget.scope), {}).pop(request_id, None)
        record.released = True

    def _record(self, tenant: str, request_id: str, now_ms: int) -> LedgerRecord | None:
        record = self.records.get((tenant, request_id))
        return record if record is not None and record.expires_ms > now_ms else None

    def _state(self, tenant: str, budget: Budget, now_ms: int) -> BudgetCounters:
        """The budget's counters now."""
        state = self.counters.get((_owner(tenant, budget), budget.scope), _EMPTY)
        if budget.limits.rpm is not None:
            state = state.turned(now_ms)
        if budget.limits.tpm is not None:
            state = state.drained(budget.limits.tpm, now_ms)
        return state

    def _refusal(self, claim: Claim, states: list[BudgetCounters], now_ms: int, *, enforced: bool) -> Denied | None:
        """Of the budgets that are enforced, or of the others: the first that is too small for the request, else the longest wait."""
        worst_ms, worst = 0, None
        for budget, state in zip(claim.budgets, states, strict=True):
            for dimension, limit, wait_ms in self._waits(claim, budget, state, now_ms) if budget.enforced == enforced else ():
                if wait_ms > worst_ms:
                    worst_ms, worst = wait_ms, (budget.scope, dimension, limit)
        if worst is None:
            return None
        return Denied(*worst, 0 if worst_ms == _OVERSIZE_MS else worst_ms, _standing(claim.budgets, states, now_ms))

    def _waits(self, claim: Claim, budget: Budget, state: BudgetCounters, now_ms: int) -> Iterator[tuple[str, int, int]]:
        """Dimension, limit and wait of each limit that the budget has."""
        limits = budget.limits
        if limits.rpm is not None:
            yield "rpm", limits.rpm, state.request_wait_ms(limits.rpm, now_ms)
        if limits.tpm is not None and claim.tokens > limits.tpm:
            yield "oversize", limits.tpm, _OVERSIZE_MS
        elif limits.tpm is not None:
            yield "tpm", limits.tpm, state.token_wait_ms(claim.tokens, limits.tpm)
        if limits.max_streams is not None:
            yield "max_streams", limits.max_streams, self._lease_wait_ms(_owner(claim.tenant, budget), budget, now_ms)

    def _lease_wait_ms(self, owner: str, budget: Budget, now_ms: int) -> int:
        """How long until enough leases have expired for one request more, if nobody releases or renews; 0: there is room."""
        leases, limit = self.leases.get((owner, budget.scope), {}), budget.limits.max_streams or 0
        if len(leases) < limit:
            return 0
        held = sorted(expiry for expiry in leases.values() if expiry > now_ms)
        excess = len(held) - limit
        return held[excess] - now_ms if excess >= 0 else 0

    def _write(self, claim: Claim, states: list[BudgetCounters], answer: Granted, now_ms: int) -> None:
        for budget, state in zip(claim.budgets, states, strict=True):
            key = _owner(claim.tenant, budget), budget.scope
            if budget.limits.rpm is not None or budget.limits.tpm is not None:
                self.counters[key] = state
            if budget.limits.max_streams is not None:
                held = self.leases.setdefault(key, {})
                if len(held) >= budget.limits.max_streams:  # only then; a clock that is set back finds the others still there
                    held = self.leases[key] = {request: expiry for request, expiry in held.items() if expiry > now_ms}
                held[claim.request_id] = now_ms + claim.lease_ms
        expires_ms = now_ms + max(KEEP_MS, claim.lease_ms)
        self.records[claim.tenant, claim.request_id] = LedgerRecord(expires_ms, claim.tokens, answer, claim.budgets)


def _owner(tenant: str, budget: Budget) -> str:
    """Whose counters a budget has."""
    return NETWORK if budget.shared else tenant


def _alive(state: BudgetCounters, now_ms: int) -> bool:
    return state.at_ms + KEEP_MS > now_ms or bool(state.turned(now_ms).requests)


def _charge(limits: RateLimits, state: BudgetCounters, tokens: int, now_ms: int) -> BudgetCounters:
    if limits.rpm is not None:
        state = state.counted(now_ms)
    if limits.tpm is not None:
        state = state.charged(tokens, limits.tpm)
    return state


def _standing(budgets: tuple[Budget, ...], states: list[BudgetCounters], now_ms: int) -> RateLimitStatus:
    pairs = [(budget.limits, state) for budget, state in zip(budgets, states, strict=True)]
    return standing(
        [state.request_standing(limits.rpm, now_ms) for limits, state in pairs if limits.rpm is not None],
        [state.token_standing(limits.tpm) for limits, state in pairs if limits.tpm is not None],
    )

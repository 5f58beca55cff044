"""The ledger's counters in memory: a Python model of the Lua scripts in `edge/redis/lua`.

The same calls at the same times give the same answers and the same state as in Redis. Time is an argument in milliseconds.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from din_extproc.admit.budget import RETENTION_MS, SETTLED_RETENTION_MS, BudgetCounters, tightest_status
from din_extproc.admit.ledger import Claim, Denied, Granted, RateLimitStatus
from din_extproc.admit.spending import RESERVED_MS, SpendingCounters
from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget, RateLimits

_EMPTY = BudgetCounters()
SHARED_OWNER = "\0network"
"""Owner of the counters that all tenants share; no tenant can have this name."""
FEW_STREAMS = 8
"""A smaller limit of concurrent requests is never roomy."""
_SPENT = ("token_budget", "cost_budget")
_OVERSIZE_MS = 1 << 62
"""Longer than any wait."""


class LedgerRecord(Struct, gc=False):
    """The record of one admitted request."""

    expires_ms: int
    tokens: int
    answer: Granted
    budgets: tuple[Budget, ...]
    admitted_ms: int
    spending: tuple[SpendingWindow, ...] = ()
    cost: int = 0
    settled: bool = False
    released: bool = False


class InMemoryLedger:
    """The counters of all tenants of one process."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], BudgetCounters] = {}
        """By owner (the tenant or `SHARED_OWNER`) and scope."""
        self.leases: dict[tuple[str, str], dict[str, int]] = {}
        """Expiry of each request's slot in milliseconds, by owner and scope."""
        self.records: dict[tuple[str, str], LedgerRecord] = {}
        """By tenant and request id."""
        self.spending: dict[tuple[str, str], SpendingCounters] = {}
        """Spending in a period, by owner and scope. As many as there are budgets, keys and models: none is ever deleted."""

    def reserve(self, claim: Claim, now_ms: int) -> Granted | Denied:
        """Check every budget, then charge every budget. Repeat the earlier answer for a request that was already granted."""
        record = self._record(claim.tenant, claim.request_id, now_ms)
        if record is not None:
            return Granted(msgspec.structs.replace(record.answer.status, exceeded=""))
        states = [self._state(claim.tenant, budget, now_ms) for budget in claim.budgets]
        spending = [self._spending(claim, window, now_ms) for window in claim.spending]
        denied = self._find_denial(claim, states, spending, now_ms, enforced=True)
        if denied is not None:
            self._note_refusal(claim, spending)
            return denied
        shadow = not all([budget.enforced for budget in claim.budgets] + [window.enforced for window in claim.spending])
        shadow_denial = self._find_denial(claim, states, spending, now_ms, enforced=False) if shadow else None
        states = [_charge(budget.limits, state, claim.tokens, now_ms) for budget, state in zip(claim.budgets, states, strict=True)]
        spending = [counters.hold(claim.tokens, claim.cost) for counters in spending]
        after = _status(claim, states, spending, now_ms)
        if shadow_denial is not None and shadow_denial.dimension in _SPENT:
            after = msgspec.structs.replace(after, exceeded=shadow_denial.scope)
        if shadow_denial is None:
            counted = bool(claim.spending) or any(any(budget.limits.as_tuple) for budget in claim.budgets)
            roomy = all(self._is_roomy(claim.tenant, budget) for budget in claim.budgets)
            answer = Granted(after, roomy=roomy, recorded=counted)
        else:
            answer = Granted(after, msgspec.structs.replace(shadow_denial, status=after))
        self._write(claim, states, answer, now_ms)
        self._store_spending(claim, spending)
        return answer

    def renew(self, tenant: str, request_id: str, lease_ms: int, now_ms: int) -> bool:
        """Extend the slots and the record of a running request, even if its lease has expired. False: it is not running."""
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.released:
            return False
        for budget in record.budgets:
            if budget.limits.max_streams is not None:
                self.leases.setdefault((_owner(tenant, budget), budget.scope), {})[request_id] = now_ms + lease_ms
        record.expires_ms = max(record.expires_ms, now_ms + max(RETENTION_MS, lease_ms))
        return True

    def release(self, tenant: str, request_id: str, now_ms: int) -> None:
        """Release the request's slots."""
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.released:
            return
        self._free_slots(record, tenant, request_id)
        if not record.spending:
            record.expires_ms = now_ms + RETENTION_MS

    def settle(self, tenant: str, request_id: str, tokens: int | None, now_ms: int, cost: int = 0) -> bool:
        """Replace the reserved tokens by the actual ones, once, and release slots still held. False: unknown, expired or settled.

        Tokens None: no node was reached, so the request does not count either.
        """
        record = self._record(tenant, request_id, now_ms)
        if record is None or record.settled:
            return False
        for budget in record.budgets:
            key, tpm = (_owner(tenant, budget), budget.scope), budget.limits.tpm
            state = self.counters.get(key, _EMPTY)
            if tpm is not None and (tokens or 0) != record.tokens:
                state = state.drain(tpm, now_ms).charge((tokens or 0) - record.tokens, tpm)
            if budget.limits.rpm is not None and tokens is None:
                state = state.return_request(record.admitted_ms)
            if state is not _EMPTY:
                self.counters[key] = state
        for window in record.spending:
            where = _owner(tenant, window), window.scope
            actual = (0, 0) if tokens is None else (tokens, cost)
            self.spending[where] = self.spending[where].settle((record.tokens, record.cost), actual, record.admitted_ms)
        record.settled = True
        self._free_slots(record, tenant, request_id)
        record.expires_ms = min(record.expires_ms, now_ms + SETTLED_RETENTION_MS)
        return True

    def has_record(self, tenant: str, request_id: str) -> bool:
        """Return whether a record of the request exists, expired or not."""
        return (tenant, request_id) in self.records

    def sweep(self, now_ms: int) -> None:
        """Delete expired state. Reads do not depend on it; it bounds the memory."""
        self.records = {key: record for key, record in self.records.items() if record.expires_ms > now_ms}
        self.leases = {key: held for key, held in self.leases.items() if any(expiry > now_ms for expiry in held.values())}
        self.counters = {key: state for key, state in self.counters.items() if _is_alive(state, now_ms)}

    def _free_slots(self, record: LedgerRecord, tenant: str, request_id: str) -> None:
        for budget in record.budgets:
            if budget.limits.max_streams is not None:
                self.leases.get((_owner(tenant, budget), budget.scope), {}).pop(request_id, None)
        record.released = True

    def _record(self, tenant: str, request_id: str, now_ms: int) -> LedgerRecord | None:
        record = self.records.get((tenant, request_id))
        return record if record is not None and record.expires_ms > now_ms else None

    def _state(self, tenant: str, budget: Budget, now_ms: int) -> BudgetCounters:
        """Return the budget's counters at `now_ms`."""
        state = self.counters.get((_owner(tenant, budget), budget.scope), _EMPTY)
        if budget.limits.rpm is not None:
            state = state.slide_window(now_ms)
        if budget.limits.tpm is not None:
            state = state.drain(budget.limits.tpm, now_ms)
        return state

    def _spending(self, claim: Claim, window: SpendingWindow, now_ms: int) -> SpendingCounters:
        """Return the counters of a period at `now_ms`, with a note if the claim exceeds them."""
        found = self.spending.get((_owner(claim.tenant, window), window.scope), SpendingCounters()).advance(window, now_ms)
        exceeded = any(_excess(claim, window, found))
        return msgspec.structs.replace(found, refused=1) if exceeded else found

    def _note_refusal(self, claim: Claim, spending: list[SpendingCounters]) -> None:
        """Remember in the counters that a claim exceeded them in this period; nothing else of it."""
        for window, counters in zip(claim.spending, spending, strict=True):
            where = _owner(claim.tenant, window), window.scope
            before = self.spending.get(where, SpendingCounters())
            if counters.refused and not (before.refused and before.start == counters.start):
                self.spending[where] = counters

    def _store_spending(self, claim: Claim, spending: list[SpendingCounters]) -> None:
        for window, counters in zip(claim.spending, spending, strict=True):
            self.spending[_owner(claim.tenant, window), window.scope] = counters

    def _find_denial(
        self, claim: Claim, states: list[BudgetCounters], spending: list[SpendingCounters], now_ms: int, *, enforced: bool
    ) -> Denied | None:
        """Return the denial by the budgets that are enforced, or by the others: an oversized request first, else the longest wait."""
        worst_ms, worst = 0, None
        for budget, state in zip(claim.budgets, states, strict=True):
            for dimension, limit, wait_ms in self._waits(claim, budget, state, now_ms) if budget.enforced == enforced else ():
                if wait_ms > worst_ms:
                    worst_ms, worst = wait_ms, (budget.scope, dimension, limit)
        for window, counters in zip(claim.spending, spending, strict=True):
            wait_ms = _wait_ms(window, now_ms)
            for dimension, limit in _excess(claim, window, counters) if window.enforced == enforced and wait_ms > worst_ms else ():
                worst_ms, worst = wait_ms, (window.scope, dimension, limit)
                break
        if worst is None:
            return None
        return Denied(*worst, 0 if worst_ms == _OVERSIZE_MS else worst_ms, _status(claim, states, spending, now_ms))

    def _waits(self, claim: Claim, budget: Budget, state: BudgetCounters, now_ms: int) -> Iterator[tuple[str, int, int]]:
        """Yield dimension, limit and wait in milliseconds for each limit of the budget."""
        limits = budget.limits
        if limits.rpm is not None:
            yield "rpm", limits.rpm, state.request_wait_ms(limits.rpm, now_ms)
        if limits.tpm is not None and claim.tokens > limits.tpm:
            yield "oversize", limits.tpm, _OVERSIZE_MS
        elif limits.tpm is not None:
            yield "tpm", limits.tpm, state.token_wait_ms(claim.tokens, limits.tpm)
        if limits.max_streams is not None:
            yield "max_streams", limits.max_streams, self._lease_wait_ms(_owner(claim.tenant, budget), budget, now_ms)

    def _is_roomy(self, tenant: str, budget: Budget) -> bool:
        """Return whether at most half of the budget's slots are taken, one more included. A small limit is never roomy."""
        limit = budget.limits.max_streams
        held = len(self.leases.get((_owner(tenant, budget), budget.scope), {}))
        return limit is None or (limit >= FEW_STREAMS and 2 * (held + 1) <= limit)

    def _lease_wait_ms(self, owner: str, budget: Budget, now_ms: int) -> int:
        """Return the time until enough leases have expired for one more request, assuming no release or renewal; 0: there is room."""
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
                if (
                    len(held) >= budget.limits.max_streams
                ):  # # expired leases are dropped only when the limit is reached, so that they survive a clock that is set back
                    held = self.leases[key] = {request: expiry for request, expiry in held.items() if expiry > now_ms}
                held[claim.request_id] = now_ms + claim.lease_ms
        expires_ms = now_ms + max(RETENTION_MS, claim.lease_ms, RESERVED_MS if claim.spending else 0)
        self.records[claim.tenant, claim.request_id] = LedgerRecord(
            expires_ms, claim.tokens, answer, claim.budgets, now_ms, spending=claim.spending, cost=claim.cost
        )


def _excess(claim: Claim, window: SpendingWindow, counters: SpendingCounters) -> Iterator[tuple[str, int]]:
    """Yield dimension and limit of what the claim exceeds."""
    tokens, cost = counters.token_limit(window), counters.cost_limit(window)
    if tokens and counters.used_tokens + claim.tokens > tokens:
        yield "token_budget", tokens
    if cost and counters.used_cost + claim.cost > cost:
        yield "cost_budget", cost


def _wait_ms(window: SpendingWindow, now_ms: int) -> int:
    return max(1, window.period_at(now_ms)[1] - now_ms)


def _owner(tenant: str, budget: Budget | SpendingWindow) -> str:
    """Return the owner of a budget's counters."""
    return SHARED_OWNER if budget.shared else tenant


def _is_alive(state: BudgetCounters, now_ms: int) -> bool:
    return state.at_ms + RETENTION_MS > now_ms or bool(state.slide_window(now_ms).requests)


def _charge(limits: RateLimits, state: BudgetCounters, tokens: int, now_ms: int) -> BudgetCounters:
    if limits.rpm is not None:
        state = state.count_request(now_ms)
    if limits.tpm is not None:
        state = state.charge(tokens, limits.tpm)
    return state


def _status(claim: Claim, states: list[BudgetCounters], spending: list[SpendingCounters], now_ms: int) -> RateLimitStatus:
    pairs = [(budget.limits, state) for budget, state in zip(claim.budgets, states, strict=True)]
    periods = [
        (limit, max(0, limit - counters.used_tokens), _wait_ms(window, now_ms))
        for window, counters in zip(claim.spending, spending, strict=True)
        if window.enforced and (limit := counters.token_limit(window))
    ]
    return tightest_status(
        [state.request_status(limits.rpm, now_ms) for limits, state in pairs if limits.rpm is not None],
        [*(state.token_status(limits.tpm) for limits, state in pairs if limits.tpm is not None), *periods],
    )

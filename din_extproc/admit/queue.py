"""Requests that wait for a tenant's tokens or slots, and the order in which they ask the ledger again. Times are arguments in milliseconds.

Order is first come, first served within a tenant and class. Tenants that compete for a shared limit are ordered by class, then by least
service per weight, and a small request does not overtake a larger one. A tenant that lacks only its own limits delays no other tenant.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import LONG_TAIL, RANK, Queueing

RECHECK_MS = 500
"""The interval after which a waiting request asks again even without a notification."""
_QUEUEABLE = frozenset({"tpm", "max_streams"})
"""Dimensions that recover by themselves or when requests end. Requests per minute recover too slowly."""
_MAX_REMEMBERED = 1024
_MAX_LAG_REQUESTS = 16
"""The largest lag, in requests, of a tenant that starts to queue here: it may have queued in other workers before."""
_RECENT_GRANTS = 64
"""A tenant without a grant among so many latest grants was idle and has no claim to catch up."""
_RANKS = len(RANK)


class Ticket(Struct, eq=False):
    """One waiting request."""

    claim: Claim
    priority: Priority
    queueing: Queueing
    deadline_ms: int
    denied: Denied | None = None
    """The latest denial; None before the first attempt."""
    left: bool = False
    """The request has left the queue."""

    @property
    def shared(self) -> frozenset[str]:
        """The scopes of its budgets that all tenants share."""
        return frozenset(budget.scope for budget in self.claim.budgets if budget.shared)

    @property
    def cost(self) -> float:
        """Tokens divided by weight."""
        return self.claim.tokens / self.queueing.weight


def is_queueable(denied: Denied) -> bool:
    """Return whether the missing resource recovers soon enough for a client to wait, with the tenant's later requests behind it."""
    return denied.dimension in _QUEUEABLE and not denied.scope.startswith(LONG_TAIL)


class TenantQueue:
    """The waiting requests of one tenant, by class, oldest first."""

    __slots__ = ("classes", "denied_scope", "retry_at_ms", "served")

    def __init__(self, served: float) -> None:
        self.classes: tuple[deque[Ticket], ...] = tuple(deque() for _ in range(_RANKS))
        self.retry_at_ms = 0
        self.served = served
        """Tokens divided by weight: the virtual time of fair queueing."""
        self.denied_scope = ""
        """The scope that denied the head's latest attempt."""

    def __len__(self) -> int:
        return sum(map(len, self.classes))

    def __iter__(self) -> Iterator[Ticket]:
        for each in self.classes:
            yield from each

    @property
    def head(self) -> Ticket:
        """The request that asks next."""
        return next(iter(self))

    @property
    def order(self) -> tuple[int, float]:
        """Sort key among tenants."""
        return RANK[self.head.priority], self.served


class QueueState:
    """All waiting requests of one process.

    Args:
        capacity: The largest number of waiting requests.
        reserved: The number of these places that only critical requests may take.
    """

    def __init__(self, capacity: int = 1000, reserved: int = 200) -> None:
        self._capacity = capacity
        self._reserved = reserved
        self._queues: dict[str, TenantQueue] = {}
        self._served: dict[str, tuple[float, int]] = {}
        """For tenants without waiting requests, latest last: their service and the number of grants at that time."""
        self._grants = 0
        self._clock = 0.0
        self._count = 0
        self._joined = 0
        self._deadlines: list[tuple[int, int, Ticket]] = []
        """A heap; tickets that have left are removed when they reach the top."""

    def __len__(self) -> int:
        return self._count

    def count_by_tenant(self) -> dict[str, int]:
        """Return the number of waiting requests by tenant."""
        return {tenant: len(queue) for tenant, queue in self._queues.items()}

    def must_queue(self, claim: Claim, priority: Priority) -> bool:
        """Return whether a new request must queue because a waiting request has precedence."""
        rank = RANK[priority]
        own = self._queues.get(claim.tenant)
        if own is not None and any(own.classes[: rank + 1]):
            return True
        scopes = {budget.scope for budget in claim.budgets if budget.shared}
        return bool(scopes) and any(queue.denied_scope in scopes and RANK[queue.head.priority] <= rank for queue in self._queues.values())

    def join(self, ticket: Ticket) -> bool:
        """Append the ticket to its tenant's queue. False: that queue or the whole is full."""
        queue = self._queues.get(ticket.claim.tenant)
        places = self._capacity if ticket.priority is Priority.CRITICAL else self._capacity - self._reserved
        if self._count >= places or (queue is not None and len(queue) >= ticket.queueing.size):
            return False
        if queue is None:
            queue = self._queues[ticket.claim.tenant] = TenantQueue(self._compute_initial_service(ticket))
        queue.classes[RANK[ticket.priority]].append(ticket)
        self._joined += 1
        heappush(self._deadlines, (ticket.deadline_ms, self._joined, ticket))
        if queue.head is ticket:
            queue.retry_at_ms = 0
        self._count += 1
        return True

    def leave(self, ticket: Ticket, *, granted: bool = False) -> None:
        """Remove the ticket. `granted`: because the ledger admitted it."""
        ticket.left = True
        tenant = ticket.claim.tenant
        queue = self._queues[tenant]
        was_head = queue.head is ticket
        queue.classes[RANK[ticket.priority]].remove(ticket)
        self._count -= 1
        if granted:
            self._grants += 1
            self._clock = max(self._clock, queue.served)
            queue.served += ticket.cost
        if was_head:
            queue.retry_at_ms, queue.denied_scope = 0, ""
        if not len(queue):
            del self._queues[tenant]
            self._remember_service(tenant, queue.served)

    def record_remote_grant(self, tenant: str, cost: float) -> None:
        """Count a grant of shared limits by another process; `cost` is tokens divided by weight."""
        self._grants += 1
        queue = self._queues.get(tenant)
        if queue is not None:
            queue.served += cost
        else:
            self._remember_service(tenant, self._get_remembered_service(tenant) + cost)

    def next_ticket(self, now_ms: int) -> Ticket | None:
        """Return the ticket that may ask the ledger now; None: none may yet."""
        held: set[str] = set()
        for queue in sorted(self._queues.values(), key=_order):
            head = queue.head
            blocked = queue.retry_at_ms > now_ms
            if not blocked and held.isdisjoint(head.shared):
                return head
            if queue.denied_scope in head.shared:
                held.add(queue.denied_scope)
        return None

    def record_denial(self, ticket: Ticket, denied: Denied, now_ms: int) -> None:
        """Record a denial of the ticket's attempt."""
        ticket.denied = denied
        queue = self._queues[ticket.claim.tenant]
        if queue.head is ticket:
            refill_ms = denied.retry_after_ms if denied.dimension == "tpm" else RECHECK_MS
            queue.retry_at_ms = now_ms + min(refill_ms, RECHECK_MS)
            queue.denied_scope = denied.scope

    def on_freed(self, tenant: str) -> None:
        """Let the tenant's head ask again: some of its tokens or slots were freed."""
        queue = self._queues.get(tenant)
        if queue is not None:
            queue.retry_at_ms = 0

    def on_shared_freed(self) -> None:
        """Let the heads that lack a shared limit ask again."""
        for queue in self._queues.values():
            if queue.denied_scope in queue.head.shared:
                queue.retry_at_ms = 0

    def on_any_freed(self) -> None:
        """Let every tenant's head ask again."""
        for queue in self._queues.values():
            queue.retry_at_ms = 0

    def next_expired(self, now_ms: int) -> Ticket | None:
        """Return a ticket whose deadline has passed, or None."""
        due = self._deadlines
        while due and due[0][2].left:
            heappop(due)
        return due[0][2] if due and due[0][0] <= now_ms else None

    def next_action_ms(self, now_ms: int) -> int:
        """Return the time of the next possible action if nothing is freed. Call it after `next_expired`."""
        retries = [queue.retry_at_ms for queue in self._queues.values() if queue.retry_at_ms > now_ms]
        return min((now_ms + RECHECK_MS, *retries, *(each[0] for each in self._deadlines[:1])))

    def next_vacancy_ms(self, claim: Claim, now_ms: int) -> int:
        """Return the time until a place in the queue that is full for this claim is free at the latest; at least 1."""
        queue = self._queues.get(claim.tenant)
        tickets = queue if queue is not None else (ticket for each in self._queues.values() for ticket in each)
        return max(1, min((ticket.deadline_ms for ticket in tickets), default=now_ms) - now_ms)

    def _compute_initial_service(self, ticket: Ticket) -> float:
        """Return the initial service of a tenant that starts to queue."""
        return max(self._get_remembered_service(ticket.claim.tenant), self._clock - _MAX_LAG_REQUESTS * ticket.cost)

    def _get_remembered_service(self, tenant: str) -> float:
        served, grants = self._served.pop(tenant, (self._clock, 0))
        return served if self._grants - grants <= _RECENT_GRANTS else max(served, self._clock)

    def _remember_service(self, tenant: str, served: float) -> None:
        self._served.pop(tenant, None)
        while len(self._served) >= _MAX_REMEMBERED:
            del self._served[next(iter(self._served))]
        self._served[tenant] = served, self._grants


def _order(queue: TenantQueue) -> tuple[int, float]:
    return queue.order

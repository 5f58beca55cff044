"""Who waits for a tenant's tokens or slots, and whose turn it is to ask for them again (R31). No clock, no I/O: times are arguments, in ms.

Rule: nobody overtakes within a tenant and class; where tenants compete for what they share, class goes first, then the least served by
weight, and who comes behind waits for who is before, however small. What is short for one tenant alone holds up nobody else.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import RANK, Queueing

LOOK_AGAIN_MS = 500
"""Somebody may free something without being heard: whoever waits asks again after so long."""
_WAITED_FOR = frozenset({"tpm", "max_streams"})
"""What comes back by itself or with the end of requests. A request per minute does so too slowly."""
_REMEMBERED = 1024
_CREDIT = 16
"""Requests by which a tenant that begins to wait here may be behind the others: it waited elsewhere all the time."""
_LATELY = 64
"""Grants ago. Who was granted nothing anywhere since then was away, and is owed nothing."""
_RANKS = len(RANK)


class Ticket(Struct, eq=False):
    """One request that waits."""

    claim: Claim
    priority: Priority
    queueing: Queueing
    deadline_ms: int
    denied: Denied | None = None
    """The latest answer; None: not asked yet."""
    gone: bool = False
    """Nobody waits for it any more."""

    @property
    def shared(self) -> frozenset[str]:
        """The scopes of its budgets that all tenants share."""
        return frozenset(budget.scope for budget in self.claim.budgets if budget.shared)

    @property
    def cost(self) -> float:
        """Tokens by weight."""
        return self.claim.tokens / self.queueing.weight


def worth_waiting(denied: Denied) -> bool:
    """Whether what is short comes back in time that a client may wait."""
    return denied.dimension in _WAITED_FOR


class TenantQueue:
    """The requests of one tenant, by class, oldest first."""

    __slots__ = ("asks_at_ms", "classes", "served", "short")

    def __init__(self, served: float) -> None:
        self.classes: tuple[deque[Ticket], ...] = tuple(deque() for _ in range(_RANKS))
        self.asks_at_ms = 0
        self.served = served
        """Tokens by weight: the virtual time of fair queueing."""
        self.short = ""
        """The scope that was short when its first was last asked for."""

    def __len__(self) -> int:
        return sum(map(len, self.classes))

    def __iter__(self) -> Iterator[Ticket]:
        for each in self.classes:
            yield from each

    @property
    def first(self) -> Ticket:
        """Who asks next."""
        return next(iter(self))

    @property
    def order(self) -> tuple[int, float]:
        """Where it stands among tenants."""
        return RANK[self.first.priority], self.served


class QueueState:
    """All requests that wait in one process.

    Args:
        capacity: How many at most.
        reserved: How many of these places only critical requests may take.
    """

    def __init__(self, capacity: int = 1000, reserved: int = 200) -> None:
        self._capacity = capacity
        self._reserved = reserved
        self._lines: dict[str, TenantQueue] = {}
        self._served: dict[str, tuple[float, int]] = {}
        """Of tenants without a line, the latest last: what they were served, and how many grants there had been by then."""
        self._grants = 0
        self._clock = 0.0
        self._count = 0
        self._joined = 0
        self._deadlines: list[tuple[int, int, Ticket]] = []
        """A heap; who has left is still in it until it is at the top."""

    def __len__(self) -> int:
        return self._count

    def by_tenant(self) -> dict[str, int]:
        """How many of each."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def is_behind(self, claim: Claim, priority: Priority) -> bool:
        """Whether somebody waits whom a newcomer must not overtake."""
        rank = RANK[priority]
        own = self._lines.get(claim.tenant)
        if own is not None and any(own.classes[: rank + 1]):
            return True
        scopes = {budget.scope for budget in claim.budgets if budget.shared}
        return bool(scopes) and any(line.short in scopes and RANK[line.first.priority] <= rank for line in self._lines.values())

    def join(self, ticket: Ticket) -> bool:
        """Wait behind the others. False: the tenant's queue is full, or the whole."""
        line = self._lines.get(ticket.claim.tenant)
        places = self._capacity if ticket.priority is Priority.CRITICAL else self._capacity - self._reserved
        if self._count >= places or (line is not None and len(line) >= ticket.queueing.size):
            return False
        if line is None:
            line = self._lines[ticket.claim.tenant] = TenantQueue(self._start(ticket))
        line.classes[RANK[ticket.priority]].append(ticket)
        self._joined += 1
        heappush(self._deadlines, (ticket.deadline_ms, self._joined, ticket))
        if line.first is ticket:
            line.asks_at_ms = 0
        self._count += 1
        return True

    def leave(self, ticket: Ticket, *, granted: bool = False) -> None:
        """It waits no longer. `granted`: because it has what it waited for."""
        ticket.gone = True
        tenant = ticket.claim.tenant
        line = self._lines[tenant]
        was_first = line.first is ticket
        line.classes[RANK[ticket.priority]].remove(ticket)
        self._count -= 1
        if granted:
            self._grants += 1
            self._clock = max(self._clock, line.served)
            line.served += ticket.cost
        if was_first:
            line.asks_at_ms, line.short = 0, ""
        if not len(line):
            del self._lines[tenant]
            self._remember(tenant, line.served)

    def granted_elsewhere(self, tenant: str, cost: float) -> None:
        """Another process has granted the tenant so much, tokens by weight, of what tenants share."""
        self._grants += 1
        line = self._lines.get(tenant)
        if line is not None:
            line.served += cost
        else:
            self._remember(tenant, self._known(tenant) + cost)

    def turn(self, now_ms: int) -> Ticket | None:
        """Who asks now; None: nobody yet."""
        held: set[str] = set()
        for line in sorted(self._lines.values(), key=_order):
            first = line.first
            blocked = line.asks_at_ms > now_ms
            if not blocked and held.isdisjoint(first.shared):
                return first
            if line.short in first.shared:
                held.add(line.short)
        return None

    def denied(self, ticket: Ticket, denied: Denied, now_ms: int) -> None:
        """It has asked in vain."""
        ticket.denied = denied
        line = self._lines[ticket.claim.tenant]
        if line.first is ticket:
            refill_ms = denied.retry_after_ms if denied.dimension == "tpm" else LOOK_AGAIN_MS
            line.asks_at_ms = now_ms + min(refill_ms, LOOK_AGAIN_MS)
            line.short = denied.scope

    def freed(self, tenant: str) -> None:
        """Something came back to the tenant."""
        line = self._lines.get(tenant)
        if line is not None:
            line.asks_at_ms = 0

    def freed_for_all(self) -> None:
        """Something came back of what tenants share."""
        for line in self._lines.values():
            if line.short in line.first.shared:
                line.asks_at_ms = 0

    def freed_somehow(self) -> None:
        """Something may have come back to anybody."""
        for line in self._lines.values():
            line.asks_at_ms = 0

    def overdue(self, now_ms: int) -> Ticket | None:
        """One whose time is over."""
        due = self._deadlines
        while due and due[0][2].gone:
            heappop(due)
        return due[0][2] if due and due[0][0] <= now_ms else None

    def due_ms(self, now_ms: int) -> int:
        """When something may be to be done if nobody frees anything. Called after `overdue`."""
        asks = [line.asks_at_ms for line in self._lines.values() if line.asks_at_ms > now_ms]
        return min((now_ms + LOOK_AGAIN_MS, *asks, *(each[0] for each in self._deadlines[:1])))

    def place_in_ms(self, claim: Claim, now_ms: int) -> int:
        """When, at the latest, somebody who waits now will have left the queue that is full for this claim."""
        line = self._lines.get(claim.tenant)
        tickets = line if line is not None else (ticket for each in self._lines.values() for ticket in each)
        return max(1, min((ticket.deadline_ms for ticket in tickets), default=now_ms) - now_ms)

    def _start(self, ticket: Ticket) -> float:
        """Where a tenant stands that begins to wait."""
        return max(self._known(ticket.claim.tenant), self._clock - _CREDIT * ticket.cost)

    def _known(self, tenant: str) -> float:
        served, grants = self._served.pop(tenant, (self._clock, 0))
        return served if self._grants - grants <= _LATELY else max(served, self._clock)

    def _remember(self, tenant: str, served: float) -> None:
        self._served.pop(tenant, None)
        while len(self._served) >= _REMEMBERED:
            del self._served[next(iter(self._served))]
        self._served[tenant] = served, self._grants


def _order(line: TenantQueue) -> tuple[int, float]:
    return line.order

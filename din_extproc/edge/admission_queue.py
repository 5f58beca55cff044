"""Admission queue of a process: waiting requests are futures, and one task retries the reservation of the next request on wake-ups.

Invariant: an empty queue has no task, no timer and no Redis traffic. A grant that arrives after cancellation is released.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from din_extproc.admit.ledger import Claim, Denied, Granted, Ledger, LimitsUnavailable
from din_extproc.admit.queue import QueueState, Ticket, is_queueable
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Queueing
from din_extproc.flow.queueing import QueueFull

_MARGIN_MS = 1000


class WakeupChannel(Protocol):
    """Notifications of resources released in any process."""

    def request_wakeup(self, tenant: str, lasting_ms: int) -> None:
        """Request wake-ups for the tenant and for shared limits for `lasting_ms`."""

    def announce_grant(self, tenant: str, cost: float) -> None:
        """Publish that the tenant was granted `cost` (tokens divided by weight) of shared limits."""


class AdmissionQueue:
    """Waiting requests of one process.

    Args:
        ledger: Ledger that grants reservations.
        wakeups: Source of wake-ups.
        shared: Returns whether limits are shared by all replicas; otherwise requests are not queued.
        now_ms: Monotonic clock in milliseconds.
        start: Starts a background coroutine.
        queue: Order of requests.
    """

    def __init__(
        self,
        ledger: Ledger,
        wakeups: WakeupChannel,
        shared: Callable[[], bool],
        now_ms: Callable[[], int],
        start: Callable[[Coroutine[Any, Any, None]], None],
        queue: QueueState,
    ) -> None:
        self._start = start
        self._ledger = ledger
        self._wakeups = wakeups
        self._shared = shared
        self._now_ms = now_ms
        self._queue = queue
        self._futures: dict[Ticket, asyncio.Future[Granted | Denied]] = {}
        self._wanted: dict[str, int] = {}
        """End of the requested wake-ups, by tenant."""
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts = dict.fromkeys(("granted", "expired", "full", "left"), 0)
        """Outcomes of waits, and rejected requests."""

    def __len__(self) -> int:
        return len(self._queue)

    def must_queue(self, claim: Claim, priority: Priority) -> bool:
        """Return whether a waiting request has precedence over the claim."""
        return self._queue.must_queue(claim, priority)

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, deadline_ms: int) -> Granted | Denied | QueueFull:
        """Wait until the claim is granted or `patience_ms` expires; then return the denial. Cancellation leaves the queue.

        Raises:
            LimitsUnavailable: Redis is unreachable and the policy is `closed`.
        """
        if not self._shared():
            return await self._ledger.reserve(claim)
        now_ms = self._now_ms()
        ticket = Ticket(claim, priority, queueing, now_ms + deadline_ms)
        if not self._queue.join(ticket):
            self.counts["full"] += 1
            return QueueFull(self._queue.next_vacancy_ms(claim, now_ms))
        self._request_wakeup(claim.tenant, now_ms, deadline_ms)
        future: asyncio.Future[Granted | Denied] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._schedule_attempt()
        try:
            return await future
        except LimitsUnavailable:
            raise
        except BaseException:
            self.counts["left"] += 1
            if future.done() and not future.cancelled() and isinstance(future.result(), Granted):  # granted after cancellation
                self._start(self._refund(claim))
            raise
        finally:
            del self._futures[ticket]
            if not ticket.left:
                self._queue.leave(ticket)
                self._schedule_attempt()

    def on_freed(self, tenant: str | None) -> None:
        """Handle released resources of a tenant; None: of shared limits."""
        if not self._queue:
            return
        if tenant is None:
            self._queue.on_shared_freed()
        else:
            self._queue.on_freed(tenant)
        self._rung.set()

    def on_remote_grant(self, tenant: str, cost: float) -> None:
        """Record a grant of shared limits by another process."""
        self._queue.record_remote_grant(tenant, cost)

    def on_any_freed(self) -> None:
        """Retry all tenants after wake-ups may have been missed."""
        if self._queue:
            self._queue.on_any_freed()
            self._rung.set()

    async def close(self) -> None:
        """Stop retries."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def snapshot(self) -> dict[str, object]:
        """Return the state for the admin page."""
        return {"waiting": len(self._queue), "by_tenant": self._queue.count_by_tenant(), **self.counts}

    def _request_wakeup(self, tenant: str, now_ms: int, deadline_ms: int) -> None:
        """Request wake-ups before a retry, so that no release between the two is missed."""
        if self._wanted.get(tenant, 0) < now_ms + deadline_ms:
            lasting_ms = 2 * deadline_ms + _MARGIN_MS
            self._wanted[tenant] = now_ms + lasting_ms
            self._wakeups.request_wakeup(tenant, lasting_ms)

    def _schedule_attempt(self) -> None:
        self._rung.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._reserve_in_order(), name="queue")

    async def _reserve_in_order(self) -> None:
        while self._queue:
            self._rung.clear()
            now_ms = self._now_ms()
            overdue = self._queue.next_expired(now_ms)
            ticket = overdue or self._queue.next_ticket(now_ms)
            if ticket is not None:
                await self._reserve(ticket, last=overdue is not None)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((self._queue.next_action_ms(now_ms) - now_ms) / 1000):
                    await self._rung.wait()
        self._wanted = {tenant: until for tenant, until in self._wanted.items() if until > self._now_ms()}

    async def _reserve(self, ticket: Ticket, *, last: bool) -> None:
        """Retry one reservation. `last`: return a denial to the caller too."""
        try:
            reply = await self._ledger.reserve(ticket.claim)
        except LimitsUnavailable as error:
            self._end(ticket, error)
            return
        if isinstance(reply, Granted):
            await self._grant(ticket, reply)
        elif last or not is_queueable(reply) or not self._shared():
            self._end(ticket, reply)
        elif not ticket.left:
            self._queue.record_denial(ticket, reply, self._now_ms())

    async def _grant(self, ticket: Ticket, granted: Granted) -> None:
        if ticket.left or self._futures[ticket].done():
            await self._refund(ticket.claim)
            return
        self.counts["granted"] += 1
        if ticket.shared:
            self._wakeups.announce_grant(ticket.claim.tenant, ticket.cost)
        self._queue.leave(ticket, granted=True)
        self._futures[ticket].set_result(granted)

    async def _refund(self, claim: Claim) -> None:
        with contextlib.suppress(LimitsUnavailable):
            await self._ledger.settle(claim.tenant, claim.request_id, None)

    def _end(self, ticket: Ticket, answer: Denied | LimitsUnavailable) -> None:
        if ticket.left or self._futures[ticket].done():
            return
        self._queue.leave(ticket)
        if isinstance(answer, LimitsUnavailable):
            self._futures[ticket].set_exception(answer)
        else:
            self.counts["expired"] += 1
            self._futures[ticket].set_result(answer)

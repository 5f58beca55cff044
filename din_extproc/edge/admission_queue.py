"""Where requests wait for tokens and slots: futures, one task that asks for whoever's turn it is, and the bell that wakes it.

Rule: while nobody waits there is no task, no timer and no word to Redis. A request that was given up gets back what it is granted late.
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
    """Rings when something comes back to a tenant, in whatever process."""

    def want(self, tenant: str, lasting_ms: int) -> None:
        """From now on, for so long, it has to ring for this tenant and for what all share."""

    def granted(self, tenant: str, cost: float) -> None:
        """Tell other processes that the tenant has got so much, tokens by weight, of what tenants share."""


class AdmissionQueue:
    """All requests of one process that wait.

    Args:
        ledger: Asked again and again.
        bell: Told who waits.
        shared: Whether the counters are those that all replicas share: otherwise nobody waits.
        now_ms: Milliseconds that only move on.
        start: Runs a coroutine that nobody waits for.
        queue: Who is next.
    """

    def __init__(
        self,
        ledger: Ledger,
        bell: WakeupChannel,
        shared: Callable[[], bool],
        now_ms: Callable[[], int],
        start: Callable[[Coroutine[Any, Any, None]], None],
        queue: QueueState,
    ) -> None:
        self._start = start
        self._ledger = ledger
        self._bell = bell
        self._shared = shared
        self._now_ms = now_ms
        self._queue = queue
        self._futures: dict[Ticket, asyncio.Future[Granted | Denied]] = {}
        self._wanted: dict[str, int] = {}
        """By tenant, until when the bell rings for it."""
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts = dict.fromkeys(("granted", "expired", "full", "left"), 0)
        """How waits have ended, and how many were turned away."""

    def __len__(self) -> int:
        return len(self._queue)

    def must_queue(self, claim: Claim, priority: Priority) -> bool:
        """Whether somebody waits whom a newcomer must not overtake."""
        return self._queue.must_queue(claim, priority)

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, patience_ms: int) -> Granted | Denied | QueueFull:
        """Until the claim is granted, or the patience is at its end: then what was short. Cancelled: it leaves.

        Raises:
            LimitsUnavailable: the counters are gone, and the policy is to let nothing pass.
        """
        if not self._shared():
            return await self._ledger.reserve(claim)
        now_ms = self._now_ms()
        ticket = Ticket(claim, priority, queueing, now_ms + patience_ms)
        if not self._queue.join(ticket):
            self.counts["full"] += 1
            return QueueFull(self._queue.next_vacancy_ms(claim, now_ms))
        self._want(claim.tenant, now_ms, patience_ms)
        future: asyncio.Future[Granted | Denied] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._go_on()
        try:
            return await future
        except LimitsUnavailable:
            raise
        except BaseException:
            self.counts["left"] += 1
            if future.done() and not future.cancelled() and isinstance(future.result(), Granted):  # it came, and nobody took it
                self._start(self._give_back(claim))
            raise
        finally:
            del self._futures[ticket]
            if not ticket.left:
                self._queue.leave(ticket)
                self._go_on()

    def ring(self, tenant: str | None) -> None:
        """Something came back to the tenant; None: of what all tenants share."""
        if not self._queue:
            return
        if tenant is None:
            self._queue.on_shared_freed()
        else:
            self._queue.on_freed(tenant)
        self._rung.set()

    def granted_elsewhere(self, tenant: str, cost: float) -> None:
        """Another process has granted the tenant so much of what tenants share."""
        self._queue.record_remote_grant(tenant, cost)

    def ring_for_everybody(self) -> None:
        """Nobody knows what came back meanwhile."""
        if self._queue:
            self._queue.on_any_freed()
            self._rung.set()

    async def close(self) -> None:
        """Ask for nobody any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def shown(self) -> dict[str, object]:
        """For the admin page."""
        return {"waiting": len(self._queue), "by_tenant": self._queue.count_by_tenant(), **self.counts}

    def _want(self, tenant: str, now_ms: int, patience_ms: int) -> None:
        """What is asked for after this sees whatever was freed before, and the bell rings for what is freed later."""
        if self._wanted.get(tenant, 0) < now_ms + patience_ms:
            lasting_ms = 2 * patience_ms + _MARGIN_MS
            self._wanted[tenant] = now_ms + lasting_ms
            self._bell.want(tenant, lasting_ms)

    def _go_on(self) -> None:
        self._rung.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._ask_in_turn(), name="queue")

    async def _ask_in_turn(self) -> None:
        while self._queue:
            self._rung.clear()
            now_ms = self._now_ms()
            overdue = self._queue.next_expired(now_ms)
            ticket = overdue or self._queue.next_ticket(now_ms)
            if ticket is not None:
                await self._ask(ticket, last=overdue is not None)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((self._queue.next_action_ms(now_ms) - now_ms) / 1000):
                    await self._rung.wait()
        self._wanted = {tenant: until for tenant, until in self._wanted.items() if until > self._now_ms()}

    async def _ask(self, ticket: Ticket, *, last: bool) -> None:
        """Ask for one of them. `last`: it gets the answer, whatever that is."""
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
            await self._give_back(ticket.claim)
            return
        self.counts["granted"] += 1
        if ticket.shared:
            self._bell.granted(ticket.claim.tenant, ticket.cost)
        self._queue.leave(ticket, granted=True)
        self._futures[ticket].set_result(granted)

    async def _give_back(self, claim: Claim) -> None:
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

"""One gateway: the product's own pipeline, limits, queue, breakers and lessons, in virtual time.

Rule: nothing is decided here that the product's modules decide; this module gives them their ports and their time.
"""

from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.admit.queue import QueueState, Ticket, is_queueable
from din_extproc.admit.reservation import OutputHistory
from din_extproc.domain.health import BreakerState
from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Queueing
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.decision import Decision, DecisionContext, PendingRequest
from din_extproc.flow.node_selector import NodeSelector
from din_extproc.flow.pipeline import decide
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.queueing import QueueFull
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind
from din_extproc.health.exchanges import classify_attempt, classify_exchange
from din_extproc.health.registry import BreakerRegistry
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pace import NodePaces
from din_extproc.tools.simulate.plan import SimulationPlan
from din_extproc.tools.simulate.traffic import Arrival
from din_extproc.tools.virtual_time import LEASE_MS, Pause, VirtualClock, VirtualLedger, resume, run_now

_SPREAD = 0x9E3779B97F4A7C15

PendingDecision = Coroutine[Any, Any, Decision | Refusal]


class SimulatedWait(Struct, frozen=True, gc=False):
    """A request waits in the tenant's queue."""

    ticket: Ticket
    decision: PendingDecision
    """Goes on when its turn has come."""


class SimulatedReplica:
    """One gateway.

    Args:
        plan: The network.
        counters: Of the limits, which all replicas share.
        clock: The time.
    """

    def __init__(self, plan: SimulationPlan, counters: InMemoryLedger, clock: VirtualClock) -> None:
        self._plan = plan
        self._counters = counters
        self._clock = clock
        self.selector = NodeSelector(LoadModel(), PoolMembership.from_pools(plan.pools))
        self.selector.in_flight = plan.moves
        self._paces = NodePaces(plan.half_lives_s)
        self._outputs = OutputHistory()
        self.breakers = BreakerRegistry()
        self.breakers.nodes.reload(plan.node_policies)
        self.breakers.pools.reload(plan.pool_policies)
        self.breakers.members = {pool.name: {node.id for node in pool.nodes} for pool in plan.pools}
        self.breakers.shared = plan.shared
        self.queue = QueueState()
        self._context = DecisionContext(
            view=plan.view,
            ledger=VirtualLedger(counters, clock),
            selector=self.selector,
            calibrators=TokenCalibrators(plan.view.table.preferred_model),
            outputs=self._outputs,
            clock=clock,
            start=run_now,
            queue=self,
            lease_ms=LEASE_MS,
        )
        self._client_timeout_s: float | None = None
        """Of the client whose request is being decided."""
        self.serves_at: float | None = None
        """When those that wait are looked at next."""
        self._doubts: set[str] = set()
        """Nodes that failed and have not answered since."""
        self._stirred = False
        """A breaker may stand otherwise."""

    # -- one request --------------------------------------------------------------------------------------------------------------------

    def decide(self, arrival: Arrival, number: int, now: float) -> Decision | SimulatedWait | Refusal:
        """Decide about a request. `number`: counts all of them."""
        request = PendingRequest()
        request.request_id, request.head, request.who = str(number), arrival.head, arrival.who
        request.account, request.prefix, request.chance = arrival.tenant, arrival.prefix, number * _SPREAD
        self._client_timeout_s = arrival.client_timeout_s
        return self.resume(decide(self._context, request, arrival.who, arrival.intent, began=now, wall=self._clock.wall()))

    def resume(self, decision: PendingDecision, reply: Granted | Denied | None = None) -> Decision | SimulatedWait | Refusal:
        """Run a decision to its end or into the queue. `reply`: what its wait has brought."""
        decided = resume(decision, reply)
        if not isinstance(decided, Pause):
            return decided
        assert isinstance(decided.what, Ticket)  # noqa: S101 - decisions of a replica pause in its own `wait` only
        return SimulatedWait(decided.what, decision)

    # -- the queue, as the pipeline's port ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.queue)

    def must_queue(self, claim: Claim, priority: Priority) -> bool:
        """Return whether somebody waits whom a newcomer must not overtake."""
        return self.queue.must_queue(claim, priority)

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, deadline_ms: int) -> Granted | Denied | QueueFull:
        """Wait until the claim is granted, or the client's deadline has passed; then return what was short."""
        now_ms = self._clock.ms
        if self._client_timeout_s is not None:
            deadline_ms = min(deadline_ms, int(self._client_timeout_s * 1000))
        ticket = Ticket(claim, priority, queueing, now_ms + deadline_ms)
        if not self.queue.join(ticket):
            return QueueFull(self.queue.next_vacancy_ms(claim, now_ms))
        reply: Granted | Denied = await Pause(ticket)
        return reply

    def next_served(self) -> tuple[Ticket, Granted | Denied] | float:
        """Return the next whose wait is over, with what it has brought; or when to look again, in seconds."""
        queue, now_ms = self.queue, self._clock.ms
        while True:
            overdue = queue.next_expired(now_ms)
            ticket = overdue or queue.next_ticket(now_ms)
            if ticket is None:
                return (queue.next_action_ms(now_ms) - self._plan.start_ms) / 1000
            reply = self._counters.reserve(ticket.claim, now_ms)
            if isinstance(reply, Granted):
                queue.leave(ticket, granted=True)
                return ticket, reply
            if overdue is not None or not is_queueable(reply):
                queue.leave(ticket)
                return ticket, reply
            queue.record_denial(ticket, reply, now_ms)

    # -- what comes of it ---------------------------------------------------------------------------------------------------------------

    def on_ended(self, decision: Decision, record: ExchangeRecord, now: float) -> None:
        """Settle a finished exchange, and learn from it."""
        self.selector.release(decision.selection.lease)
        self._counters.settle(decision.claim.tenant, decision.claim.request_id, record.usage.total_tokens, self._clock.ms, record.cost)
        self._paces.learn(record, now)
        if record.outcome is Outcome.COMPLETED:
            self._outputs.learn(record.tenant, record.model, record.usage.completion_tokens)
            self._doubts.discard(record.node_id)
        if self._plan.breaker:
            events = classify_exchange(record, now, attempts_reported=True, longest_open_s=self._plan.longest_open_s)
            self._stirred |= self.breakers.on_exchange(record, events)

    def on_attempt_failed(self, attempt: FailedAttempt, now: float) -> None:
        """Feed the node's breaker with a failed attempt."""
        self._doubts.add(attempt.node_id)
        event = classify_attempt(attempt, now, self._plan.retried, longest_open_s=self._plan.longest_open_s)
        if self._plan.breaker and event is not None:
            self._on_event(attempt.node_id, event)

    def on_probe(self, node_id: str, now: float, *, ok: bool) -> None:
        """A node was asked for a token."""
        if ok:
            self._doubts.discard(node_id)
        event, reason = (BreakerEventKind.PROBE_SUCCEEDED, "") if ok else (BreakerEventKind.PROBE_FAILED, "no token")
        self._on_event(node_id, BreakerEvent(event, now, None, reason))

    def on_remote_open(self, node_id: str, now: float, tenant: str) -> None:
        """Another replica leaves the node alone. `tenant`: whose requests alone did it."""
        self._on_event(node_id, BreakerEvent(BreakerEventKind.REMOTE_OPEN, now, origin=tenant))
        self.apply_changes()

    def on_tick(self, now: float) -> None:
        """Breakers look whether pauses and ramps have ended."""
        self.breakers.on_tick(now)
        self._stirred = True

    def apply_changes(self) -> list[str]:
        """Decide by what breakers say now. Returns the nodes that are ejected from now on."""
        if not self._stirred:
            return []
        self._stirred = False
        changed = self.breakers.take_changes()
        if not changed:
            return []
        self.selector.on_breakers(changed)
        return [node_id for node_id, snapshot in changed.nodes.items() if snapshot.state is BreakerState.OPEN]

    def on_reading(self, node_id: str, reading: HeartbeatReading) -> None:
        """A node has said how it does."""
        self.selector.load.on_reading(node_id, reading)

    def apply_learned(self) -> None:
        """Know what finished exchanges have taught since."""
        self.selector.load.on_paces(self._paces.take_changes())

    def take_due_probes(self) -> list[str]:
        """The nodes that probes are for: those that have failed and not answered since, and those on trial."""
        trials = [name for name, snapshot in self.breakers.nodes.snapshot_not_closed().items() if snapshot.state is BreakerState.HALF_OPEN]
        return sorted({*self._doubts, *trials})

    def _on_event(self, node_id: str, event: BreakerEvent) -> None:
        self._stirred |= self.breakers.on_node_event(node_id, event)

"""One gateway: the product's own table, limits, queue, placing, breakers and lessons, told the time.

Rule: nothing is decided here that the product's rooms decide; here stands only in which order they are asked.
"""

from msgspec import Struct

from din_extproc.admit import headers as limit_headers
from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.ledger import Claim, Denied
from din_extproc.admit.queue import QueueState, Ticket, is_queueable
from din_extproc.admit.reservation import OutputHistory
from din_extproc.domain.health import BreakerState
from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.node import Node
from din_extproc.domain.request import Intent
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.node_selector import NodeSelection, NodeSelector, PlacementTarget, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import claim_for
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind
from din_extproc.health.registry import BreakerRegistry, BreakerSet
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pace import NodePaces
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.tools.replay.rerun import LEASE_MS
from din_extproc.tools.simulate.plan import SimulationPlan
from din_extproc.tools.simulate.traffic import Arrival

_BAND = TokenCalibrator().calibration.band
_HOUR_MS = 3_600_000
_SPREAD = 0x9E3779B97F4A7C15
_FAULTS = frozenset({Outcome.UPSTREAM_ERROR, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_TRUNCATED})


class SimulatedDecision(Struct, gc=False):
    """What a gateway has decided about a request."""

    rule: str
    target: PlacementTarget
    claim: Claim
    number: int
    picked: NodeSelection | None = None
    """None: the limits have not been asked yet, or it waits."""


class SimulatedQueue(Struct, frozen=True, gc=False):
    """It stands in the tenant's queue."""

    choice: SimulatedDecision
    ticket: Ticket


class SimulatedReplica:
    """One gateway.

    Args:
        plan: The network.
        twin: The counters, which all replicas share.
    """

    def __init__(self, plan: SimulationPlan, twin: InMemoryLedger) -> None:
        self._plan = plan
        self._twin = twin
        self._load = LoadModel()
        self.placer = NodeSelector(self._load, PoolMembership.of(plan.pools))
        self.placer.moves = plan.moves
        self._paces = NodePaces(plan.half_lives_s)
        self._outputs = OutputHistory()
        self.board = BreakerRegistry()
        self.board.nodes.reload(plan.node_policies)
        self.board.pools.reload(plan.pool_policies)
        self.queue = QueueState()
        self.serves_at: float | None = None
        """When those that wait are looked at next."""
        self._doubts: set[str] = set()
        """Nodes that failed and have not answered since."""
        self._stirred = False
        """A breaker may stand otherwise."""

    # -- one request -----------------------------------------------------------------------------------------------------------------

    def decide(self, arrival: Arrival, number: int, now: float) -> SimulatedDecision | SimulatedQueue | Refusal:
        """What becomes of a request. `number`: counts all of them."""
        plan, intent, who, placer = self._plan, arrival.intent, arrival.who, self.placer
        now_ms = self._ms(now)
        hour = now_ms // _HOUR_MS % 24
        routed = plan.view.table.route(intent, who.tenant, arrival.head, hour, placer.members.versions)
        if isinstance(routed, Refusal):
            return routed
        target = placer.target(routed, RequestSize.of(intent, _BAND), now)
        if isinstance(target, Refusal):
            return target
        model = target.pool.model
        claim = claim_for(
            view=plan.view,
            request_id=str(number),
            intent=intent,
            who=who,
            model=model,
            expected=self._outputs.expected_tokens(arrival.tenant, model),
            lease_ms=LEASE_MS,
        )
        if arrival.tenant != claim.tenant:
            claim = Claim(claim.request_id, arrival.tenant, claim.budgets, claim.tokens, claim.lease_ms)
        choice = SimulatedDecision(routed.rule, target, claim, number)
        return self._admitted(choice, arrival, now, now_ms)

    def _admitted(
        self, choice: SimulatedDecision, arrival: Arrival, now: float, now_ms: int
    ) -> SimulatedDecision | SimulatedQueue | Refusal:
        """Ask the limits, then for a node."""
        tenant, claim, intent = arrival.who.tenant, choice.claim, arrival.intent
        waits = tenant.queueing.max_wait_ms
        if waits and self.queue and self.queue.must_queue(claim, tenant.priority_of(intent.priority)):
            return self._waiting(choice, tenant, intent, arrival.patience_s, now_ms)
        reply = self._twin.reserve(claim, now_ms)
        if isinstance(reply, Denied):
            if waits and is_queueable(reply):
                return self._waiting(choice, tenant, intent, arrival.patience_s, now_ms)
            return limit_headers.refuse_denied(reply, claim)
        return self.pick(choice, arrival, now)

    def pick(self, choice: SimulatedDecision, arrival: Arrival, now: float) -> SimulatedDecision | Refusal:
        """A node for a request that the limits let pass."""
        prompt = arrival.intent.estimate.tokens
        chance = choice.number * _SPREAD
        ask = PlacementRequest(prompt, max(0, choice.claim.tokens - prompt), now, chance, arrival.prefix)
        picked = self.placer.pick(choice.target, ask)
        if isinstance(picked, Refusal):
            self._twin.settle(choice.claim.tenant, choice.claim.request_id, 0, self._ms(now))
            return picked
        choice.picked = picked
        return choice

    def _waiting(
        self, choice: SimulatedDecision, tenant: Tenant, intent: Intent, patience_s: float | None, now_ms: int
    ) -> SimulatedQueue | Refusal:
        queueing = tenant.queueing
        patience_ms = queueing.max_wait_ms if patience_s is None else min(queueing.max_wait_ms, int(patience_s * 1000))
        ticket = Ticket(choice.claim, tenant.priority_of(intent.priority), queueing, now_ms + patience_ms)
        if not self.queue.join(ticket):
            return limit_headers.refuse_queue_full(self.queue.next_vacancy_ms(choice.claim, now_ms))
        return SimulatedQueue(choice, ticket)

    def turn(self, now: float) -> tuple[Ticket, Refusal | None] | float:
        """The next that has waited to its end, and the refusal it gets if it does; or when to look again, in seconds."""
        queue, now_ms = self.queue, self._ms(now)
        while True:
            overdue = queue.next_expired(now_ms)
            ticket = overdue or queue.next_ticket(now_ms)
            if ticket is None:
                return (queue.next_action_ms(now_ms) - self._plan.start_ms) / 1000
            reply = self._twin.reserve(ticket.claim, now_ms)
            if not isinstance(reply, Denied):
                queue.leave(ticket, granted=True)
                return ticket, None
            if overdue is not None or not is_queueable(reply):
                queue.leave(ticket)
                return ticket, limit_headers.refuse_denied(reply, ticket.claim)
            queue.record_denial(ticket, reply, now_ms)

    # -- what comes of it ------------------------------------------------------------------------------------------------------------

    def ended(self, choice: SimulatedDecision, record: ExchangeRecord, now: float) -> None:
        """An exchange is over."""
        if choice.picked is not None:
            self.placer.free(choice.picked.taken)
        self._twin.settle(choice.claim.tenant, choice.claim.request_id, record.usage.total_tokens, self._ms(now))
        self._paces.learn(record, now)
        if record.outcome is Outcome.COMPLETED:
            self._outputs.learn(record.tenant, record.model, record.usage.completion_tokens)
        if self._plan.breaker:
            self._judge(record, now)

    def failed(self, node: Node, began: float, now: float, reason: str) -> None:
        """A try at one node failed."""
        self._doubts.add(node.id)
        if self._plan.breaker:
            self._hear(self.board.nodes, node.id, BreakerEvent(BreakerEventKind.FAILED, now, began, reason))

    def probed(self, node_id: str, now: float, *, ok: bool) -> None:
        """A node was asked for a token."""
        if ok:
            self._doubts.discard(node_id)
        event, reason = (BreakerEventKind.PROBE_SUCCEEDED, "") if ok else (BreakerEventKind.PROBE_FAILED, "no token")
        self._hear(self.board.nodes, node_id, BreakerEvent(event, now, None, reason))

    def told_open(self, node_id: str, now: float) -> None:
        """Another replica leaves the node alone."""
        self._hear(self.board.nodes, node_id, BreakerEvent(BreakerEventKind.REMOTE_OPEN, now))
        self.adopt()

    def pass_time(self, now: float) -> None:
        """Breakers look whether pauses and ramps have ended."""
        self.board.on_tick(now)
        self._stirred = True

    def adopt(self) -> list[str]:
        """Decide by what breakers say now. Returns the nodes that are left alone from now on."""
        if not self._stirred:
            return []
        self._stirred = False
        changed = self.board.take_changes()
        if not changed:
            return []
        self.placer.judge(changed)
        return [node_id for node_id, standing in changed.nodes.items() if standing.state is BreakerState.OPEN]

    def hear(self, node_id: str, reading: HeartbeatReading) -> None:
        """A node has said how it does."""
        self.placer.load.on_reading(node_id, reading)

    def learn(self) -> None:
        """Know what finished exchanges have taught since."""
        self.placer.load.on_paces(self._paces.take_changes())

    def doubted(self) -> list[str]:
        """The nodes that probes are for: those that have failed and not answered since, and those on trial."""
        trials = [name for name, standing in self.board.nodes.snapshot_not_closed().items() if standing.state is BreakerState.HALF_OPEN]
        return sorted({*self._doubts, *trials})

    def _hear(self, breakers: BreakerSet, name: str, heard: BreakerEvent) -> None:
        self._stirred |= breakers.on_event(name, heard)

    def _judge(self, record: ExchangeRecord, now: float) -> None:
        began = record.started_at
        if record.outcome is Outcome.COMPLETED:
            good = BreakerEvent(BreakerEventKind.SUCCEEDED, now, began)
            self._doubts.discard(record.node_id)
            self._hear(self.board.nodes, record.node_id, good)
            self._hear(self.board.pools, record.pool, good)
        elif record.outcome in _FAULTS:
            self._hear(self.board.pools, record.pool, BreakerEvent(BreakerEventKind.FAILED, now, began, record.outcome.value))
        if record.moved_from:
            self._hear(self.board.pools, record.moved_from, BreakerEvent(BreakerEventKind.FAILED, now, began, "moved in flight"))

    def _ms(self, now: float) -> int:
        return self._plan.start_ms + int(now * 1000)

"""The event loop of virtual time: arrivals, nodes that compute, heartbeats, failures, waits and deadlines, each at its moment.

Rule: nothing here waits, and nothing is drawn but from the chance that was given: the same plan gives the same outcome.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from msgspec.structs import replace

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.queue import Ticket
from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.usage import FailedAttempt, Outcome
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.decision import Decision
from din_extproc.tools.engine_model.engine import SimulatedSequence
from din_extproc.tools.simulate.call import SimulatedCall
from din_extproc.tools.simulate.node import SimulatedNode
from din_extproc.tools.simulate.plan import NodeIncident, PlannedFailure, RandomSource, SimulationPlan
from din_extproc.tools.simulate.replica import PendingDecision, SimulatedReplica, SimulatedWait
from din_extproc.tools.simulate.stats import SimulationStats
from din_extproc.tools.simulate.traffic import Arrival
from din_extproc.tools.virtual_time import VirtualClock

_TICK_S = 0.25
_TICKS_PER_LESSON = 2
_SWEEP_S = 120.0

_REPORTS = 200
"""Reports of progress in one run."""


class SimulatedNetwork:
    """One run.

    Args:
        plan: The network.
        arrivals: What clients send, in order.
        failures: What befalls nodes.
        seconds: How long it goes on.
        stats: Told of everything that is counted.
        chance: For nodes that fail sometimes.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        arrivals: Iterator[Arrival],
        failures: Sequence[PlannedFailure],
        seconds: float,
        stats: SimulationStats,
        chance: RandomSource,
    ) -> None:
        self._plan = plan
        self._arrivals = arrivals
        self._seconds = seconds
        self._stats = stats
        self._chance = chance
        self._counters = InMemoryLedger()
        self._clock = VirtualClock(plan.start_ms / 1000)
        self._replicas = [SimulatedReplica(plan, self._counters, self._clock) for _ in range(plan.replicas)]
        self._pools = {pool.name: pool for pool in plan.pools}
        self.machines = {node.id: SimulatedNode(node, plan.kinds[node.id]) for pool in plan.pools for node in pool.nodes}
        self._row = list(self.machines.values())
        self._calls: dict[SimulatedSequence, SimulatedCall] = {}
        self._waiting: dict[Ticket, tuple[Arrival, PendingDecision]] = {}
        self._number = 0
        self._tie = 0
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        for failure in failures:
            self._schedule(failure.at_s, self._on_failure, failure)
            self._schedule(failure.at_s + failure.for_s, self._on_recovery, failure)
        self._schedule_arrival()
        self._schedule(_TICK_S, self._on_tick, 1)
        self._schedule(_SWEEP_S, self._on_sweep, None)
        if plan.probes is not None:
            self._schedule(plan.probes.every_s, self._on_probe_due, None)

    def run(self, progress: ShareDone = ignore_progress) -> None:
        """From the first arrival to the last second."""
        reported = 0.0
        events, last = self._events, self._seconds
        while events and events[0][0] <= last:
            now, _, happen, what = heappop(events)
            self._clock.now = now
            happen(what, now)
            if now >= reported:
                progress(now / last)
                reported = now + last / _REPORTS
        for machine in self._row:
            machine.close(last)
        overhead_s = self._plan.overhead_s
        begun = {
            id(call.arrival): running.first_token - call.arrival.at + overhead_s
            for running, call in self._calls.items()
            if running.first_token
        }
        self._stats.close(self.machines.values(), begun)

    def _schedule(self, at: float, happen: Callable[[Any, float], None], what: Any) -> None:
        self._tie += 1
        heappush(self._events, (at, self._tie, happen, what))

    # -- a request comes ----------------------------------------------------------------------------------------------------------------

    def _schedule_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._schedule(arrival.at, self._on_arrival, arrival)

    def _on_arrival(self, arrival: Arrival, now: float) -> None:
        number = self._number = self._number + 1
        self._stats.on_arrival(arrival)
        replica = self._replicas[number % len(self._replicas)]
        self._on_decided(arrival, replica, replica.decide(arrival, number, now), now, waited=False)
        self._schedule_arrival()

    def _on_decided(
        self, arrival: Arrival, replica: SimulatedReplica, decided: Decision | SimulatedWait | Refusal, now: float, *, waited: bool
    ) -> None:
        """Send the request on, keep it until its turn comes, or count its refusal."""
        if isinstance(decided, Decision):
            self._dispatch(SimulatedCall(arrival, replica, decided, waited=waited), now)
        elif isinstance(decided, SimulatedWait):
            self._waiting[decided.ticket] = arrival, decided.decision
            self._schedule_queue(replica, now)
        else:
            self._stats.on_refused(arrival, decided.code.code)

    def _dispatch(self, call: SimulatedCall, now: float) -> None:
        """It has a node, and a client that waits so long."""
        picked, timeout_s = call.decision.selection, call.arrival.client_timeout_s
        tries = picked.nodes[: 1 + self._plan.retries] if not picked.fallback_nodes else (*picked.nodes, picked.fallback_nodes[0])
        call.tries = list(tries[::-1])
        if picked.timeout_ms is not None:
            self._schedule(now + picked.timeout_ms / 1000, self._on_timeout, call)
        elif (total_ms := call.decision.target.pool.timeouts.total_ms) is not None:
            self._schedule(now + total_ms / 1000, self._on_timeout, call)
        if timeout_s is not None:
            self._schedule(max(now, call.arrival.at + timeout_s), self._on_client_timeout, call)
        self._attempt(call, now)

    def _attempt(self, call: SimulatedCall, now: float) -> None:
        """Send it to the next node that takes it."""
        arrival = call.arrival
        while call.tries:
            machine = self.machines[call.tries.pop().id]
            call.attempts += 1
            call.sent, call.machine = now, machine
            if machine.down or self._fails_attempt(machine, NodeIncident.ERRORS):
                self._on_attempt_failed(machine, call, now, "503" if not machine.down else "UF")
                continue
            if self._fails_attempt(machine, NodeIncident.BUSY):
                self._on_end(call, Outcome.UPSTREAM_BUSY, 0, now)
                return
            room = machine.kind.spec.max_model_len - arrival.prompt_tokens
            if room < 1 or (arrival.intent.output_tokens or 1) > room:
                self._on_end(call, Outcome.CLIENT_ERROR, 0, now)
                return
            prompt, output = arrival.prompt_tokens, min(arrival.output_tokens, room)
            call.running = machine.take(prompt, output, arrival.prefix, arrival.prefix_tokens, now)
            self._calls[call.running] = call
            self._schedule_step(machine)
            first_byte_ms = call.pool.timeouts.first_byte_ms
            if first_byte_ms is not None:
                self._schedule(now + first_byte_ms / 1000, self._on_silence, (call, call.attempts))
            return
        self._on_end(call, Outcome.UPSTREAM_ERROR, 0, now)

    def _fails_attempt(self, machine: SimulatedNode, kind: NodeIncident) -> bool:
        """Return whether a node that fails sometimes in this way does so now."""
        trouble = machine.trouble
        return trouble is not None and trouble.kind is kind and self._chance.random() < trouble.share

    def _on_attempt_failed(self, machine: SimulatedNode, call: SimulatedCall, now: float, reason: str) -> None:
        """Report the failed latest attempt to its gateway."""
        call.replica.on_attempt_failed(FailedAttempt(machine.node.id, reason, (now - call.sent) * 1000, call.sent, origin=call.origin), now)
        self._apply_changes(call.replica, now)

    # -- nodes compute ------------------------------------------------------------------------------------------------------------------

    def _schedule_step(self, machine: SimulatedNode) -> None:
        at = machine.next_at
        if at is not None and at != machine.wakes_at:
            machine.wakes_at = at
            self._schedule(at, self._on_step, machine)

    def _on_step(self, machine: SimulatedNode, now: float) -> None:
        if machine.wakes_at != now:
            return
        machine.wakes_at = None
        if machine.stalled:
            return
        for running in machine.step(now):
            call = self._calls.pop(running)
            self._on_end(call, Outcome.COMPLETED, running.produced, now)
        self._schedule_step(machine)

    def _on_end(self, call: SimulatedCall, outcome: Outcome, produced: int, now: float, *, deadline_exceeded: bool = False) -> None:
        """It is over, however. `deadline_exceeded`: the timeout of the whole request has ended it."""
        if call.over:
            return
        call.over = True
        record = call.record(outcome, produced, now, overhead_s=self._plan.overhead_s, deadline_exceeded=deadline_exceeded)
        cost = self._plan.view.prices.cost(record.model, self._clock.wall(), record.usage, 0)
        if cost:
            record = replace(record, cost=cost)
        call.replica.on_ended(call.decision, record, now)
        self._stats.on_ended(call.arrival, record, now, waited=call.waited)
        self._apply_changes(call.replica, now)
        for replica in self._replicas:
            if replica.queue:
                replica.queue.on_freed(call.decision.claim.tenant)
                replica.queue.on_shared_freed()
                self._schedule_queue(replica, now)

    # -- deadlines ----------------------------------------------------------------------------------------------------------------------

    def _on_silence(self, what: tuple[SimulatedCall, int], now: float) -> None:
        """The time until the first byte is over: another node is asked."""
        call, attempt = what
        if call.over or call.attempts != attempt or call.running is None or call.machine is None:
            return
        if call.running.first_token is not None:
            return
        machine = call.machine
        self._leave_node(call, now)
        self._on_attempt_failed(machine, call, now, "first byte")
        if call.tries:
            self._attempt(call, now)
        else:
            self._on_end(call, Outcome.UPSTREAM_TIMEOUT, 0, now)

    def _on_timeout(self, call: SimulatedCall, now: float) -> None:
        """The time for the whole answer is over."""
        if not call.over:
            self._on_end(call, Outcome.UPSTREAM_TIMEOUT, self._leave_node(call, now), now, deadline_exceeded=True)

    def _on_client_timeout(self, call: SimulatedCall, now: float) -> None:
        """Its client goes away."""
        if not call.over:
            self._on_end(call, Outcome.CLIENT_CANCELLED, self._leave_node(call, now), now)

    def _leave_node(self, call: SimulatedCall, now: float) -> int:
        """Take it from its node. Returns the tokens that it got."""
        running, machine = call.running, call.machine
        if running is None or machine is None or self._calls.pop(running, None) is None:
            return 0
        machine.drop(running, now)
        self._schedule_step(machine)
        return running.produced

    # -- those that wait ----------------------------------------------------------------------------------------------------------------

    def _schedule_queue(self, replica: SimulatedReplica, at: float) -> None:
        if replica.serves_at is None or at < replica.serves_at:
            replica.serves_at = at
            self._schedule(at, self._on_queue, replica)

    def _on_queue(self, replica: SimulatedReplica, now: float) -> None:
        if replica.serves_at != now:
            return
        replica.serves_at = None
        while replica.queue:
            served = replica.next_served()
            if not isinstance(served, tuple):
                self._schedule_queue(replica, max(served, now + 0.001))
                return
            ticket, reply = served
            arrival, decision = self._waiting.pop(ticket)
            self._on_decided(arrival, replica, replica.resume(decision, reply), now, waited=True)

    # -- what goes on by itself ---------------------------------------------------------------------------------------------------------

    def _on_tick(self, tick: int, now: float) -> None:
        """Breakers look at the time, nodes say how they do, lessons are learned."""
        for replica in self._replicas:
            replica.on_tick(now)
            self._apply_changes(replica, now)
            if tick % _TICKS_PER_LESSON == 0:
                replica.apply_learned()
        if self._plan.beat_s:
            ticks_per_beat = max(1, round(self._plan.beat_s / _TICK_S))
            for machine in self._row[tick % ticks_per_beat :: ticks_per_beat]:
                beat = machine.beat(tick, now)
                if beat is not None:
                    reading = HeartbeatReading(beat, now)
                    for replica in self._replicas:
                        replica.on_reading(machine.node.id, reading)
        self._schedule((tick + 1) * _TICK_S, self._on_tick, tick + 1)

    def _apply_changes(self, replica: SimulatedReplica, now: float) -> None:
        """Decide by what its breakers say; the others learn which opened."""
        opened = replica.apply_changes()
        for node_id in opened:
            self._stats.on_breaker_opened(node_id)
            for other in self._replicas:
                if other is not replica:
                    other.on_remote_open(node_id, now, replica.breakers.nodes.get_opened_for(node_id))

    def _on_probe_due(self, _: None, now: float) -> None:
        """Nodes in doubt are asked for a token."""
        probes = self._plan.probes
        if probes is None:
            return
        for node_id in sorted({node_id for replica in self._replicas for node_id in replica.take_due_probes()}):
            machine = self.machines[node_id]
            errors = self._fails_attempt(machine, NodeIncident.ERRORS)
            if machine.stalled:
                self._schedule(now + probes.timeout_s, self._on_probe, (node_id, False))
            else:
                self._on_probe((node_id, not (machine.down or errors)), now)
        self._schedule(now + probes.every_s, self._on_probe_due, None)

    def _on_probe(self, what: tuple[str, bool], now: float) -> None:
        for replica in self._replicas:
            replica.on_probe(what[0], now, ok=what[1])
            self._apply_changes(replica, now)

    def _on_sweep(self, _: None, now: float) -> None:
        self._counters.sweep(self._clock.ms)
        self._schedule(now + _SWEEP_S, self._on_sweep, None)

    # -- trouble ------------------------------------------------------------------------------------------------------------------------

    def _on_failure(self, failure: PlannedFailure, now: float) -> None:
        machine = self.machines[failure.node]
        machine.begin(failure, now)
        if failure.kind is NodeIncident.DOWN:
            for running, call in [pair for pair in self._calls.items() if pair[1].machine is machine]:
                del self._calls[running]
                self._on_attempt_failed(machine, call, now, "UC")
                if running.first_token is None and call.tries:
                    self._attempt(call, now)
                else:
                    self._on_end(call, Outcome.UPSTREAM_TRUNCATED if running.produced else Outcome.UPSTREAM_ERROR, running.produced, now)
        self._schedule_step(machine)

    def _on_recovery(self, failure: PlannedFailure, now: float) -> None:
        machine = self.machines[failure.node]
        if machine.trouble is failure:
            machine.end(now)
            self._schedule_step(machine)

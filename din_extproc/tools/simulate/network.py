"""The event loop of virtual time: arrivals, nodes that compute, heartbeats, failures, waits and deadlines, each at its moment.

Rule: nothing here waits, and nothing is drawn but from the chance that was given: the same plan gives the same outcome.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.queue import Ticket
from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.usage import FailedAttempt, Outcome
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.decision import Decision
from din_extproc.tools.engine_model.engine import SimulatedSequence
from din_extproc.tools.simulate.call import SimulatedCall
from din_extproc.tools.simulate.machine import SimulatedNode
from din_extproc.tools.simulate.plan import NodeIncident, PlannedFailure, RandomSource, SimulationPlan
from din_extproc.tools.simulate.replica import PendingDecision, SimulatedReplica, SimulatedWait
from din_extproc.tools.simulate.tally import SimulationStats
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
        tally: Told of everything that is counted.
        chance: For nodes that fail sometimes.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        arrivals: Iterator[Arrival],
        failures: Sequence[PlannedFailure],
        seconds: float,
        tally: SimulationStats,
        chance: RandomSource,
    ) -> None:
        self._plan = plan
        self._arrivals = arrivals
        self._seconds = seconds
        self._tally = tally
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
            self._at(failure.at_s, self._fails, failure)
            self._at(failure.at_s + failure.for_s, self._recovers, failure)
        self._next_arrival()
        self._at(_TICK_S, self._ticks, 1)
        self._at(_SWEEP_S, self._sweeps, None)
        if plan.probes is not None:
            self._at(plan.probes.every_s, self._probes, None)

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
        self._tally.close(self.machines.values(), begun)

    def _at(self, at: float, happen: Callable[[Any, float], None], what: Any) -> None:
        self._tie += 1
        heappush(self._events, (at, self._tie, happen, what))

    # -- a request comes ----------------------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._at(arrival.at, self._arrives, arrival)

    def _arrives(self, arrival: Arrival, now: float) -> None:
        number = self._number = self._number + 1
        self._tally.came(arrival)
        replica = self._replicas[number % len(self._replicas)]
        self._decided(arrival, replica, replica.decide(arrival, number, now), now, waited=False)
        self._next_arrival()

    def _decided(
        self, arrival: Arrival, replica: SimulatedReplica, decided: Decision | SimulatedWait | Refusal, now: float, *, waited: bool
    ) -> None:
        """Send the request on, keep it until its turn comes, or count its refusal."""
        if isinstance(decided, Decision):
            self._go(SimulatedCall(arrival, replica, decided, waited=waited), now)
        elif isinstance(decided, SimulatedWait):
            self._waiting[decided.ticket] = arrival, decided.decision
            self._serve_at(replica, now)
        else:
            self._tally.refused(arrival, decided.code.code)

    def _go(self, call: SimulatedCall, now: float) -> None:
        """It has a node, and a client that waits so long."""
        picked, patience = call.decision.selection, call.arrival.patience_s
        tries = picked.nodes[: 1 + self._plan.retries] if not picked.spares else (*picked.nodes, picked.spares[0])
        call.tries = list(tries[::-1])
        if picked.timeout_ms is not None:
            self._at(now + picked.timeout_ms / 1000, self._times_out, call)
        elif (total_ms := call.decision.target.pool.timeouts.total_ms) is not None:
            self._at(now + total_ms / 1000, self._times_out, call)
        if patience is not None:
            self._at(max(now, call.arrival.at + patience), self._gives_up, call)
        self._try(call, now)

    def _try(self, call: SimulatedCall, now: float) -> None:
        """Send it to the next node that takes it."""
        arrival = call.arrival
        while call.tries:
            machine = self.machines[call.tries.pop().id]
            call.attempts += 1
            call.sent, call.machine = now, machine
            if machine.down or self._errs(machine, NodeIncident.ERRORS):
                self._attempt_failed(machine, call, now, "503" if not machine.down else "UF")
                continue
            if self._errs(machine, NodeIncident.BUSY):
                self._ends(call, Outcome.UPSTREAM_BUSY, 0, now)
                return
            room = machine.kind.spec.max_model_len - arrival.prompt_tokens
            if room < 1 or (arrival.intent.output_tokens or 1) > room:
                self._ends(call, Outcome.CLIENT_ERROR, 0, now)
                return
            prompt, output = arrival.prompt_tokens, min(arrival.output_tokens, room)
            call.running = machine.take(prompt, output, arrival.prefix, arrival.prefix_tokens, now)
            self._calls[call.running] = call
            self._watch(machine)
            first_byte_ms = call.pool.timeouts.first_byte_ms
            if first_byte_ms is not None:
                self._at(now + first_byte_ms / 1000, self._is_silent, (call, call.attempts))
            return
        self._ends(call, Outcome.UPSTREAM_ERROR, 0, now)

    def _errs(self, machine: SimulatedNode, kind: NodeIncident) -> bool:
        """Return whether a node that fails sometimes in this way does so now."""
        trouble = machine.trouble
        return trouble is not None and trouble.kind is kind and self._chance.random() < trouble.share

    def _attempt_failed(self, machine: SimulatedNode, call: SimulatedCall, now: float, reason: str) -> None:
        """The latest attempt failed; its gateway hears of it."""
        call.replica.attempt_failed(FailedAttempt(machine.node.id, reason, (now - call.sent) * 1000, call.sent, origin=call.origin), now)
        self._adopt(call.replica, now)

    # -- nodes compute ------------------------------------------------------------------------------------------------------------------

    def _watch(self, machine: SimulatedNode) -> None:
        at = machine.next_at
        if at is not None and at != machine.wakes_at:
            machine.wakes_at = at
            self._at(at, self._steps, machine)

    def _steps(self, machine: SimulatedNode, now: float) -> None:
        if machine.wakes_at != now:
            return
        machine.wakes_at = None
        if machine.stalled:
            return
        for running in machine.step(now):
            call = self._calls.pop(running)
            self._ends(call, Outcome.COMPLETED, running.produced, now)
        self._watch(machine)

    def _ends(self, call: SimulatedCall, outcome: Outcome, produced: int, now: float, *, deadline_exceeded: bool = False) -> None:
        """It is over, however. `deadline_exceeded`: the timeout of the whole request has ended it."""
        if call.over:
            return
        call.over = True
        record = call.record(outcome, produced, now, overhead_s=self._plan.overhead_s, deadline_exceeded=deadline_exceeded)
        call.replica.ended(call.decision, record, now)
        self._tally.ended(call.arrival, record, now, waited=call.waited)
        self._adopt(call.replica, now)
        for replica in self._replicas:
            if replica.queue:
                replica.queue.on_freed(call.decision.claim.tenant)
                replica.queue.on_shared_freed()
                self._serve_at(replica, now)

    # -- deadlines ----------------------------------------------------------------------------------------------------------------------

    def _is_silent(self, what: tuple[SimulatedCall, int], now: float) -> None:
        """The time until the first byte is over: another node is asked."""
        call, attempt = what
        if call.over or call.attempts != attempt or call.running is None or call.machine is None:
            return
        if call.running.first_token is not None:
            return
        machine = call.machine
        self._leave(call, now)
        self._attempt_failed(machine, call, now, "first byte")
        if call.tries:
            self._try(call, now)
        else:
            self._ends(call, Outcome.UPSTREAM_TIMEOUT, 0, now)

    def _times_out(self, call: SimulatedCall, now: float) -> None:
        """The time for the whole answer is over."""
        if not call.over:
            self._ends(call, Outcome.UPSTREAM_TIMEOUT, self._leave(call, now), now, deadline_exceeded=True)

    def _gives_up(self, call: SimulatedCall, now: float) -> None:
        """Its client goes away."""
        if not call.over:
            self._ends(call, Outcome.CLIENT_CANCELLED, self._leave(call, now), now)

    def _leave(self, call: SimulatedCall, now: float) -> int:
        """Take it from its node. Returns the tokens that it got."""
        running, machine = call.running, call.machine
        if running is None or machine is None or self._calls.pop(running, None) is None:
            return 0
        machine.drop(running, now)
        self._watch(machine)
        return running.produced

    # -- those that wait ----------------------------------------------------------------------------------------------------------------

    def _serve_at(self, replica: SimulatedReplica, at: float) -> None:
        if replica.serves_at is None or at < replica.serves_at:
            replica.serves_at = at
            self._at(at, self._serves, replica)

    def _serves(self, replica: SimulatedReplica, now: float) -> None:
        if replica.serves_at != now:
            return
        replica.serves_at = None
        while replica.queue:
            turn = replica.next_served()
            if not isinstance(turn, tuple):
                self._serve_at(replica, max(turn, now + 0.001))
                return
            ticket, reply = turn
            arrival, decision = self._waiting.pop(ticket)
            self._decided(arrival, replica, replica.go_on(decision, reply), now, waited=True)

    # -- what goes on by itself ---------------------------------------------------------------------------------------------------------

    def _ticks(self, tick: int, now: float) -> None:
        """Breakers look at the time, nodes say how they do, lessons are learned."""
        for replica in self._replicas:
            replica.on_tick(now)
            self._adopt(replica, now)
            if tick % _TICKS_PER_LESSON == 0:
                replica.learn()
        if self._plan.beat_s:
            turns = max(1, round(self._plan.beat_s / _TICK_S))
            for machine in self._row[tick % turns :: turns]:
                beat = machine.beat(tick, now)
                if beat is not None:
                    reading = HeartbeatReading(beat, now)
                    for replica in self._replicas:
                        replica.on_reading(machine.node.id, reading)
        self._at((tick + 1) * _TICK_S, self._ticks, tick + 1)

    def _adopt(self, replica: SimulatedReplica, now: float) -> None:
        """Decide by what its breakers say; the others learn which opened."""
        opened = replica.adopt()
        for node_id in opened:
            self._tally.opened(node_id)
            for other in self._replicas:
                if other is not replica:
                    other.on_remote_open(node_id, now, replica.breakers.nodes.get_opened_for(node_id))

    def _probes(self, _: None, now: float) -> None:
        """Nodes in doubt are asked for a token."""
        probes = self._plan.probes
        if probes is None:
            return
        for node_id in sorted({node_id for replica in self._replicas for node_id in replica.doubted()}):
            machine = self.machines[node_id]
            errors = self._errs(machine, NodeIncident.ERRORS)
            if machine.stalled:
                self._at(now + probes.timeout_s, self._probed, (node_id, False))
            else:
                self._probed((node_id, not (machine.down or errors)), now)
        self._at(now + probes.every_s, self._probes, None)

    def _probed(self, what: tuple[str, bool], now: float) -> None:
        for replica in self._replicas:
            replica.on_probe(what[0], now, ok=what[1])
            self._adopt(replica, now)

    def _sweeps(self, _: None, now: float) -> None:
        self._counters.sweep(self._clock.ms)
        self._at(now + _SWEEP_S, self._sweeps, None)

    # -- trouble ------------------------------------------------------------------------------------------------------------------------

    def _fails(self, failure: PlannedFailure, now: float) -> None:
        machine = self.machines[failure.node]
        machine.begin(failure, now)
        if failure.kind is NodeIncident.DOWN:
            for running, call in [pair for pair in self._calls.items() if pair[1].machine is machine]:
                del self._calls[running]
                self._attempt_failed(machine, call, now, "UC")
                if running.first_token is None and call.tries:
                    self._try(call, now)
                else:
                    self._ends(call, Outcome.UPSTREAM_TRUNCATED if running.produced else Outcome.UPSTREAM_ERROR, running.produced, now)
        self._watch(machine)

    def _recovers(self, failure: PlannedFailure, now: float) -> None:
        machine = self.machines[failure.node]
        if machine.trouble is failure:
            machine.end(now)
            self._watch(machine)

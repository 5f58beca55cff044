"""One simulated request that a gateway has let pass, until its end."""

from din_extproc.domain.health import make_origin
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.flow.decision import Decision
from din_extproc.tools.engine_model.engine import SimulatedSequence
from din_extproc.tools.simulate.node import SimulatedNode
from din_extproc.tools.simulate.replica import SimulatedReplica
from din_extproc.tools.simulate.traffic import Arrival

_STATUS = {
    Outcome.COMPLETED: 200,
    Outcome.CLIENT_CANCELLED: 0,
    Outcome.CLIENT_ERROR: 400,
    Outcome.UPSTREAM_BUSY: 429,
    Outcome.UPSTREAM_TIMEOUT: 504,
}
_UNAVAILABLE = 503


class SimulatedCall:
    """A request that a gateway has let pass, until its end."""

    __slots__ = ("arrival", "attempts", "decision", "machine", "over", "replica", "running", "sent", "tries", "waited")

    def __init__(self, arrival: Arrival, replica: SimulatedReplica, decision: Decision, *, waited: bool) -> None:
        self.arrival = arrival
        self.replica = replica
        self.decision = decision
        self.waited = waited
        self.tries: list[Node] = []
        """Nodes still to try, the next one last."""
        self.machine: SimulatedNode | None = None
        self.running: SimulatedSequence | None = None
        self.attempts = 0
        self.sent = 0.0
        """When the attempt began."""
        self.over = False

    @property
    def origin(self) -> str:
        """The origin of its failures, as its gateway knows it."""
        return make_origin(self.arrival.who.tenant.pseudonym, self.decision.claim.request_id.encode())

    @property
    def pool(self) -> Pool:
        """The pool whose node has it: the one it was meant for, or the one that took over in flight."""
        target, picked = self.decision.target, self.decision.selection
        if target.in_flight_fallback is not None and self.machine is not None and self.machine.node in picked.fallback_nodes:
            return target.in_flight_fallback[0]
        return target.pool

    def record(self, outcome: Outcome, produced: int, now: float, *, overhead_s: float, deadline_exceeded: bool) -> ExchangeRecord:
        """Return the record of the finished exchange, as an access log would tell it."""
        arrival, pool = self.arrival, self.pool
        running, first = self.running, self.decision.target.pool
        began = None if running is None or not (produced or outcome is Outcome.COMPLETED) else running.first_token or now
        trouble = None if self.machine is None else self.machine.trouble
        prompt = arrival.prompt_tokens if running is not None or outcome is Outcome.CLIENT_ERROR else 0
        return ExchangeRecord(
            request_id="",
            trace_id="",
            tenant=arrival.tenant,
            key_id="",
            model=pool.model,
            alias=arrival.intent.model,
            pool=pool.name,
            rule=self.decision.routed.rule,
            node_id="" if self.machine is None else self.machine.node.id,
            status=_STATUS.get(outcome, _UNAVAILABLE),
            outcome=outcome,
            stream=arrival.intent.stream,
            usage=Usage(prompt, produced),
            reserved_tokens=self.decision.claim.tokens,
            prompt_estimate=arrival.prompt_tokens,
            features=(),
            fixed=0,
            attempts=self.attempts,
            degraded=bool(self.decision.target.degraded),
            started_at=arrival.at,
            duration_ms=(now - arrival.at + overhead_s) * 1000,
            first_token_ms=None if began is None else (began - arrival.at + overhead_s) * 1000,
            retry_after_s=trouble.retry_after_s if outcome is Outcome.UPSTREAM_BUSY and trouble is not None else None,
            moved_from="" if pool is first else first.name,
            deadline_exceeded=deadline_exceeded,
            origin="" if outcome is Outcome.COMPLETED else self.origin,
        )

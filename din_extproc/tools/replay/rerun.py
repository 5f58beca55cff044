"""Recorded requests, decided again: where they would go under another configuration, which would be refused, which would wait.

Rule: deterministic, and only the configuration differs. Every node is well, every request comes when it came, every answer takes the time
and the tokens that it took; one that was refused then and is let in now takes what those of its tenant took on average.

What a record does not hold is assumed as little as can be: headers other than the task tier are those that the rule asks for which took
the request.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from msgspec import Struct

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, Denied, Granted
from din_extproc.admit.queue import is_queueable
from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.request import BUILT_IN, Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.tenant import Queueing
from din_extproc.domain.usage import Tags, Usage
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.decision import Decision, DecisionContext, PendingRequest, Permit
from din_extproc.flow.node_selector import NodeSelector
from din_extproc.flow.pipeline import decide, decide_permit
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import DecisionView
from din_extproc.route.table import Routed, RouteTable, VersionsOf
from din_extproc.schedule.load import LoadModel, NodeLease
from din_extproc.tools.verify.sample_request import find_samples
from din_extproc.tools.virtual_time import LEASE_MS, Pause, VirtualClock, VirtualLedger, resume, run_now

_HOUR_MS = 3_600_000
_NEVER = (0, 0, 0)
_LOOK_AGAIN_MS = 50
"""How often a request that waits tries again; in service it is woken."""


class ReplayOutcome(Struct, frozen=True, omit_defaults=True):
    """The outcome of a request."""

    pool: str = ""
    """"" of one that another proxy was permitted to send on."""
    model: str = ""
    rule: str = ""
    degraded: bool = False
    """The fallback takes it."""
    waits: bool = False
    """It waits in the tenant's queue first."""
    refusal: str = ""
    """The code, when it is refused."""

    @property
    def text(self) -> str:
        """For people."""
        if self.refusal:
            return f"refused: {self.refusal}"
        notes = [note for note, so in (("degraded", self.degraded), ("after a wait", self.waits)) if so]
        where = f"{self.rule or '(no rule)'} -> {self.pool}" if self.pool else "passed"
        return f"{where} ({self.model})" + (f", {', '.join(notes)}" if notes else "")


class ReplayedRequest(Struct, frozen=True):
    """One recorded request."""

    trace_id: str
    tenant: str
    key_id: str
    began_ms: int
    """Milliseconds since the epoch."""
    took_ms: int | None
    """None: it was not answered by a node."""
    usage: Usage
    """As charged."""
    media: int
    """Images, audio and files of the prompt."""
    cost: int
    """As recorded, in 10**-9 of the currency."""
    reserved: int
    """Tokens; 0: nothing was."""
    intent: Intent | None
    """None: it was refused before it was read."""
    entry: str
    """As in its tags: how it came."""
    fate: ReplayOutcome
    """As it was."""


class _RecordedOutputs:
    """The output that was expected of the request that is being decided, as its reservation tells."""

    tokens: int | None = None

    def expected_tokens(self, tenant: str, model: str) -> int | None:  # noqa: ARG002 - of one request
        return self.tokens


class _RepeatedReservation:
    """The queue of a replay: a request that waits tries again every `_LOOK_AGAIN_MS`; none precedes another."""

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger

    def __len__(self) -> int:
        return 0

    def must_queue(self, claim: Claim, priority: Priority) -> bool:  # noqa: ARG002 - the port's signature
        return False

    async def wait(self, claim: Claim, priority: Priority, queueing: Queueing, deadline_ms: int) -> Granted | Denied:  # noqa: ARG002
        waited_ms, reply = 0, await self._ledger.reserve(claim)
        while isinstance(reply, Denied) and is_queueable(reply) and waited_ms + _LOOK_AGAIN_MS <= deadline_ms:
            await Pause(_LOOK_AGAIN_MS)
            waited_ms += _LOOK_AGAIN_MS
            reply = await self._ledger.reserve(claim)
        return reply


OwnerFinder = Callable[[ReplayedRequest], Authenticated | None]
"""Returns tenant and key, or identity, of a recorded request; None: the configuration does not know them."""


class _ReplayedDecision(Struct):
    """A request whose decision has begun."""

    request: PendingRequest
    coroutine: Coroutine[Any, Any, Decision | Permit | Refusal]
    taken: NodeLease | None = None


class ReplayRun:
    """One configuration's decisions about a record.

    Args:
        view: The configuration.
        members: Its nodes.
        find_owner: Finds who asked.
    """

    def __init__(self, view: DecisionView, members: PoolMembership, find_owner: OwnerFinder) -> None:
        self._find_owner = find_owner
        self._counters = InMemoryLedger()
        self._clock = VirtualClock(0.0)
        self._outputs = _RecordedOutputs()
        ledger = VirtualLedger(self._counters, self._clock)
        self._context = DecisionContext(
            view=view,
            ledger=ledger,
            selector=NodeSelector(LoadModel(), members),
            calibrators=TokenCalibrators(view.table.preferred_model),
            outputs=self._outputs,
            clock=self._clock,
            start=run_now,
            queue=_RepeatedReservation(ledger),
            lease_ms=LEASE_MS,
        )
        self._fates: dict[int, ReplayOutcome] = {}
        self._begun: dict[int, _ReplayedDecision] = {}
        self._events: list[tuple[int, int, Callable[[int, ReplayedRequest], None], int]] = []
        """When (ms), a running number, what happens, and to which request."""
        self._count = 0
        self._usual: Mapping[str, tuple[int, int, int]] = {}
        self.costs: Counter[str] = Counter()
        """Cost of requests by the prices of this configuration, by tenant, in 10**-9 of the currency."""

    def fates(self, record: Sequence[ReplayedRequest], progress: ShareDone = ignore_progress) -> list[ReplayOutcome]:
        """Return what becomes of each of them, in their order."""
        self._usual = tenant_averages(record)
        for at, past in enumerate(record):
            self._schedule(past.began_ms, self._begin, at)
        while self._events:
            now_ms, _, happen, at = heappop(self._events)
            self._clock.now = now_ms / 1000
            happen(at, record[at])
            progress(at / len(record))
        return [self._fates[at] for at in range(len(record))]

    def _schedule(self, when_ms: int, happen: Callable[[int, ReplayedRequest], None], at: int) -> None:
        self._count += 1
        heappush(self._events, (when_ms, self._count, happen, at))

    def _begin(self, at: int, past: ReplayedRequest) -> None:
        who, intent = self._find_owner(past), past.intent
        if intent is None:
            self._fates[at] = past.fate
            return
        if who is None:
            self._fates[at] = ReplayOutcome(refusal=RefusalCode.INVALID_API_KEY.code)
            return
        context = self._context
        request = PendingRequest()
        request.request_id, request.who, request.account = str(at), who, who.tenant.id
        request.head = head_of(past, intent, who, context.view.table, context.selector.members.get_versions)
        now = self._clock.monotonic()
        stages = decide_permit if past.entry else decide
        self._outputs.tokens = past.reserved - intent.prompt_tokens if past.reserved else None
        self._begun[at] = _ReplayedDecision(request, stages(context, request, who, intent, began=now, wall=self._clock.wall()))
        self._go_on(at, past)

    def _go_on(self, at: int, past: ReplayedRequest) -> None:
        """Run the decision to its end, or until it looks again."""
        begun = self._begun[at]
        decided = resume(begun.coroutine)
        if isinstance(decided, Pause):
            self._schedule(self._clock.ms + _LOOK_AGAIN_MS, self._go_on, at)
            return
        if isinstance(decided, Refusal):
            del self._begun[at]
            self._fates[at] = ReplayOutcome(refusal=decided.code.code)
            return
        waits = begun.request.waited_s > 0
        if isinstance(decided, Permit):
            self._fates[at] = ReplayOutcome(model=decided.model, waits=waits)
        else:
            begun.taken, target = decided.selection.lease, decided.target
            self._fates[at] = ReplayOutcome(target.pool.name, target.pool.model, decided.routed.rule, bool(target.degraded), waits)
        took_ms = self._usual.get(past.tenant, _NEVER)[0] if past.took_ms is None else past.took_ms
        self._schedule(self._clock.ms + took_ms, self._end, at)

    def _end(self, at: int, past: ReplayedRequest) -> None:
        taken = self._begun.pop(at).taken
        if taken is not None:
            self._context.selector.release(taken)
        used = past.usage
        if not used.total_tokens:
            _, charged, answered = self._usual.get(past.tenant, _NEVER)
            used = Usage(charged - answered, answered)
        cost = self._context.view.prices.cost(self._fates[at].model, past.began_ms / 1000, used, past.media)
        self.costs[past.tenant] += cost
        self._counters.settle(past.tenant, str(at), used.total_tokens, self._clock.ms, cost)


def head_of(past: ReplayedRequest, intent: Intent, who: Authenticated, table: RouteTable, versions: VersionsOf) -> RequestHead:
    """The head of a recorded request, as far as it is known: the task tier, and what the rule asks for which took it and still does."""
    hour = past.began_ms // _HOUR_MS % 24
    tier = {"x-task-tier": intent.task_tier} if intent.task_tier else {}
    for rule in table.rules_for(intent.model):
        if past.fate.rule and rule.id == past.fate.rule:
            for sample in find_samples(rule.condition):
                head = RequestHead("POST", intent.operation.value, {**sample.headers, **tier})
                routed = table.route(intent, who.tenant, head, hour, versions)
                if isinstance(routed, Routed) and routed.rule == rule.id:
                    return head
    return RequestHead("POST", intent.operation.value, tier)


def intent_of(
    tags: Tags, operation: str, prompt_tokens: int, *, stream: bool, operations: Mapping[str, Operation] = BUILT_IN
) -> Intent | None:
    """Return the intent of a record's tags; None: they name no operation. What was expected of its answers counts for all of them."""
    known = operations.get(operation)
    if not tags.model or known is None:
        return None
    wanted = Priority(tags.priority) if tags.priority in set(Priority) else None
    return Intent(
        operation=known,
        model=tags.model,
        estimate=Estimate(prompt_tokens, longest=Estimate(tags.longest) if tags.longest else None),
        output_tokens=tags.output_tokens,
        stream=stream,
        task_tier=tags.task_tier,
        timeout_ms=tags.timeout_ms,
        budget_tokens=tags.budget_tokens,
        budget_cost=tags.budget_cost,
        version=tags.version,
        priority=wanted,
        output_each=None if tags.output_tokens is None else tags.output_tokens // tags.answers,
    )


def tenant_averages(record: Sequence[ReplayedRequest]) -> dict[str, tuple[int, int, int]]:
    """How long answers to a tenant took on average, in ms, what they cost, and how long they were, in tokens."""
    sums: dict[str, tuple[int, int, int, int]] = {}
    for past in record:
        if past.took_ms is not None:
            count, took_ms, tokens, answered = sums.get(past.tenant, (0, 0, 0, 0))
            sums[past.tenant] = count + 1, took_ms + past.took_ms, tokens + past.usage.total_tokens, answered + past.usage.completion_tokens
    return {tenant: (took_ms // count, tokens // count, answered // count) for tenant, (count, took_ms, tokens, answered) in sums.items()}

"""Recorded requests, decided again: where they would go under another configuration, which would be refused, which would wait.

Rule: deterministic, and only the configuration differs. Every node is well, every request comes when it came, every answer takes the time
and the tokens that it took; one that was refused then and is let in now takes what those of its tenant took on average.

What a record does not hold is assumed as little as can be: headers other than the task tier are those that the rule asks for which took
the request.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from din_extproc.admit.in_memory_ledger import InMemoryLedger
from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Denied
from din_extproc.admit.queue import is_queueable
from din_extproc.domain.request import Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.usage import Tags
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.node_selector import NodeSelector, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import DecisionView, claim_for
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.route.table import Routed, RouteTable, VersionsOf
from din_extproc.schedule.load import LoadModel
from din_extproc.tools.verify.sample_request import wishes

_BAND = TokenCalibrator().calibration.band
_HOUR_MS = 3_600_000
LEASE_MS = 1 << 40
"""Nobody renews leases in virtual time."""
_NEVER = (0, 0, 0)
_NO_LIMIT = "oversize"
_LOOK_AGAIN_MS = 50
"""How often a request that waits tries again; in service it is woken."""


class ReplayOutcome(Struct, frozen=True, omit_defaults=True):
    """What becomes of a request."""

    pool: str = ""
    model: str = ""
    rule: str = ""
    degraded: bool = False
    """The fallback takes it."""
    waits: bool = False
    """It stands in the tenant's queue first."""
    refusal: str = ""
    """The code, when it is refused."""

    @property
    def text(self) -> str:
        """For people."""
        if self.refusal:
            return f"refused: {self.refusal}"
        notes = [note for note, so in (("degraded", self.degraded), ("after a wait", self.waits)) if so]
        return f"{self.rule or '(no rule)'} -> {self.pool} ({self.model})" + (f", {', '.join(notes)}" if notes else "")


class ReplayedRequest(Struct, frozen=True):
    """One recorded request."""

    trace_id: str
    tenant: str
    key_id: str
    began_ms: int
    """Milliseconds since the epoch."""
    took_ms: int | None
    """None: it was not answered by a node."""
    charged: int
    """Tokens."""
    answered: int
    """Those of the answer among them."""
    reserved: int
    """Tokens; 0: nothing was."""
    intent: Intent | None
    """None: it was refused before it was read."""
    fate: ReplayOutcome
    """As it was."""


class ReplayRun:
    """One configuration's decisions about a record.

    Args:
        view: The configuration.
        members: Its nodes.
        owners: Tenant and key by key id.
    """

    def __init__(self, view: DecisionView, members: PoolMembership, owners: Mapping[str, Authenticated]) -> None:
        self._view = view
        self._owners = owners
        self._placer = NodeSelector(LoadModel(), members)
        self._twin = InMemoryLedger()
        self._fates: dict[int, ReplayOutcome] = {}
        self._events: list[tuple[int, int, int, bool]] = []
        """When (ms), a running number, which request, and whether it ends or comes (again)."""
        self._count = 0
        self._usual: Mapping[str, tuple[int, int, int]] = {}

    def fates(self, record: Sequence[ReplayedRequest]) -> list[ReplayOutcome]:
        """What becomes of each of them, in their order."""
        self._usual = usual(record)
        for at, past in enumerate(record):
            self._schedule(past.began_ms, at, ends=False)
        while self._events:
            now_ms, _, at, ends = heappop(self._events)
            past = record[at]
            if ends:
                self._twin.settle(past.tenant, str(at), past.charged or self._usual.get(past.tenant, _NEVER)[1], now_ms)
            else:
                self._fates[at] = self._comes(at, past, now_ms)
        return [self._fates[at] for at in range(len(record))]

    def _schedule(self, when_ms: int, at: int, *, ends: bool) -> None:
        self._count += 1
        heappush(self._events, (when_ms, self._count, at, ends))

    def _comes(self, at: int, past: ReplayedRequest, now_ms: int) -> ReplayOutcome:
        who = self._owners.get(past.key_id)
        if past.intent is None:
            return past.fate
        if who is None or who.tenant.id != past.tenant:
            return ReplayOutcome(refusal=RefusalCode.INVALID_API_KEY.code)
        routed = self._routed(past, past.intent, who)
        if isinstance(routed, Refusal):
            return ReplayOutcome(refusal=routed.code.code)
        target = self._placer.target(routed, RequestSize.of(past.intent, _BAND), now_ms / 1000)
        if isinstance(target, Refusal):
            return ReplayOutcome(refusal=target.code.code)
        expected = past.reserved - past.intent.prompt_tokens if past.reserved else None
        reply = self._twin.reserve(
            claim_for(
                view=self._view,
                request_id=str(at),
                intent=past.intent,
                who=who,
                model=target.pool.model,
                expected=expected,
                lease_ms=LEASE_MS,
            ),
            now_ms,
        )
        waited = now_ms - past.began_ms
        if isinstance(reply, Denied):
            if is_queueable(reply) and waited + _LOOK_AGAIN_MS <= who.tenant.queueing.max_wait_ms:
                self._schedule(now_ms + _LOOK_AGAIN_MS, at, ends=False)
                return ReplayOutcome(waits=True)
            return ReplayOutcome(refusal=_refusal(reply))
        took_ms = self._usual.get(past.tenant, _NEVER)[0] if past.took_ms is None else past.took_ms
        self._schedule(now_ms + took_ms, at, ends=True)
        return ReplayOutcome(target.pool.name, target.pool.model, routed.rule, degraded=bool(target.degraded), waits=waited > 0)

    def _routed(self, past: ReplayedRequest, intent: Intent, who: Authenticated) -> Routed | Refusal:
        """By the headers that the rule asks for which took it, where that rule still takes it; else without."""
        table, hour, versions = self._view.table, past.began_ms // _HOUR_MS % 24, self._placer.members.versions
        return table.route(intent, who.tenant, head_of(past, intent, who, table, versions), hour, versions)


def head_of(past: ReplayedRequest, intent: Intent, who: Authenticated, table: RouteTable, versions: VersionsOf) -> RequestHead:
    """The head of a recorded request, as far as it is known: the task tier, and what the rule asks for which took it and still does."""
    hour = past.began_ms // _HOUR_MS % 24
    tier = {"x-task-tier": intent.task_tier} if intent.task_tier else {}
    for rule in table.rules_for(intent.model):
        if past.fate.rule and rule.id == past.fate.rule:
            for wish in wishes(rule.condition):
                head = RequestHead("POST", intent.operation.value, {**wish.headers, **tier})
                routed = table.route(intent, who.tenant, head, hour, versions)
                if isinstance(routed, Routed) and routed.rule == rule.id:
                    return head
    return RequestHead("POST", intent.operation.value, tier)


def intent_of(tags: Tags, operation: str, prompt_tokens: int, *, stream: bool) -> Intent | None:
    """The intent that a record's tags speak of; None: they name no operation. What was expected of its answers counts for all of them."""
    if not tags.model or operation not in set(Operation):
        return None
    wanted = Priority(tags.priority) if tags.priority in set(Priority) else None
    return Intent(
        operation=Operation(operation),
        model=tags.model,
        estimate=Estimate(prompt_tokens, longest=Estimate(tags.longest) if tags.longest else None),
        output_tokens=tags.output_tokens,
        stream=stream,
        task_tier=tags.task_tier,
        version=tags.version,
        priority=wanted,
        output_each=None if tags.output_tokens is None else tags.output_tokens // tags.answers,
    )


def usual(record: Sequence[ReplayedRequest]) -> dict[str, tuple[int, int, int]]:
    """How long answers to a tenant took on average, in ms, what they cost, and how long they were, in tokens."""
    sums: dict[str, tuple[int, int, int, int]] = {}
    for past in record:
        if past.took_ms is not None:
            count, took_ms, tokens, answered = sums.get(past.tenant, (0, 0, 0, 0))
            sums[past.tenant] = count + 1, took_ms + past.took_ms, tokens + past.charged, answered + past.answered
    return {tenant: (took_ms // count, tokens // count, answered // count) for tenant, (count, took_ms, tokens, answered) in sums.items()}


def _refusal(denied: Denied) -> str:
    if denied.dimension == _NO_LIMIT:
        return RefusalCode.REQUEST_EXCEEDS_LIMIT.code
    return (RefusalCode.CONCURRENCY_LIMIT_EXCEEDED if denied.dimension == "max_streams" else RefusalCode.RATE_LIMIT_EXCEEDED).code

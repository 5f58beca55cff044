"""The role `replay`: recorded requests under another configuration, and what would be different.

Rule: with the configuration of then at hand (`before`), both are run and compared, so that nothing but the two configurations can make a
difference. Without it the record itself is compared with, of those requests whose fate a configuration decides.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from din_extproc.admit.identities import make_identity
from din_extproc.admit.keys import Authenticated
from din_extproc.audit.chain import decode_line, parse_line
from din_extproc.audit.records import RefusalRecord, SettlementRecord
from din_extproc.audit.verify import split_lines
from din_extproc.domain.price import format_money
from din_extproc.domain.progress import ShareDone, ignore_progress, part_of
from din_extproc.domain.request import BUILT_IN, Operation
from din_extproc.domain.usage import Tags, Usage
from din_extproc.domain.verdict import RefusalCode
from din_extproc.edge.audit.files import read_log, replicas
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.settings import Settings
from din_extproc.tools.replay.rerun import OwnerFinder, ReplayedRequest, ReplayOutcome, ReplayRun, intent_of

_EXAMPLES = 3
_BY_CONFIGURATION = frozenset(
    code.code
    for code in (
        RefusalCode.MODEL_NOT_FOUND,
        RefusalCode.MODEL_NOT_ALLOWED,
        RefusalCode.INVALID_API_KEY,
        RefusalCode.CONTEXT_LENGTH_EXCEEDED,
        RefusalCode.REQUEST_EXCEEDS_LIMIT,
        RefusalCode.RATE_LIMIT_EXCEEDED,
        RefusalCode.CONCURRENCY_LIMIT_EXCEEDED,
        RefusalCode.BUDGET_EXCEEDED,
        RefusalCode.VERSION_MISMATCH,
    )
)
"""Refusals that follow from the configuration and the requests; the others depend on the moment."""


class ReplayRefused(Exception):  # noqa: N818 - it says what the record is
    """There is no record to read."""


class OutcomeChange(Struct, frozen=True):
    """Requests of one tenant whose outcome changes in the same way."""

    tenant: str
    before: str
    after: str
    requests: int
    tokens: int
    """The tokens charged for them."""
    examples: tuple[str, ...]
    """Trace ids."""


class TenantCost(Struct, frozen=True):
    """The cost of a tenant's requests, in the currency of the configuration to try."""

    tenant: str
    before: str
    """By the configuration of then; without one, as recorded."""
    after: str


class ReplayReport(Struct, frozen=True):
    """A record under two configurations."""

    requests: int
    """Those that were decided again."""
    skipped: int
    """Those that were refused before they were read, or whose fate no configuration decides."""
    changes: tuple[OutcomeChange, ...]
    currency: str = ""
    costs: tuple[TenantCost, ...] = ()
    """Of all requests; none without prices. Those that are skipped count with the model that answered them."""

    def lines(self) -> list[str]:
        """A table in Markdown, for a terminal and a pull request."""
        moved = sum(change.requests for change in self.changes)
        summary = f"{self.requests} requests decided again, {moved} fare otherwise" + (f"; {self.skipped} skipped" if self.skipped else "")
        cost_lines = self._cost_lines()
        if not self.changes:
            return [summary, *cost_lines]
        rows = [
            f"| {change.tenant} | {change.before} | {change.after} | {change.requests} | {change.tokens} | {', '.join(change.examples)} |"
            for change in self.changes
        ]
        head = ["| tenant | before | after | requests | tokens | for example |", "|---|---|---|---|---|---|"]
        return [summary, "", *head, *rows, *cost_lines]

    def _cost_lines(self) -> list[str]:
        rows = [f"| {each.tenant} | {each.before} | {each.after} |" for each in self.costs]
        return ["", f"| tenant | cost before, {self.currency} | cost after |", "|---|---|---|", *rows] if rows else []


def replay(folders: tuple[Path, ...], after: Settings, before: Settings | None, progress: ShareDone = ignore_progress) -> ReplayReport:
    """Decide again.

    Args:
        folders: With audit logs of one or more replicas.
        after: The configuration to try.
        before: The one that was in use; None: the record is compared with.
        progress: Takes the share done.

    Raises:
        ReplayRefused: a folder can't be read or holds no audit log.
    """
    record = recorded(folders, after.operations)
    decided = [past for past in record if past.intent is not None and (before is not None or _by_configuration(past.fate))]
    first, second = None if before is None else _rerun(before), _rerun(after)
    then = [past.fate for past in decided] if first is None else first.fates(decided, part_of(progress, 0, 2))
    now = second.fates(decided, part_of(progress, 1, 2))
    if before is None:
        now = [_comparable(past, fate) for past, fate in zip(decided, now, strict=True)]
    left = [past for past in record if past.intent is None or not (before is not None or _by_configuration(past.fate))]
    return ReplayReport(
        len(decided),
        len(left),
        tuple(_changes(decided, then, now)),
        currency=after.prices.currency,
        costs=_costs(record, left, (first, before), (second, after)) if after.prices.models else (),
    )


def _costs(
    record: list[ReplayedRequest],
    left: list[ReplayedRequest],
    before: tuple[ReplayRun | None, Settings | None],
    after: tuple[ReplayRun, Settings],
) -> tuple[TenantCost, ...]:
    """Return the cost of the recorded requests, by tenant and in total. `left`: those that were not decided again."""
    sums: list[Counter[str]] = []
    for run, settings in (before, after):
        if run is None or settings is None:
            found = Counter[str]()
            for past in record:
                found[past.tenant] += past.cost
        else:
            found = Counter(run.costs)
            for past in left:
                found[past.tenant] += settings.prices.cost(past.fate.model, past.began_ms / 1000, past.usage, past.media)
        found["(all)"] = sum(found.values())
        sums.append(found)
    then, now = sums
    return tuple(TenantCost(tenant, format_money(then[tenant]), format_money(now[tenant])) for tenant in sorted(then | now) if tenant)


def _comparable(past: ReplayedRequest, fate: ReplayOutcome) -> ReplayOutcome:
    """The fate as a record could tell it: a wait is not recorded, and whether a long request finds a slot depends on the moment."""
    moment = fate.refusal == RefusalCode.INSUFFICIENT_GPU_CAPACITY.code
    return past.fate if moment else msgspec.structs.replace(fate, waits=False)


def _rerun(settings: Settings) -> ReplayRun:
    return ReplayRun(make_view(settings, {}), PoolMembership.from_pools(settings.pools), owner_finder(settings))


def _by_configuration(fate: ReplayOutcome) -> bool:
    return fate.refusal in _BY_CONFIGURATION if fate.refusal else not fate.degraded


def _changes(record: list[ReplayedRequest], then: list[ReplayOutcome], now: list[ReplayOutcome]) -> Iterator[OutcomeChange]:
    found: dict[tuple[str, str, str], list[ReplayedRequest]] = {}
    for past, before, after in zip(record, then, now, strict=True):
        if before != after:
            found.setdefault((past.tenant, before.text, after.text), []).append(past)
    for (tenant, before_text, after_text), pasts in sorted(found.items(), key=lambda item: -len(item[1])):
        examples = tuple(past.trace_id for past in pasts[:_EXAMPLES])
        yield OutcomeChange(
            tenant=tenant,
            before=before_text,
            after=after_text,
            requests=len(pasts),
            tokens=sum(past.usage.total_tokens for past in pasts),
            examples=examples,
        )


def recorded(folders: Iterable[Path], operations: Mapping[str, Operation] = BUILT_IN) -> list[ReplayedRequest]:
    """The requests of audit logs for these operations, in the order in which they came.

    Raises:
        ReplayRefused: a folder can't be read or holds no audit log.
    """
    return sorted(_pasts(folders, operations), key=lambda past: (past.began_ms, past.trace_id))


def owner_finder(settings: Settings) -> OwnerFinder:
    """Return what finds tenants and keys under the configuration."""
    keys = {(tenant.id, key.id): Authenticated(tenant, key) for tenant, own in settings.keys for key in own}
    rules = settings.identity
    kinds = {"jwt": rules.jwt, "certificate": rules.certificates, "gateway": rules.gateway}

    def find(past: ReplayedRequest) -> Authenticated | None:
        kind, separator, _ = past.key_id.partition(":")
        tenant = settings.find_tenant(past.tenant) if separator and kinds.get(kind) else None
        return keys.get((past.tenant, past.key_id)) if tenant is None else make_identity(rules, tenant, past.key_id)

    return find


def _pasts(folders: Iterable[Path], operations: Mapping[str, Operation]) -> Iterator[ReplayedRequest]:
    found = False
    for folder in folders:
        try:
            for replica in replicas(folder):
                found = True
                for _, content in read_log(folder, replica).segments:
                    yield from filter(None, (_past(line, operations) for line in split_lines(content)))
        except OSError as error:
            raise ReplayRefused(f"{folder}: {error.strerror or error}") from error
    if not found:
        raise ReplayRefused(f"no audit log found in {', '.join(map(str, folders))}")


def _past(text: bytes, operations: Mapping[str, Operation]) -> ReplayedRequest | None:
    """Return the request of a line; None: the line records something else, or is malformed."""
    line = parse_line(text)
    event = None if line is None else decode_line(line, SettlementRecord) or decode_line(line, RefusalRecord)
    if event is None:
        return None
    tags = Tags(
        model=event.asked_for,
        output_tokens=event.output_asked,
        version=event.version_asked,
        task_tier=event.task_tier,
        timeout_ms=event.timeout_ms,
        budget_tokens=event.budget_tokens,
        budget_cost=event.budget_cost,
        priority=event.priority,
        answers=event.answers_asked,
        longest=event.longest_estimate,
    )
    intent = intent_of(tags, event.operation, event.prompt_estimate, stream=event.stream, operations=operations)
    took_ms = round(event.duration_ms or 0.0)
    began_ms = round(event.at * 1000) - took_ms
    if isinstance(event, RefusalRecord):
        usage, media, cost, reserved, fate = Usage(0, 0), 0, 0, 0, ReplayOutcome(refusal=event.code)
    else:
        usage = Usage(
            event.prompt_tokens,
            event.completion_tokens,
            event.cached_tokens,
            images=event.images,
            audio_seconds=event.audio_seconds,
        )
        media, cost, reserved = event.media, event.cost, event.reserved_tokens
        fate = ReplayOutcome(event.pool, event.model, event.rule, degraded=event.degraded)
    return ReplayedRequest(
        trace_id=event.trace_id,
        tenant=event.tenant,
        key_id=event.key_id,
        began_ms=began_ms,
        took_ms=None if isinstance(event, RefusalRecord) else took_ms,
        usage=usage,
        media=media,
        cost=cost,
        reserved=reserved,
        intent=intent,
        entry=event.entry,
        fate=fate,
    )

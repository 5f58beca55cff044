"""Makes audit records of decisions and finished exchanges.

Rule: names, numbers and codes only; see `audit/records.py`.
"""

from typing import Any

from din_extproc.audit.records import AdmissionRecord, RefusalRecord, SettlementRecord
from din_extproc.domain.usage import ExchangeRecord, Outcome, Tags
from din_extproc.flow.decision import Decision, PendingRequest

_NO_TAGS = Tags()


def make_admission_record(granted: Decision, request: PendingRequest, at: float) -> AdmissionRecord:
    """A request is sent on. `at`: seconds since the epoch."""
    claim, who = granted.claim, request.who
    return AdmissionRecord(
        at=at,
        request_id=claim.request_id,
        trace_id=request.trace_id,
        tenant=claim.tenant,
        key_id="" if who is None else who.key.id,
        model=granted.target.pool.model,
        pool=granted.target.pool.name,
        node_id=granted.selection.nodes[0].id,
        reserved_tokens=claim.tokens,
    )


def make_ending_record(record: ExchangeRecord) -> RefusalRecord | SettlementRecord:
    """An exchange is over."""
    at = round(record.started_at + (record.duration_ms or 0.0) / 1000, 6)
    if record.outcome is Outcome.REFUSED and not record.request_id:
        return RefusalRecord(
            at=at,
            trace_id=record.trace_id,
            code=record.refusal,
            status=record.status,
            tenant=record.tenant,
            key_id=record.key_id,
            **_tags(record),
            screening=record.screening,
        )
    usage = record.usage
    return SettlementRecord(
        at=at,
        request_id=record.request_id,
        trace_id=record.trace_id,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model,
        version=record.version,
        alias=record.alias,
        pool=record.pool,
        rule=record.rule,
        node_id=record.node_id,
        outcome=record.outcome.value,
        status=record.status,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        estimated=usage.estimated,
        images=usage.images,
        audio_seconds=usage.audio_seconds,
        media=record.media,
        reserved_tokens=record.reserved_tokens,
        cost=record.cost,
        attempts=record.attempts,
        degraded=record.degraded,
        left_site=record.left_site,
        error=record.error,
        **_tags(record),
        screening=record.screening,
    )


def _tags(record: ExchangeRecord) -> dict[str, Any]:
    """The fields of `Tagged`."""
    tags = record.tags or _NO_TAGS
    return {
        "asked_for": tags.model,
        "operation": record.operation,
        "stream": record.stream,
        "prompt_estimate": record.prompt_estimate,
        "output_asked": tags.output_tokens,
        "answers_asked": tags.answers,
        "longest_estimate": tags.longest,
        "version_asked": tags.version,
        "task_tier": tags.task_tier,
        "timeout_ms": tags.timeout_ms,
        "budget_tokens": tags.budget_tokens,
        "budget_cost": tags.budget_cost,
        "priority": tags.priority,
        "entry": tags.entry,
        "duration_ms": record.duration_ms,
    }

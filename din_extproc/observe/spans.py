"""From a finished exchange to its spans: the gateway's, the wait before the node, the way to the node, the stream; from a failed try, one.

Rule: nothing of the prompt or the answer is an attribute; ids of spans are made from the gateway's, so that both planes know them.
"""

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome
from din_extproc.observe import instruments as of
from din_extproc.observe.exchange_metrics import operation_name

_TO_NODE, _ADMISSION, _STREAM = 1 << 63, 1 << 62, 3 << 62
_SAMPLED = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-01").fullmatch
_ID_BYTES = 8
Attribute = str | int | float | bool


class Span(Struct, frozen=True, gc=False):
    """One span. Times in microseconds since the epoch."""

    name: str
    kind: str
    """`server`, `client` or `internal`."""
    trace_id: str
    span_id: str
    parent_id: str
    start_us: int
    end_us: int
    attributes: Mapping[str, Attribute]
    events: tuple[tuple[str, int], ...] = ()
    """Names, and when."""
    error: str = ""


def derive_node_span_id(span_id: str) -> str:
    """The id of the span of the way to the node, from the gateway's."""
    return _derive_span_id(span_id, _TO_NODE)


def build_attempt_span(attempt: FailedAttempt) -> Span | None:
    """The span of one try at a node that failed, beside that of the way to the node that answered; None: the exchange leaves none."""
    context = _SAMPLED(attempt.traceparent)
    if context is None:
        return None
    trace_id, way = context.groups()
    own = blake2b(f"{way} {attempt.started_at} {attempt.node_id}".encode(), digest_size=_ID_BYTES).hexdigest()
    start = round(attempt.started_at * 1e6)
    attributes: dict[str, Attribute] = {of.NODE: attempt.node_id, of.ERROR_TYPE: attempt.reason}
    end = start + round(attempt.duration_ms * 1000)
    return Span(
        name="din.attempt",
        kind="client",
        trace_id=trace_id,
        span_id=own,
        parent_id=_derive_span_id(way, _TO_NODE),
        start_us=start,
        end_us=end,
        attributes=attributes,
        error=attempt.reason,
    )


def build_spans(record: ExchangeRecord) -> Iterator[Span]:
    """The spans of an exchange that was chosen for it; none of another."""
    trace_id, _, rest = record.span.partition("-")
    span_id, _, parent_id = rest.partition("-")
    if not span_id:
        return
    start, end = round(record.started_at * 1e6), _add_ms(record, record.duration_ms or 0.0)
    error = "" if record.outcome is Outcome.COMPLETED else record.refusal or record.outcome.value
    operation = operation_name(record.operation)
    name = f"{operation} {record.model}" if record.model else "refused"
    yield Span(
        name=name,
        kind="server",
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start_us=start,
        end_us=end,
        attributes=_make_attributes(record, operation, error),
        error=error,
    )
    if record.sent_ms is None:
        return
    sent = _add_ms(record, record.sent_ms)
    yield Span(
        name="din.admission",
        kind="internal",
        trace_id=trace_id,
        span_id=_derive_span_id(span_id, _ADMISSION),
        parent_id=span_id,
        start_us=_add_ms(record, record.received_ms or 0.0),
        end_us=sent,
        attributes={of.POOL: record.pool},
    )
    yield from _build_node_spans(record, trace_id, span_id, sent, error)


def _build_node_spans(record: ExchangeRecord, trace_id: str, span_id: str, sent: int, error: str) -> Iterator[Span]:
    """Yield the span from the gateway to the node, and that of the answer's tokens inside it."""
    end = _add_ms(record, record.duration_ms or 0.0)
    way = derive_node_span_id(span_id)
    first = None if record.first_token_ms is None else _add_ms(record, record.first_token_ms)
    events = () if first is None else (("first_token", first),)
    attributes: dict[str, Attribute] = {of.NODE: record.node_id, "din.attempts": record.attempts, of.MODEL: record.model}
    yield Span(
        name="din.node",
        kind="client",
        trace_id=trace_id,
        span_id=way,
        parent_id=span_id,
        start_us=sent,
        end_us=max(sent, end),
        attributes=attributes,
        events=events,
        error=error if record.node_id else "",
    )
    if first is not None:
        tokens: dict[str, Attribute] = {"gen_ai.usage.output_tokens": record.usage.completion_tokens}
        yield Span(
            name="din.stream",
            kind="internal",
            trace_id=trace_id,
            span_id=_derive_span_id(span_id, _STREAM),
            parent_id=way,
            start_us=first,
            end_us=max(first, end),
            attributes=tokens,
        )


def _make_attributes(record: ExchangeRecord, operation: str, error: str) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "din.trace_id": record.trace_id,
        "din.request_id": record.request_id,
        of.OUTCOME: record.outcome.value,
        of.TENANT: record.tenant,
        "din.key.id": record.key_id,
        of.POOL: record.pool,
        of.RULE: record.rule,
        of.NODE: record.node_id,
        of.OPERATION: operation,
        of.MODEL: record.model,
        "din.model.version": record.version,
        "http.response.status_code": record.status,
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": record.usage.completion_tokens,
        of.ESTIMATED: record.usage.estimated,
        "din.degraded": record.degraded,
        "din.response_flags": ",".join(record.response_flags),
        of.ERROR_TYPE: error,
    }
    return {name: value for name, value in found.items() if value != ""}


def _add_ms(record: ExchangeRecord, ms: float) -> int:
    return round(record.started_at * 1e6 + ms * 1000)


def _derive_span_id(span_id: str, mask: int) -> str:
    return f"{int(span_id, 16) ^ mask:016x}"

"""Timings of one exchange by the gateway's clock, to compare with measurements from outside."""

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord


class GatewayTimes(Struct, frozen=True, omit_defaults=True):
    """Moments of one exchange in milliseconds since the request's first byte; None where Envoy has no value."""

    trace_id: str
    started_at: float
    """Time of the request's first byte: seconds since the Unix epoch, by the gateway's clock."""
    outcome: str
    status: int = 0
    node_id: str = ""
    """The node that answered last, "" when none was reached."""
    pool: str = ""
    attempts: int = 0
    completion_tokens: int = 0
    received_ms: float | None = None
    """The request's last byte."""
    sent_ms: float | None = None
    """The first byte that went to the node."""
    first_token_ms: float | None = None
    """The first token of a stream."""
    node_ended_ms: float | None = None
    """The last byte that came from the node."""
    ended_ms: float | None = None
    """The last byte that went to the client."""
    exec_ms: float | None = None
    """Duration at the node: from `sent_ms` to `node_ended_ms`."""
    decided_ms: float | None = None
    """Duration of the decision, `waited_ms` included."""
    waited_ms: float = 0.0
    """Time spent in the admission queue."""

    @classmethod
    def from_record(cls, record: ExchangeRecord) -> "GatewayTimes":
        """Build the timings from a record of Envoy's access log."""
        return cls(
            trace_id=record.trace_id,
            started_at=record.started_at,
            outcome=record.outcome.value,
            status=record.status,
            node_id=record.node_id,
            pool=record.pool,
            attempts=record.attempts,
            completion_tokens=record.usage.completion_tokens,
            received_ms=record.received_ms,
            sent_ms=record.sent_ms,
            first_token_ms=record.first_token_ms,
            node_ended_ms=record.node_ended_ms,
            ended_ms=record.duration_ms,
            exec_ms=record.exec_ms,
            decided_ms=record.decided_ms,
            waited_ms=record.waited_ms,
        )

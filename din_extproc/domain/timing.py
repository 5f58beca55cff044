"""One exchange as the gateway's clock saw it: what people who look at a deployment from outside hold against their own clock."""

from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord


class GatewayTimes(Struct, frozen=True, omit_defaults=True):
    """When what happened. Milliseconds since the request's first byte, None where Envoy has none."""

    trace_id: str
    started_at: float
    """The request's first byte: seconds since the epoch, by the gateway's clock."""
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
    """The first token, of a stream."""
    node_ended_ms: float | None = None
    """The last byte that came from the node."""
    ended_ms: float | None = None
    """The last byte that went to the client."""
    decided_ms: float | None = None
    """How long the verdict took, `waited_ms` included. Not a moment."""
    waited_ms: float = 0.0
    """How long the request stood in line for tokens or slots. Not a moment."""

    @classmethod
    def of(cls, record: ExchangeRecord) -> "GatewayTimes":
        """From what Envoy's access log told."""
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
            decided_ms=record.decided_ms,
            waited_ms=record.waited_ms,
        )

"""Exchange log: one JSON object per line and exchange.

Invariant: lines hold names, numbers and codes only; they are formatted in batches outside the request path.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import Struct

from din_extproc.domain.usage import ExchangeRecord, Outcome

Which = Literal["all", "failed", "none"]
_AT_ONCE = 16
"""Lines per batch: some hundred microseconds."""
_MOST_WAITING = 20_000


class _LogLine(Struct, frozen=True, omit_defaults=True):
    time: str
    level: str
    logger: str
    message: str
    trace_id: str
    request_id: str = ""
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    pool: str = ""
    rule: str = ""
    node_id: str = ""
    outcome: str = ""
    status: int = 0
    code: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    attempts: int = 0
    degraded: bool = False
    duration_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    to_node_ms: float | None = None
    exec_ms: float | None = None
    flags: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


class ExchangeLog:
    """Writer of the exchange log.

    Args:
        which: All exchanges, failed ones, or none.
        write: Called with complete lines.
    """

    def __init__(self, which: Which, write: Callable[[bytes], object]) -> None:
        self._which = which
        self._write = write
        self._waiting: list[ExchangeRecord] = []

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Log a finished exchange. On overload the newest exchanges are dropped."""
        if self._which == "none" or (self._which == "failed" and record.outcome is Outcome.COMPLETED):
            return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(record)

    async def flush(self) -> None:
        """Write pending lines."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _AT_ONCE):
            self._write(b"".join([_encode(_make_line(record)) + b"\n" for record in waiting[start : start + _AT_ONCE]]))
            await asyncio.sleep(0)


def _make_line(record: ExchangeRecord) -> _LogLine:
    ended = datetime.fromtimestamp(record.started_at + (record.duration_ms or 0.0) / 1000, UTC)
    return _LogLine(
        time=ended.isoformat(timespec="milliseconds"),
        level="info" if record.outcome in {Outcome.COMPLETED, Outcome.REFUSED} else "warning",
        logger="din_extproc.exchange",
        message="exchange",
        trace_id=record.trace_id,
        request_id=record.request_id,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model,
        version=record.version,
        pool=record.pool,
        rule=record.rule,
        node_id=record.node_id,
        outcome=record.outcome,
        status=record.status,
        code=record.refusal or record.error,
        prompt_tokens=record.usage.prompt_tokens,
        completion_tokens=record.usage.completion_tokens,
        estimated=record.usage.estimated,
        attempts=record.attempts,
        degraded=record.degraded,
        duration_ms=record.duration_ms,
        first_token_ms=record.first_token_ms,
        last_token_ms=record.last_token_ms,
        to_node_ms=record.dispatch_delay_ms,
        exec_ms=record.exec_ms,
        flags=record.response_flags,
    )

"""The requests of an engine and their outcomes, for tests that compare settlement with them.

Rule: bounded: totals count all requests, records exist of the newest only.
"""

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from din_extproc.tools.engine_model.engine import SimulatedSequence

_RECORDS = 2000
_BODY_BYTES = 64 * 2**20


@dataclass(slots=True, eq=False)
class SeenRequest:
    """One request. Times in seconds since the epoch; None: not yet, or never."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    started: float
    status: int | None = None
    prompt_tokens: int = 0
    sequences: Sequence[SimulatedSequence] = field(default=())
    first_byte: float | None = None
    ended: float | None = None
    outcome: str = "running"
    """`running`, `completed`, `refused`, `faulted` (a fault switch ended it) or `aborted` (the client went away)."""

    @property
    def completion_tokens(self) -> int:
        """The tokens that were produced."""
        return sum(sequence.produced for sequence in self.sequences)

    def finish(self, outcome: str, status: int | None, now: float) -> None:
        """Record how it ended, once."""
        if self.ended is None:
            self.outcome, self.status, self.ended = outcome, status, now


class RequestHistory:
    """The newest requests, oldest first, and the totals."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._forget()

    def _forget(self) -> None:
        self._records: deque[SeenRequest] = deque()
        self._body_bytes = 0
        self._dropped = dict.fromkeys(("requests", "prompt_tokens", "completion_tokens", "completed", "refused", "faulted", "aborted"), 0)

    def add(self, record: SeenRequest) -> None:
        """Record a request; the oldest ones are dropped."""
        self._records.append(record)
        self._body_bytes += len(record.body)
        while len(self._records) > _RECORDS or (self._body_bytes > _BODY_BYTES and len(self._records) > 1):
            oldest = self._records.popleft()
            self._body_bytes -= len(oldest.body)
            _count(self._dropped, oldest)

    def clear(self) -> None:
        """Forget all requests, totals too."""
        self._forget()

    def report(self, last: int) -> dict[str, Any]:
        """Return totals and the `last` records, with their bodies in base64."""
        totals = {**self._dropped, "running": 0}
        for record in self._records:
            _count(totals, record)
        chosen = list(self._records)[-last:] if last else []
        return {"totals": totals, "requests": [_describe_request(record) for record in chosen]}


def _count(totals: dict[str, int], record: SeenRequest) -> None:
    totals["requests"] += 1
    totals["prompt_tokens"] += record.prompt_tokens
    totals["completion_tokens"] += record.completion_tokens
    totals[record.outcome] = totals.get(record.outcome, 0) + 1


def _describe_request(record: SeenRequest) -> dict[str, Any]:
    return {
        "method": record.method,
        "path": record.path,
        "headers": [list(pair) for pair in record.headers],
        "body_base64": b64encode(record.body).decode(),
        "started": record.started,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "first_byte": record.first_byte,
        "ended": record.ended,
        "outcome": record.outcome,
    }

"""Results of double checks: counted, recorded, and disagreements logged and counted against the nodes.

Rule: if no third node decides between two, both lose some trust, each at most once in ten minutes: never the whole pool.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from din_extproc.audit.records import Mismatched
from din_extproc.domain.agreement import Agreement, DoubleCheckResult
from din_extproc.edge.clock import SystemClock

_log = logging.getLogger(__name__)

_BLAME_PAUSE_S = 600.0
_REMEMBERED = 10_000


class AgreementRecorder(Protocol):
    """Counts agreements and disagreements for and against nodes."""

    async def record_comparison(self, node_id: str, *, agreements: int = 0, disagreements: int = 0, reason: str = "") -> None:
        """Add agreements and disagreements of a node with another node of its kind."""


class DoubleChecks:
    """Takes the results of all double checks of this sidecar.

    Args:
        note: Writes an event into the audit log.
    """

    def __init__(self, note: Callable[[Mismatched], None]) -> None:
        self._note = note
        self._blamed_at: dict[str, float] = {}
        """When a node was last blamed without a third node's answer."""
        self.recorder: AgreementRecorder | None = None
        self.counts = dict.fromkeys((each.value for each in Agreement), 0)

    async def on_results(self, found: Iterable[Any]) -> None:
        """Take results of this process or another one."""
        for each in found:
            compared = each if type(each) is DoubleCheckResult else msgspec.convert(each, DoubleCheckResult)
            self.counts[compared.agreement] += 1
            if compared.agreement is Agreement.DIFFER:
                await self._on_difference(compared)
            elif compared.agreement is Agreement.AGREE and self.recorder is not None:
                for node_id in (compared.node_id, compared.second_node_id):
                    await self.recorder.record_comparison(node_id, agreements=1)

    async def _on_difference(self, compared: DoubleCheckResult) -> None:
        reason = f"{compared.node_id} and {compared.second_node_id} differ at token {compared.at_token}"
        _log.error(
            "double check failed: %s (%s %s, %s), blamed: %s; trace id %s",
            *(reason, compared.model, compared.version, compared.dtype, ", ".join(compared.blamed), compared.trace_id),
        )
        record = Mismatched(
            at=SystemClock.wall(),
            trace_id=compared.trace_id,
            model=compared.model,
            version=compared.version,
            dtype=compared.dtype,
            node_id=compared.node_id,
            second_node_id=compared.second_node_id,
            at_token=compared.at_token,
            tokens=compared.tokens,
        )
        self._note(record)
        if self.recorder is None:
            return
        for node_id in compared.blamed:
            if len(compared.blamed) == 1 or self._may_be_blamed(node_id):
                await self.recorder.record_comparison(node_id, disagreements=1, reason=reason)

    def _may_be_blamed(self, node_id: str) -> bool:
        now = SystemClock.monotonic()
        if now - self._blamed_at.get(node_id, -_BLAME_PAUSE_S) < _BLAME_PAUSE_S:
            return False
        if len(self._blamed_at) >= _REMEMBERED:
            self._blamed_at.clear()
        self._blamed_at[node_id] = now
        return True

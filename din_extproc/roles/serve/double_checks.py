"""What is done about double checks (R41): counted, written down, and where nodes differ said loudly and held against them.

Rule: a pair that no third node could tell apart costs both some trust, at most once in ten minutes each: never the whole pool.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from din_extproc.audit.records import Mismatched
from din_extproc.domain.agreement import Agreement, DoubleCheckResult
from din_extproc.edge.clock import SystemClock

_log = logging.getLogger(__name__)

_UNTOLD_S = 600.0
_REMEMBERED = 10_000


class AgreementRecorder(Protocol):
    """Holds agreements and disagreements against nodes."""

    async def compare(self, node_id: str, *, agreements: int = 0, disagreements: int = 0, reason: str = "") -> None:
        """So many answers were what another of its kind gives too, and so many were not."""


class DoubleChecks:
    """Hears of every double check of this sidecar.

    Args:
        note: Writes into the audit log.
    """

    def __init__(self, note: Callable[[Mismatched], None]) -> None:
        self._note = note
        self._told: dict[str, float] = {}
        """When a node was last blamed without a third one's word."""
        self.registrar: AgreementRecorder | None = None
        """None: nodes do not register, so that there is no trust to lose."""
        self.counts = dict.fromkeys((each.value for each in Agreement), 0)

    async def heard(self, found: Iterable[Any]) -> None:
        """Checks were done, in this process or another one."""
        for each in found:
            compared = each if type(each) is DoubleCheckResult else msgspec.convert(each, DoubleCheckResult)
            self.counts[compared.agreement] += 1
            if compared.agreement is Agreement.DIFFER:
                await self._differs(compared)
            elif compared.agreement is Agreement.AGREE and self.registrar is not None:
                for node_id in (compared.node_id, compared.second_node_id):
                    await self.registrar.compare(node_id, agreements=1)

    async def _differs(self, compared: DoubleCheckResult) -> None:
        reason = f"{compared.node_id} and {compared.second_node_id} part at token {compared.at_token}"
        _log.error(
            "nodes that should agree do not: %s (%s %s, %s), blamed: %s; trace id %s",
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
        if self.registrar is None:
            return
        for node_id in compared.blamed:
            if len(compared.blamed) == 1 or self._may_be_told(node_id):
                await self.registrar.compare(node_id, disagreements=1, reason=reason)

    def _may_be_told(self, node_id: str) -> bool:
        now = SystemClock.monotonic()
        if now - self._told.get(node_id, -_UNTOLD_S) < _UNTOLD_S:
            return False
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told[node_id] = now
        return True

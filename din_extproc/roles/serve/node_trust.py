"""Trust in nodes by their answers: the evidence about registered nodes is in the shared table, that about listed nodes here.

Rule: a listed node whose answers differ repeatedly is quarantined for every replica; only an operator releases it.
"""

from collections.abc import Awaitable, Callable, Iterable

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Pool
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.registry.registrar import Registrar
from din_extproc.registry.trust import Evidence

_NO_LOAD = Heartbeat(state=NodeState.READY, sequence=0)


class NodeTrust:
    """Takes what this replica finds out about nodes.

    Args:
        registrar: Keeps the evidence about registered nodes; None: nodes do not register.
        quarantine: Keeps a listed node out, for a reason.
    """

    def __init__(self, registrar: Registrar | None, quarantine: Callable[[str, str], Awaitable[None]]) -> None:
        self._registrar = registrar
        self._quarantine = quarantine
        self._listed: dict[str, Evidence] = {}
        self._reported: frozenset[str] = frozenset()
        """Listed nodes that workers trust less than fully."""

    def reload(self, pools: Iterable[Pool]) -> None:
        """Keep evidence about the nodes of these pools, which are listed or were found."""
        new = Evidence(at=SystemClock.wall())
        self._listed = {node.id: self._listed.get(node.id, new) for pool in pools for node in pool.nodes}

    def score(self, node_id: str) -> float:
        """Return the trust in a listed node, from 0 to 1."""
        evidence = self._listed.get(node_id)
        return 1.0 if evidence is None else evidence.score_trust(SystemClock.wall())

    def release(self, node_id: str) -> None:
        """Forget the evidence about a listed node, on an operator's order."""
        if node_id in self._listed:
            self._listed[node_id] = Evidence(at=SystemClock.wall())

    async def record_answers(self, node_id: str, answers: int, failures: int) -> None:
        """Count completed and failed requests of a node."""
        evidence = self._listed.get(node_id)
        if evidence is not None:
            self._listed[node_id] = evidence.add(SystemClock.wall(), answers=answers, failures=failures)
        elif self._registrar is not None:
            await self._registrar.record_answers(node_id, answers, failures)

    async def record_comparison(self, node_id: str, *, agreements: int = 0, disagreements: int = 0, reason: str = "") -> None:
        """Count agreements and disagreements of a node with another node of its kind."""
        evidence = self._listed.get(node_id)
        if evidence is not None:
            evidence = self._listed[node_id] = evidence.add(SystemClock.wall(), agreements=agreements, disagreements=disagreements)
            if disagreements and evidence.is_contradicted:
                await self._quarantine(node_id, f"answers differ: {reason}")
        elif self._registrar is not None:
            await self._registrar.record_comparison(node_id, agreements=agreements, disagreements=disagreements, reason=reason)

    async def record_misidentified(self, node_id: str, count: int, reason: str) -> None:
        """Count answers in which a node stated another identity. A listed node stays in service: its id may be a slip of the file."""
        evidence = self._listed.get(node_id)
        if evidence is not None:
            self._listed[node_id] = evidence.add(SystemClock.wall(), disagreements=count)
        elif self._registrar is not None:
            await self._registrar.record_comparison(node_id, disagreements=count, reason=reason)

    def take_readings(self) -> dict[str, HeartbeatReading]:
        """Return what workers should know: listed nodes that are not fully trusted, and those that are again."""
        now, scores = SystemClock.monotonic(), {node_id: self.score(node_id) for node_id in self._listed}
        doubted = frozenset(node_id for node_id, score in scores.items() if score < 1.0)
        affected, self._reported = doubted | (self._reported & self._listed.keys()), doubted
        return {node_id: HeartbeatReading(_NO_LOAD, now, scores[node_id]) for node_id in affected}

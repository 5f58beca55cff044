"""The orders of operators for nodes, as one replica knows them.

Invariant: the newest order of each node applies, in whichever sequence a replica receives them.
"""

from collections.abc import Iterable, Mapping

from din_extproc.domain.health import BreakerSnapshot, BreakerState, HoldKind, NodeHold

_REMEMBERED_S = 86_400.0
"""Time that a revoked order is remembered, so that a replica that missed the revocation does not restore the order."""


class NodeHolds:
    """The newest order for each node."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[str, NodeHold] = {}

    def merge(self, orders: Iterable[NodeHold]) -> tuple[NodeHold, ...]:
        """Take over the orders that are newer than the known ones, and return those."""
        newer = []
        for order in orders:
            known = self._latest.get(order.node_id)
            if known is None or order.at > known.at:
                self._latest[order.node_id] = order
                newer.append(order)
        return tuple(newer)

    def missing_from(self, shared: Mapping[str, NodeHold]) -> tuple[NodeHold, ...]:
        """Return the orders that are newer than those of the shared table."""
        return tuple(order for node_id, order in self._latest.items() if node_id not in shared or order.at > shared[node_id].at)

    def expire(self, now: float) -> tuple[str, ...]:
        """Forget orders that were taken back long ago, and return their nodes. `now`: seconds since the epoch."""
        old = tuple(node_id for node_id, order in self._latest.items() if order.kind is HoldKind.NONE and now - order.at > _REMEMBERED_S)
        for node_id in old:
            del self._latest[node_id]
        return old

    def get(self, node_id: str) -> NodeHold | None:
        """Return the order in force; None: the node is not held."""
        order = self._latest.get(node_id)
        return None if order is None or order.kind is HoldKind.NONE else order

    def newest(self, node_id: str) -> NodeHold | None:
        """Return the newest order; it may be a revocation."""
        return self._latest.get(node_id)

    def snapshots(self, now: float) -> dict[str, BreakerSnapshot]:
        """Return what workers have to know of held nodes: as if their breakers were open for good. `now`: monotonic seconds."""
        return {
            node_id: BreakerSnapshot(BreakerState.OPEN, now, None, 0.0, order.text)
            for node_id, order in self._latest.items()
            if order.kind is not HoldKind.NONE
        }

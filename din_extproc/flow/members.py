"""Which nodes every pool has at this moment, and what each of them last said.

Rule: which nodes there are never changes inside one `Members`: a change brings a new one. What they say (`hear`) is kept across changes.
"""

from collections.abc import Iterable, Mapping

from din_extproc.domain.membership import Reading
from din_extproc.domain.node import Node, Pool

_NOBODY: tuple[Node, ...] = ()
_NO_VERSIONS: frozenset[str] = frozenset()


class Members:
    """The nodes that requests may go to, by pool.

    Args:
        nodes: By pool name: only those that take requests now.
        readings: What nodes last said, by node id; the one of the predecessor, so that nothing said is lost.
    """

    __slots__ = ("_nodes", "_readings", "_versions")

    def __init__(self, nodes: Mapping[str, tuple[Node, ...]], readings: dict[str, Reading] | None = None) -> None:
        self._nodes = dict(nodes)
        self._readings = {} if readings is None else readings
        self._versions = {pool: frozenset({node.version for node in own}) for pool, own in nodes.items()}

    @classmethod
    def of(cls, pools: Iterable[Pool]) -> "Members":
        """The nodes of the configuration, and no others."""
        return cls({pool.name: pool.nodes for pool in pools})

    def successor(self, nodes: Mapping[str, tuple[Node, ...]]) -> "Members":
        """Other nodes; what those that stay have said is still known. A pool that did not change keeps its tuple."""
        kept = {pool: before if (before := self._nodes.get(pool)) == own else own for pool, own in nodes.items()}
        there = {node.id for own in kept.values() for node in own}
        return Members(kept, {node_id: reading for node_id, reading in self._readings.items() if node_id in there})

    def nodes(self, pool: str) -> tuple[Node, ...]:
        """The pool's nodes: those of the configuration first, then those that registered."""
        return self._nodes.get(pool, _NOBODY)

    def versions(self, pool: str) -> frozenset[str]:
        """The model versions that the pool's nodes serve; empty while it has no node."""
        return self._versions.get(pool, _NO_VERSIONS)

    def reading(self, node_id: str) -> Reading | None:
        """What the node last said of its load; None when it never did."""
        return self._readings.get(node_id)

    def hear(self, node_id: str, reading: Reading) -> None:
        """The node has said how it does."""
        self._readings[node_id] = reading

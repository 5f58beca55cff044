"""The current nodes of every pool.

Invariant: a `PoolMembership` never changes; a change makes a new one.
"""

from collections.abc import Iterable, Mapping

from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Node, Pool

_NO_NODES: tuple[Node, ...] = ()
_NONE: Mapping[str, Node] = {}


class PoolMembership:
    """The nodes that requests may go to, by pool.

    Args:
        configured: By pool name, those of the configuration.
        registered: By pool name and node id, those that registered and take requests now.
        before: The predecessor, whose tuples are kept for pools that have not changed.
    """

    __slots__ = ("_configured", "_nodes", "_registered", "_versions")

    def __init__(
        self,
        configured: Mapping[str, tuple[Node, ...]],
        registered: Mapping[str, Mapping[str, Node]],
        before: "PoolMembership | None" = None,
    ) -> None:
        self._configured = configured
        self._registered = registered
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._versions: dict[str, frozenset[str]] = {}
        for pool in {**configured, **registered}:
            own, came = configured.get(pool, _NO_NODES), registered.get(pool, _NONE)
            if before is not None and before.contains_only(pool, own, came):
                self._nodes[pool] = before.get_nodes(pool)
            else:
                self._nodes[pool] = (*own, *came.values())

    def contains_only(self, pool: str, configured: tuple[Node, ...], registered: Mapping[str, Node]) -> bool:
        """Return whether the pool has exactly these nodes."""
        return self._configured.get(pool, _NO_NODES) is configured and self._registered.get(pool, _NONE) is registered

    @classmethod
    def from_pools(cls, pools: Iterable[Pool]) -> "PoolMembership":
        """The nodes of the configuration, and no others."""
        return cls({pool.name: pool.nodes for pool in pools}, {})

    def with_pools(self, pools: Iterable[Pool]) -> "PoolMembership":
        """The same registered nodes beside those of another configuration."""
        return PoolMembership({pool.name: pool.nodes for pool in pools}, self._registered)

    def apply_delta(self, delta: MembershipDelta) -> "PoolMembership":
        """With those who registered and without those who went. Other pools keep their very tuples."""
        registered = dict(self._registered)
        for pool in delta.left.keys() | delta.joined.keys():
            nodes = dict(registered.get(pool, _NONE))
            for node_id in delta.left.get(pool, ()):
                nodes.pop(node_id, None)
            nodes.update((node.id, node) for node in delta.joined.get(pool, _NO_NODES))
            registered[pool] = nodes
        return PoolMembership(self._configured, registered, self)

    def get_nodes(self, pool: str) -> tuple[Node, ...]:
        """The pool's nodes: those of the configuration first, then those that registered."""
        return self._nodes.get(pool, _NO_NODES)

    def get_versions(self, pool: str) -> frozenset[str]:
        """The model versions that the pool's nodes serve; empty while it has no node."""
        found = self._versions.get(pool)
        if found is None:  # worked out when the first request cares for versions
            found = self._versions[pool] = frozenset({node.version for node in self._nodes.get(pool, _NO_NODES)})
        return found

    def get_longest_context(self, pools: Iterable[str]) -> int | None:
        """Tokens of the longest context among the nodes of these pools; None: they have none."""
        return max((node.max_seq_len for pool in pools for node in self.get_nodes(pool)), default=None)

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of all of them."""
        return tuple(self._nodes)

    @property
    def ids(self) -> set[str]:
        """Every node's."""
        return {node.id for own in self._nodes.values() for node in own}

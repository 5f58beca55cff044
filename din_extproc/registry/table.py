"""The node table as one process sees it: every row it knows, who lives, and which pools have which nodes.

Rule: nothing is decided here about a message (`row.py` does) and nothing is shared (the store does): rows are taken as they come, the
newest revision of each wins, and whatever changes for others comes out as an event.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from din_extproc.domain.membership import Member, MembershipDelta, NodeState
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.registry.claims import Catalogue, find_contradiction
from din_extproc.registry.joining import find_mismatch
from din_extproc.registry.row import NodeRecord


class NodeEventKind(StrEnum):
    """What happened to a node."""

    JOINED = "joined"
    """It is part of the network now, or again."""
    CHANGED = "changed"
    """Its state or what it registered changed."""
    LEFT = "left"
    """It deregistered or died."""


class NodeEvent(Struct, frozen=True):
    """A change that others care about. Heartbeats without one are none."""

    kind: NodeEventKind
    member: Member
    """After the change."""
    reason: str


_RoutedNode = tuple[Node, tuple[str, ...]]
"""A node that is routed to, and its pools."""


class NodeTable:
    """The rows of one network.

    Args:
        pools: What nodes can join, with the nodes of the configuration.
        catalogue: What models are known to be.
    """

    def __init__(self, pools: Iterable[Pool], catalogue: Catalogue) -> None:
        self.revision = 0
        """The newest that was taken."""
        self.rows: dict[str, NodeRecord] = {}
        self.stale = False
        """The shared table could not be asked lately."""
        self.catalogue = catalogue
        self._pools = tuple(pools)
        self._death_reasons: dict[str, str] = {}
        """Why, by node id."""
        self._eligible_pools: dict[str, tuple[str, ...]] = {}
        """The pools that take each node, were it ready."""
        self._contradictions: dict[str, str] = {}
        """Registrations that the catalogue, as it is now, contradicts."""
        self._ids_by_address_and_model: dict[str, str] = {}
        """Node id by place."""
        self._ids_by_endpoint: dict[Endpoint, set[str]] = {}
        """Node ids by address, whatever they serve there."""
        self._routed: dict[str, _RoutedNode] = {}
        """What is routed to, by node id."""
        self._routed_before: dict[str, _RoutedNode | None] = {}
        """What was routed to before, of nodes that have changed since `turnover` was asked."""

    # -- what the store tells --------------------------------------------------------------------------------------------------------

    def apply_row(self, row: NodeRecord, now: float, *, alive: bool = True, reason: str = "") -> list[NodeEvent]:
        """A row as it is now; an older one than is known changes nothing.

        Args:
            row: With its revision.
            now: Seconds since the epoch.
            alive: Whether the node was heard of in time.
            reason: Why it is not.
        """
        before = self.rows.get(row.id)
        if before is not None and row.revision < before.revision:
            return []
        was = None if before is None else self.get_state(before)
        self.revision = max(self.revision, row.revision)
        self.rows[row.id] = row
        if before is None or before.registration != row.registration:
            if before is not None:
                self._unindex(before)
            self._ids_by_address_and_model[row.address_and_model] = row.id
            self._ids_by_endpoint.setdefault(row.registration.node.endpoint, set()).add(row.id)
            self._check_registration(row)
        if alive:
            self._death_reasons.pop(row.id, None)
        else:
            self._death_reasons[row.id] = reason or "not heard of in time"
        self._update_routing(row)
        return self._make_events(row, was, before, now)

    def remove_row(self, node_id: str, revision: int, now: float, reason: str) -> list[NodeEvent]:
        """The node's row is no more."""
        row = self.rows.get(node_id)
        if row is None or revision < row.revision:
            return []
        was = self.get_state(row)
        del self.rows[node_id]
        self.revision = max(self.revision, revision)
        self._unindex(row)
        self._death_reasons.pop(node_id, None)
        self._contradictions.pop(node_id, None)
        del self._eligible_pools[node_id]
        self._stop_routing(node_id)
        if was is NodeState.DEAD:
            return []
        return [NodeEvent(NodeEventKind.LEFT, row.to_member(now, NodeState.DEAD, stale=self.stale), reason)]

    def reload(self, pools: Iterable[Pool], catalogue: Catalogue, now: float) -> list[NodeEvent]:
        """Other pools, or another catalogue: every node is looked at again."""
        self._pools, self.catalogue = tuple(pools), catalogue
        events = []
        for row in list(self.rows.values()):
            was = self.get_state(row)
            self._check_registration(row)
            self._update_routing(row)
            events += self._make_events(row, was, row, now)
        return events

    # -- what others ask -------------------------------------------------------------------------------------------------------------

    def is_alive(self, node_id: str) -> bool:
        """Whether there is such a node, heard of in time."""
        return node_id in self.rows and node_id not in self._death_reasons

    def get_state(self, row: NodeRecord) -> NodeState:
        """What the node's row, its silence and the catalogue make of it together."""
        if row.id in self._death_reasons:
            return NodeState.DEAD
        return NodeState.QUARANTINED if row.id in self._contradictions else row.state

    def find_owner(self, row: NodeRecord) -> NodeRecord | None:
        """Another living node that has the row's place."""
        owner = self._ids_by_address_and_model.get(row.address_and_model)
        return self.rows[owner] if owner is not None and owner != row.id and self.is_alive(owner) else None

    def get_member(self, node_id: str, now: float) -> Member | None:
        """One node as others see it."""
        row = self.rows.get(node_id)
        if row is None:
            return None
        why = self._death_reasons.get(node_id) or self._contradictions.get(node_id)
        shown = row.with_reason(why) if why else row
        return shown.to_member(now, self.get_state(row), stale=self.stale)

    def iter_members(self, now: float) -> Iterator[Member]:
        """Every node, in the order in which they came."""
        for node_id in list(self.rows):
            member = self.get_member(node_id, now)
            if member is not None:
                yield member

    def find_configured(self, row: NodeRecord) -> Node | None:
        """The node of the configuration that has the row's id or place."""
        node = row.registration.node
        own = (each for pool in self._pools for each in pool.nodes)
        return next((each for each in own if each.id == node.id or (each.endpoint, each.model) == (node.endpoint, node.model)), None)

    def list_warnings(self, row: NodeRecord) -> tuple[str, ...]:
        """What is odd about a sound registration."""
        endpoint = row.registration.node.endpoint
        found = [
            f"{other.id!r} serves {other.registration.node.model!r} at the same address: one node with two models shares its memory"
            for other in (self.rows[node_id] for node_id in sorted(self._ids_by_endpoint.get(endpoint, ())))
            if other.id != row.id and self.is_alive(other.id)
        ]
        capability = row.registration.node.compute_capability
        for pool in self._eligible_pools.get(row.id, ()):
            others = {node.compute_capability for node, pools in self._routed.values() if pool in pools and node.id != row.id}
            if others - {capability}:
                listed = ", ".join(sorted(other or "not given" for other in others))
                found.append(
                    f"pool {pool!r} also has nodes of compute capability {listed}, this one has {capability or 'none given'}: "
                    "their answers may differ; give the pool a `compute_capability`"
                )
        if not self._eligible_pools.get(row.id):
            reasons = "; ".join(
                f"{pool.name}: {find_mismatch(row.registration, pool)}" for pool in self._pools if pool.model == row.registration.node.model
            )
            found.append(f"no pool takes it ({reasons or 'none serves its model'})")
        return tuple(found)

    def get_pools(self, node_id: str) -> tuple[str, ...]:
        """The pools that route to the node now."""
        found = self._routed.get(node_id)
        return () if found is None else found[1]

    def snapshot(self) -> MembershipDelta:
        """Every node that is routed to, as if all of them had just come."""
        return _make_delta((None, now) for now in self._routed.values())

    def take_changes(self) -> MembershipDelta | None:
        """Who came and who went since this was last asked; None: nobody."""
        if not self._routed_before:
            return None
        turned, self._routed_before = self._routed_before, {}
        changed = [(before, self._routed.get(node_id)) for node_id, before in turned.items()]
        changed = [(before, after) for before, after in changed if before != after]
        return _make_delta(changed) if changed else None

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _unindex(self, row: NodeRecord) -> None:
        """The node is no more where it was."""
        if self._ids_by_address_and_model.get(row.address_and_model) == row.id:
            del self._ids_by_address_and_model[row.address_and_model]
        endpoint = row.registration.node.endpoint
        housed = self._ids_by_endpoint.get(endpoint, set())
        housed.discard(row.id)
        if not housed:
            self._ids_by_endpoint.pop(endpoint, None)

    def _check_registration(self, row: NodeRecord) -> None:
        """Hold what was registered against the catalogue and the pools."""
        self._eligible_pools[row.id] = tuple(pool.name for pool in self._pools if not find_mismatch(row.registration, pool))
        lie = find_contradiction(row.registration, self.catalogue)
        if lie:
            self._contradictions[row.id] = lie
        else:
            self._contradictions.pop(row.id, None)

    def _update_routing(self, row: NodeRecord) -> None:
        """Route to the node, or no longer."""
        before = self._routed.get(row.id)
        if self.get_state(row) is not NodeState.READY:
            self._stop_routing(row.id)
        elif before is None or before != (row.registration.node, self._eligible_pools[row.id]):
            self._routed_before.setdefault(row.id, before)
            self._routed[row.id] = (row.registration.node, self._eligible_pools[row.id])

    def _stop_routing(self, node_id: str) -> None:
        before = self._routed.pop(node_id, None)
        if before is not None:
            self._routed_before.setdefault(node_id, before)

    def _make_events(self, row: NodeRecord, was: NodeState | None, before: NodeRecord | None, now: float) -> list[NodeEvent]:
        state = self.get_state(row)
        if was is state and before is not None and before.registration == row.registration:
            return []
        gone = {None, NodeState.DEAD}
        if was in gone and state is NodeState.DEAD:
            return []
        kind = NodeEventKind.JOINED if was in gone else NodeEventKind.LEFT if state is NodeState.DEAD else NodeEventKind.CHANGED
        member = self.get_member(row.id, now)
        if member is None:
            return []
        reason = self._death_reasons.get(row.id) or self._contradictions.get(row.id) or (row.reasons[-1] if row.reasons else state.value)
        return [NodeEvent(kind, member, reason)]


def _make_delta(changes: Iterable[tuple[_RoutedNode | None, _RoutedNode | None]]) -> MembershipDelta:
    joined: dict[str, list[Node]] = {}
    left: dict[str, list[str]] = {}
    for before, after in changes:
        if before is not None:
            for pool in before[1]:
                left.setdefault(pool, []).append(before[0].id)
        if after is not None:
            for pool in after[1]:
                joined.setdefault(pool, []).append(after[0])
    return MembershipDelta(
        joined={pool: tuple(nodes) for pool, nodes in joined.items()}, left={pool: tuple(ids) for pool, ids in left.items()}
    )

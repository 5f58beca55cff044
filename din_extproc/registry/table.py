"""Node table of one process: rows, liveness and pool membership.

Invariant: the newest revision of a row wins, and every visible change yields an event. `row.py` decides about messages; the store shares
rows.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from din_extproc.domain.membership import Member, MembershipDelta, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.registry.claims import Catalogue, find_contradiction
from din_extproc.registry.joining import find_mismatch
from din_extproc.registry.row import NodeRecord


class NodeEventKind(StrEnum):
    """Kinds of node events."""

    JOINED = "joined"
    """The node joined or rejoined the network."""
    CHANGED = "changed"
    """Its state or registration changed."""
    LEFT = "left"
    """The node deregistered or died."""


class NodeEvent(Struct, frozen=True):
    """Visible change of a node. Heartbeats without a change yield none."""

    kind: NodeEventKind
    member: Member
    """The member after the change."""
    reason: str


_RoutedNode = tuple[tuple[Node, tuple[str, ...]], ...]
"""A routed node, once for each of its models, with the pools of that model."""


class NodeTable:
    """Node table of one network.

    Args:
        pools: Pools with their configured nodes.
        catalogue: The catalogue.
    """

    def __init__(self, pools: Iterable[Pool], catalogue: Catalogue) -> None:
        self.revision = 0
        """Newest applied revision."""
        self.rows: dict[str, NodeRecord] = {}
        self.stale = False
        """The shared table is unreachable."""
        self.catalogue = catalogue
        self._pools = tuple(pools)
        self._death_reasons: dict[str, str] = {}
        """Reasons of deaths by node id."""
        self._eligible: dict[str, _RoutedNode] = {}
        """Models and matching pools of each node, regardless of its state."""
        self._contradictions: dict[str, str] = {}
        """Contradictions between registrations and the current catalogue."""
        self._ids_by_address_and_model: dict[str, str] = {}
        """Node id by address and model."""
        self._ids_by_endpoint: dict[Endpoint, set[str]] = {}
        """Node ids by address."""
        self._routed: dict[str, _RoutedNode] = {}
        """Routed nodes by id."""
        self._routed_before: dict[str, _RoutedNode | None] = {}
        """Previous routing of nodes that changed since the last `take_changes`."""

    # -- changes by the store --------------------------------------------------------------------------------------------------------

    def apply_row(self, row: NodeRecord, now: float, *, alive: bool = True, reason: str = "") -> list[NodeEvent]:
        """Apply a row; an older revision is ignored.

        Args:
            row: The row with its revision.
            now: Seconds since the epoch.
            alive: Whether the node is alive.
            reason: Why it is dead.
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
            self._ids_by_address_and_model |= dict.fromkeys((place for place in row.places if not self._is_taken(place, row.id)), row.id)
            self._ids_by_endpoint.setdefault(row.registration.node.endpoint, set()).add(row.id)
            self._check_registration(row)
        if alive:
            self._death_reasons.pop(row.id, None)
        else:
            self._death_reasons[row.id] = reason or "not heard of in time"
        self._update_routing(row)
        return self._make_events(row, was, before, now)

    def remove_row(self, node_id: str, revision: int, now: float, reason: str) -> list[NodeEvent]:
        """Remove a row."""
        row = self.rows.get(node_id)
        if row is None or revision < row.revision:
            return []
        was = self.get_state(row)
        del self.rows[node_id]
        self.revision = max(self.revision, revision)
        self._unindex(row)
        self._death_reasons.pop(node_id, None)
        self._contradictions.pop(node_id, None)
        del self._eligible[node_id]
        self._stop_routing(node_id)
        if was is NodeState.DEAD:
            return []
        return [NodeEvent(NodeEventKind.LEFT, row.to_member(now, NodeState.DEAD, stale=self.stale), reason)]

    def reload(self, pools: Iterable[Pool], catalogue: Catalogue, now: float) -> list[NodeEvent]:
        """Replace pools and catalogue and check every node again."""
        self._pools, self.catalogue = tuple(pools), catalogue
        events = []
        for row in list(self.rows.values()):
            was = self.get_state(row)
            self._check_registration(row)
            self._update_routing(row)
            events += self._make_events(row, was, row, now)
        return events

    # -- queries -------------------------------------------------------------------------------------------------------------

    def is_alive(self, node_id: str) -> bool:
        """Return whether the node exists and is alive."""
        return node_id in self.rows and node_id not in self._death_reasons

    def get_state(self, row: NodeRecord) -> NodeState:
        """Return the state from row, liveness and catalogue."""
        if row.id in self._death_reasons:
            return NodeState.DEAD
        return NodeState.QUARANTINED if row.id in self._contradictions else row.state

    def find_owner(self, row: NodeRecord) -> NodeRecord | None:
        """Return another living node with the row's address and model."""
        return self.rows[self._ids_by_address_and_model[row.address_and_model]] if self._is_taken(row.address_and_model, row.id) else None

    def get_member(self, node_id: str, now: float) -> Member | None:
        """Return one member."""
        row = self.rows.get(node_id)
        if row is None:
            return None
        why = self._death_reasons.get(node_id) or self._contradictions.get(node_id)
        listed = row.with_reason(why) if why else row
        return listed.to_member(now, self.get_state(row), stale=self.stale)

    def iter_members(self, now: float) -> Iterator[Member]:
        """Yield all members in order of arrival."""
        for node_id in list(self.rows):
            member = self.get_member(node_id, now)
            if member is not None:
                yield member

    def find_configured(self, row: NodeRecord) -> Node | None:
        """Return the configured node with the row's id or address."""
        node = row.registration.node
        own = (each for pool in self._pools for each in pool.nodes)
        return next((each for each in own if each.id == node.id or (each.endpoint, each.model) == (node.endpoint, node.model)), None)

    def list_warnings(self, row: NodeRecord) -> tuple[str, ...]:
        """Return warnings about a valid registration."""
        endpoint = row.registration.node.endpoint
        found = [
            f"{other.id!r} serves {other.registration.node.model!r} at the same address: one node with two models shares its memory"
            for other in (self.rows[node_id] for node_id in sorted(self._ids_by_endpoint.get(endpoint, ())))
            if other.id != row.id and self.is_alive(other.id)
        ]
        for each, (node, pools) in zip((row.registration, *row.registration.extra), self._eligible.get(row.id, ()), strict=False):
            for pool in pools:
                found += self._list_differences(pool, node)
            if not pools:
                lie = "" if each is row.registration else self._find_obstacle(each)
                reasons = "; ".join(f"{pool.name}: {find_mismatch(each, pool)}" for pool in self._pools if pool.model == node.model)
                what = "it" if each is row.registration else f"its model {node.model!r}"
                found.append(f"no pool takes {what} ({lie or reasons or 'none serves its model'})")
        return tuple(found)

    def _list_differences(self, pool: str, node: Node) -> Iterator[str]:
        """Yield in what the node differs from others of a pool."""
        routed = (each for models in self._routed.values() for each in models)
        others = [other for other, pools in routed if pool in pools and other.id != node.id]
        for field, consequence in (
            ("compute_capability", "their answers may differ; give the pool a `compute_capability`"),
            ("dtype", "they are kept apart, a request and its retries stay with one of them"),
            ("tp_world_size", "they are kept apart, a request and its retries stay with one of them"),
        ):
            own, theirs = getattr(node, field), {getattr(other, field) for other in others}
            if theirs - {own}:
                listed = ", ".join(sorted(str(other or "not given") for other in theirs))
                yield f"pool {pool!r} also has nodes of {field} {listed}, this one has {own or 'none given'}: {consequence}"

    def get_pools(self, node_id: str) -> tuple[str, ...]:
        """Return the pools that route to the node."""
        return tuple(dict.fromkeys(pool for _, pools in self._routed.get(node_id, ()) for pool in pools))

    def snapshot(self) -> MembershipDelta:
        """Return all routed nodes as additions."""
        return _make_delta((None, now) for now in self._routed.values())

    def take_changes(self) -> MembershipDelta | None:
        """Return the membership changes since the last call; None if there are none."""
        if not self._routed_before:
            return None
        turned, self._routed_before = self._routed_before, {}
        changed = [(before, self._routed.get(node_id)) for node_id, before in turned.items()]
        changed = [(before, after) for before, after in changed if before != after]
        return _make_delta(changed) if changed else None

    # -- internals ----------------------------------------------------------------------------------------------------------------------

    def _unindex(self, row: NodeRecord) -> None:
        """Remove the node from the indexes."""
        for place in row.places:
            if self._ids_by_address_and_model.get(place) == row.id:
                del self._ids_by_address_and_model[place]
        endpoint = row.registration.node.endpoint
        housed = self._ids_by_endpoint.get(endpoint, set())
        housed.discard(row.id)
        if not housed:
            self._ids_by_endpoint.pop(endpoint, None)

    def _check_registration(self, row: NodeRecord) -> None:
        """Check the registration against the catalogue and the pools."""
        extra = row.registration.extra
        self._eligible[row.id] = (
            self._match(row.registration),
            *((each.node, ()) if self._find_obstacle(each) else self._match(each) for each in extra),
        )
        lie = find_contradiction(row.registration, self.catalogue)
        if lie:
            self._contradictions[row.id] = lie
        else:
            self._contradictions.pop(row.id, None)

    def _is_taken(self, place: str, node_id: str) -> bool:
        """Return whether another living node serves this model at this address."""
        owner = self._ids_by_address_and_model.get(place)
        return owner is not None and owner != node_id and self.is_alive(owner)

    def _find_obstacle(self, extra: Registration) -> str:
        """Return why a further model of a node is not routed to."""
        node = extra.node
        configured = any((each.endpoint, each.model) == (node.endpoint, node.model) for pool in self._pools for each in pool.nodes)
        if configured or self._is_taken(f"{node.endpoint} {node.model}", node.id):
            return "another node serves it at this address"
        return find_contradiction(extra, self.catalogue)

    def _match(self, registration: Registration) -> tuple[Node, tuple[str, ...]]:
        """Return a model of a node and the pools that take it."""
        return registration.node, tuple(pool.name for pool in self._pools if not find_mismatch(registration, pool))

    def _update_routing(self, row: NodeRecord) -> None:
        """Update the routing of the node."""
        before = self._routed.get(row.id)
        if self.get_state(row) is not NodeState.READY:
            self._stop_routing(row.id)
        elif before is None or before != self._eligible[row.id]:
            self._routed_before.setdefault(row.id, before)
            self._routed[row.id] = self._eligible[row.id]

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
        for node, pools in before or ():
            for pool in pools:
                left.setdefault(pool, []).append(node.id)
        for node, pools in after or ():
            for pool in pools:
                joined.setdefault(pool, []).append(node)
    return MembershipDelta(
        joined={pool: tuple(nodes) for pool, nodes in joined.items()}, left={pool: tuple(ids) for pool, ids in left.items()}
    )

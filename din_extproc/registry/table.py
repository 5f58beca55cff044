"""The node table as one process sees it: every row it knows, who lives, and which pools have which nodes.

Rule: nothing is decided here about a message (`row.py` does) and nothing is shared (the store does): rows are taken as they come, the
newest revision of each wins, and whatever changes for others comes out as an event.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from din_extproc.domain.membership import Member, MembershipDelta, NodeState
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.registry.claims import Catalogue, untrue
from din_extproc.registry.joining import why_not
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


_Joined = tuple[Node, tuple[str, ...]]
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
        self._dead: dict[str, str] = {}
        """Why, by node id."""
        self._takers: dict[str, tuple[str, ...]] = {}
        """The pools that take each node, were it ready."""
        self._lies: dict[str, str] = {}
        """Registrations that the catalogue, as it is now, contradicts."""
        self._places: dict[str, str] = {}
        """Node id by place."""
        self._housed: dict[Endpoint, set[str]] = {}
        """Node ids by address, whatever they serve there."""
        self._joined: dict[str, _Joined] = {}
        """What is routed to, by node id."""
        self._turned: dict[str, _Joined | None] = {}
        """What was routed to before, of nodes that have changed since `turnover` was asked."""

    # -- what the store tells --------------------------------------------------------------------------------------------------------

    def take(self, row: NodeRecord, now: float, *, alive: bool = True, reason: str = "") -> list[NodeEvent]:
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
        was = None if before is None else self.state(before)
        self.revision = max(self.revision, row.revision)
        self.rows[row.id] = row
        if before is None or before.registration != row.registration:
            if before is not None:
                self._vacate(before)
            self._places[row.place] = row.id
            self._housed.setdefault(row.registration.node.endpoint, set()).add(row.id)
            self._judge(row)
        if alive:
            self._dead.pop(row.id, None)
        else:
            self._dead[row.id] = reason or "not heard of in time"
        self._join(row)
        return self._events(row, was, before, now)

    def remove(self, node_id: str, revision: int, now: float, reason: str) -> list[NodeEvent]:
        """The node's row is no more."""
        row = self.rows.get(node_id)
        if row is None or revision < row.revision:
            return []
        was = self.state(row)
        del self.rows[node_id]
        self.revision = max(self.revision, revision)
        self._vacate(row)
        self._dead.pop(node_id, None)
        self._lies.pop(node_id, None)
        del self._takers[node_id]
        self._leave(node_id)
        if was is NodeState.DEAD:
            return []
        return [NodeEvent(NodeEventKind.LEFT, row.member(now, NodeState.DEAD, stale=self.stale), reason)]

    def use(self, pools: Iterable[Pool], catalogue: Catalogue, now: float) -> list[NodeEvent]:
        """Other pools, or another catalogue: every node is looked at again."""
        self._pools, self.catalogue = tuple(pools), catalogue
        events = []
        for row in list(self.rows.values()):
            was = self.state(row)
            self._judge(row)
            self._join(row)
            events += self._events(row, was, row, now)
        return events

    # -- what others ask -------------------------------------------------------------------------------------------------------------

    def alive(self, node_id: str) -> bool:
        """Whether there is such a node, heard of in time."""
        return node_id in self.rows and node_id not in self._dead

    def state(self, row: NodeRecord) -> NodeState:
        """What the node's row, its silence and the catalogue make of it together."""
        if row.id in self._dead:
            return NodeState.DEAD
        return NodeState.QUARANTINED if row.id in self._lies else row.state

    def owner(self, row: NodeRecord) -> NodeRecord | None:
        """Another living node that has the row's place."""
        owner = self._places.get(row.place)
        return self.rows[owner] if owner is not None and owner != row.id and self.alive(owner) else None

    def member(self, node_id: str, now: float) -> Member | None:
        """One node as others see it."""
        row = self.rows.get(node_id)
        if row is None:
            return None
        why = self._dead.get(node_id) or self._lies.get(node_id)
        shown = row.because(why) if why else row
        return shown.member(now, self.state(row), stale=self.stale)

    def members(self, now: float) -> Iterator[Member]:
        """Every node, in the order in which they came."""
        for node_id in list(self.rows):
            member = self.member(node_id, now)
            if member is not None:
                yield member

    def configured(self, row: NodeRecord) -> Node | None:
        """The node of the configuration that has the row's id or place."""
        node = row.registration.node
        own = (each for pool in self._pools for each in pool.nodes)
        return next((each for each in own if each.id == node.id or (each.endpoint, each.model) == (node.endpoint, node.model)), None)

    def warnings(self, row: NodeRecord) -> tuple[str, ...]:
        """What is odd about a sound registration."""
        endpoint = row.registration.node.endpoint
        found = [
            f"{other.id!r} serves {other.registration.node.model!r} at the same address: one node with two models shares its memory (R17)"
            for other in (self.rows[node_id] for node_id in sorted(self._housed.get(endpoint, ())))
            if other.id != row.id and self.alive(other.id)
        ]
        if not self._takers.get(row.id):
            reasons = "; ".join(
                f"{pool.name}: {why_not(row.registration, pool)}" for pool in self._pools if pool.model == row.registration.node.model
            )
            found.append(f"no pool takes it ({reasons or 'none serves its model'})")
        return tuple(found)

    def pools_of(self, node_id: str) -> tuple[str, ...]:
        """The pools that route to the node now."""
        found = self._joined.get(node_id)
        return () if found is None else found[1]

    def joined(self) -> MembershipDelta:
        """Every node that is routed to, as if all of them had just come."""
        return _turnover((None, now) for now in self._joined.values())

    def turnover(self) -> MembershipDelta | None:
        """Who came and who went since this was last asked; None: nobody."""
        if not self._turned:
            return None
        turned, self._turned = self._turned, {}
        changed = [(before, self._joined.get(node_id)) for node_id, before in turned.items()]
        changed = [(before, after) for before, after in changed if before != after]
        return _turnover(changed) if changed else None

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _vacate(self, row: NodeRecord) -> None:
        """The node is no more where it was."""
        if self._places.get(row.place) == row.id:
            del self._places[row.place]
        endpoint = row.registration.node.endpoint
        housed = self._housed.get(endpoint, set())
        housed.discard(row.id)
        if not housed:
            self._housed.pop(endpoint, None)

    def _judge(self, row: NodeRecord) -> None:
        """Hold what was registered against the catalogue and the pools."""
        self._takers[row.id] = tuple(pool.name for pool in self._pools if not why_not(row.registration, pool))
        lie = untrue(row.registration, self.catalogue)
        if lie:
            self._lies[row.id] = lie
        else:
            self._lies.pop(row.id, None)

    def _join(self, row: NodeRecord) -> None:
        """Route to the node, or no longer."""
        before = self._joined.get(row.id)
        if self.state(row) is not NodeState.READY:
            self._leave(row.id)
        elif before is None or before != (row.registration.node, self._takers[row.id]):
            self._turned.setdefault(row.id, before)
            self._joined[row.id] = (row.registration.node, self._takers[row.id])

    def _leave(self, node_id: str) -> None:
        before = self._joined.pop(node_id, None)
        if before is not None:
            self._turned.setdefault(node_id, before)

    def _events(self, row: NodeRecord, was: NodeState | None, before: NodeRecord | None, now: float) -> list[NodeEvent]:
        state = self.state(row)
        if was is state and before is not None and before.registration == row.registration:
            return []
        gone = {None, NodeState.DEAD}
        if was in gone and state is NodeState.DEAD:
            return []
        kind = NodeEventKind.JOINED if was in gone else NodeEventKind.LEFT if state is NodeState.DEAD else NodeEventKind.CHANGED
        member = self.member(row.id, now)
        if member is None:
            return []
        reason = self._dead.get(row.id) or self._lies.get(row.id) or (row.reasons[-1] if row.reasons else state.value)
        return [NodeEvent(kind, member, reason)]


def _turnover(changes: Iterable[tuple[_Joined | None, _Joined | None]]) -> MembershipDelta:
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

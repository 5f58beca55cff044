"""Registry service of one replica: writes registrations and heartbeats to the shared table and follows changes by other replicas.

Invariant: the shared table is authoritative. While Redis is unreachable, the last view stays in use, is marked stale, and is updated by
nodes that call this replica.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.membership import Heartbeat, HeartbeatReading, Member, Registration
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.nodes import NodeChange, NodeStore, PlaceTaken, RowConflict, RowWritten, parse_change
from din_extproc.registry.row import (
    DenialReason,
    NodeRecord,
    RegistryDenial,
    quarantine,
    record_answers,
    record_comparison,
    record_drain,
    record_heartbeat,
    record_registration,
    record_release,
    reject_heartbeat,
)
from din_extproc.registry.table import NodeEvent, NodeTable

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
_FORGET_MS: Final = 600_000
"""Retention of dead nodes."""
_LEASE_BYTES: Final = 12

Step = Callable[[NodeRecord | None, bool], NodeRecord | RegistryDenial]
"""Computes the new row from the current row and whether the node is alive."""


class Registered(Struct, frozen=True):
    """Accepted registration."""

    lease: str
    warnings: tuple[str, ...]


class Registrar:
    """Node registry of one replica.

    Args:
        table: View of this replica.
        store: Shared table.
        network: Network name that nodes must send.
        heartbeat_s: Heartbeat interval of nodes.
        dead_after_s: Time without a heartbeat after which a node is dead.
    """

    def __init__(self, table: NodeTable, store: NodeStore, *, network: str, heartbeat_s: float, dead_after_s: float) -> None:
        self.table = table
        self._network = network
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.watchers: set[Callable[[list[NodeEvent]], None]] = set()
        """Callbacks for every change; they must not raise."""
        self._store = store
        self._offset_s = time.time() - SystemClock.monotonic()
        """Offset from the monotonic clock to wall time; the wall clock may jump."""
        self._era = 0
        """Era of the shared table at the last sync; 0: no table."""
        self._since = 0
        """The view includes all changes up to this revision."""
        self.doubt = asyncio.Event()
        """Set when changes may have been missed and `sync` is due."""
        self._loose: set[str] = set()
        """Nodes whose rows exist only in this view."""
        self._readings: dict[str, HeartbeatReading] = {}

    # -- calls by nodes --------------------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> Registered | RegistryDenial:
        """Register a node."""
        if registration.network != self._network:
            return RegistryDenial(
                DenialReason.UNTRUE, f"this is the registry of network {self._network!r}, not of {registration.network!r}"
            )
        lease = secrets.token_hex(_LEASE_BYTES)

        def step(before: NodeRecord | None, alive: bool) -> NodeRecord | RegistryDenial:  # noqa: FBT001 - the shape of a step
            row = record_registration(registration, lease, before, alive=alive, catalogue=self.table.catalogue, now=self.get_now())
            return row if isinstance(row, RegistryDenial) else self._check_place(row)

        row = await self._write_row(registration.node.id, step, lives=True)
        if isinstance(row, NodeRecord):
            return Registered(row.lease, self.table.list_warnings(row))
        if row.kind is DenialReason.UNTRUE:
            _log.warning("registration of node %s rejected: %s", registration.node.id, row.reason)
            await self._quarantine(registration.node.id, row.reason)
        return row

    async def heartbeat(self, node_id: str, lease: str, beat: Heartbeat) -> NodeRecord | RegistryDenial:
        """Record a heartbeat."""
        row = await self._write_row(
            node_id, lambda before, _: record_heartbeat(before, lease, beat, interval_s=self.heartbeat_s, now=self.get_now()), lives=True
        )
        if isinstance(row, RegistryDenial) and row.kind is DenialReason.IMPOSSIBLE:
            reason = row.reason
            await self._write_row(
                node_id, lambda before, _: _require_lease(before, lease, lambda known: reject_heartbeat(known, reason, self.get_now()))
            )
        return row

    async def drain(self, node_id: str, reason: str, lease: str = "") -> NodeRecord | RegistryDenial:
        """Drain the node. `lease` "": the current lease."""
        return await self._write_row(node_id, lambda before, _: _require_lease(before, lease, lambda known: record_drain(known, reason)))

    async def release_node(self, node_id: str, operator: str) -> None:
        """Lift a drain or quarantine on an operator's order. Unregistered nodes are ignored."""
        if node_id in self.table.rows:
            await self._write_row(node_id, lambda before, _: _require_lease(before, "", lambda known: record_release(known, operator)))

    async def deregister(self, node_id: str, reason: str, lease: str = "") -> RegistryDenial | None:
        """Remove the node from the network. `lease` "": the current lease."""
        for _ in range(_ATTEMPTS):
            row = _require_lease(self.table.rows.get(node_id), lease, lambda known: known)
            if isinstance(row, RegistryDenial):
                return row
            try:
                outcome = await self._store.remove(row)
            except LimitsUnavailable as error:
                self._on_store_error(error)
                outcome = RowWritten(row.revision)
            if isinstance(outcome, RowWritten):
                self._notify(self.table.remove_row(node_id, outcome.revision, self.get_now(), reason or "deregistered"))
                return None
            await self.sync()
        return RegistryDenial(DenialReason.OUTDATED, "the node's row changes too often")

    async def record_answers(self, node_id: str, answers: int, failures: int) -> None:
        """Record numbers of completed and failed requests of the node."""
        if node_id in self.table.rows:
            await self._write_row(
                node_id,
                lambda before, _: _require_lease(
                    before, "", lambda known: record_answers(known, answers=answers, failures=failures, now=self.get_now())
                ),
            )

    async def record_comparison(self, node_id: str, *, agreements: int = 0, disagreements: int = 0, reason: str = "") -> None:
        """Record comparisons of the node's answers with those of nodes of the same model, version and dtype.

        All replicas share the result: trust falls, and the third disagreement within minutes quarantines the node.

        Args:
            node_id: Id of a registered node; others are ignored.
            agreements: Number of answers that agree.
            disagreements: Number of answers that differ significantly.
            reason: Description of the latest disagreement, without prompt and answer.
        """
        if node_id in self.table.rows:
            await self._write_row(
                node_id,
                lambda before, _: _require_lease(
                    before,
                    "",
                    lambda known: record_comparison(
                        known, agreements=agreements, disagreements=disagreements, reason=reason, now=self.get_now()
                    ),
                ),
            )

    # -- synchronisation ----------------------------------------------------------------------------------------------------

    def on_message(self, message: bytes) -> None:
        """Apply a message of the channel."""
        change = parse_change(message)
        if change.revision <= self._since:
            return
        if change.revision == self._since + 1:
            self._since = change.revision
        else:
            self.doubt.set()
        self._apply(change)

    def on_subscribed(self) -> None:
        """Handle a new subscription: earlier messages are lost, so a sync is due."""
        self.doubt.set()

    async def sync(self) -> None:
        """Apply all changes of the shared table."""
        self.doubt.clear()
        try:
            while True:
                page = await self._store.fetch_changes(self._since)
                self._offset_s = page.now - SystemClock.monotonic()
                if page.era != self._era or not page.era:
                    self._on_data_lost(page.era)
                for change in page.found:
                    self._apply(change)
                    self._since = change.revision
                if page.last:
                    self._since = max(self._since, page.revision)
                    break
        except LimitsUnavailable as error:
            self._on_store_error(error)
            return
        if self.table.stale:
            self.table.stale = False
            _log.info("the node table is shared again")

    async def sweep(self) -> None:
        """Mark silent nodes dead."""
        if self.table.stale:
            return
        now = self.get_now()
        for node_id in list(self._loose):
            row = self.table.rows.get(node_id)
            if row is None or row.revision:
                self._loose.discard(node_id)
            elif now - (row.beat_at or row.registered_at) > self.dead_after_s:
                self._loose.discard(node_id)
                self._notify(self.table.remove_row(node_id, 0, now, "not heard of in time"))
        try:
            await self._store.sweep(_FORGET_MS)
        except LimitsUnavailable as error:
            self._on_store_error(error)

    def take_readings(self) -> dict[str, HeartbeatReading]:
        """Return the heartbeat readings since the last call."""
        readings, self._readings = self._readings, {}
        return readings

    def get_members(self) -> list[Member]:
        """Return all known nodes."""
        return list(self.table.iter_members(self.get_now()))

    def get_now(self) -> float:
        """Return seconds since the epoch, by the clock of Redis if known."""
        return SystemClock.monotonic() + self._offset_s

    # -- internals ----------------------------------------------------------------------------------------------------------------------

    async def _write_row(self, node_id: str, step: Step, *, lives: bool = False) -> NodeRecord | RegistryDenial:
        """Replace the node's row with compare-and-set and retries."""
        lasts_ms = round(self.dead_after_s * 1000) if lives else 0
        reread = False
        for _ in range(_ATTEMPTS):
            alive = self.table.is_alive(node_id)
            row = step(self.table.rows.get(node_id), alive)
            if isinstance(row, RegistryDenial):
                if reread or row.kind not in {DenialReason.UNKNOWN, DenialReason.OUTDATED}:
                    return row
                reread = True  # another replica may have a newer row
                await self.sync()
                continue
            try:
                outcome = await self._store.put(row, lasts_ms)
            except LimitsUnavailable as error:
                self._on_store_error(error)
                outcome = RowWritten(row.revision)
            if isinstance(outcome, RowWritten):
                row = replace(row, revision=outcome.revision)
                self._apply_row(row, alive=alive or lives)
                return row
            if isinstance(outcome, PlaceTaken):
                return RegistryDenial(DenialReason.OUTDATED, f"node {outcome.owner!r} has this address and is heard of")
            await self._catch_up(outcome)
        return RegistryDenial(DenialReason.OUTDATED, "the node's row changes too often")

    async def _catch_up(self, outcome: RowConflict) -> None:
        """Apply the row that caused a conflict."""
        if outcome.row is None:
            await self.sync()  # removed, or Redis lost the table
        else:
            self._apply_row(outcome.row, alive=outcome.alive)

    def _check_place(self, row: NodeRecord) -> NodeRecord | RegistryDenial:
        """Return the row unless another node has its id or address."""
        configured = self.table.find_configured(row)
        if configured is not None:
            return RegistryDenial(DenialReason.OUTDATED, f"node {configured.id!r} of the configuration has this id or this address")
        owner = self.table.find_owner(row)
        if owner is not None:
            return RegistryDenial(DenialReason.OUTDATED, f"node {owner.id!r} has this address and is heard of")
        return row

    async def _quarantine(self, node_id: str, reason: str) -> None:
        """Quarantine a registered node whose claim was false."""
        if self.table.is_alive(node_id):
            await self._write_row(
                node_id, lambda before, _: _require_lease(before, "", lambda known: quarantine(known, reason, self.get_now()))
            )

    def _apply(self, change: NodeChange) -> None:
        known = self.table.rows.get(change.node_id)
        if known is not None and known.revision >= change.revision:
            return
        row = change.decode_row
        if row is None:
            self._notify(self.table.remove_row(change.node_id, change.revision, self.get_now(), "deregistered"))
        else:
            self._apply_row(row, alive=change.alive)

    def _apply_row(self, row: NodeRecord, *, alive: bool) -> None:
        before = self.table.rows.get(row.id)
        if row.beat is not None and (before is None or before.beat != row.beat):
            self._readings[row.id] = HeartbeatReading(row.beat, SystemClock.monotonic(), row.evidence.score_trust(self.get_now()))
        if not row.revision:
            self._loose.add(row.id)
        self._notify(self.table.apply_row(row, self.get_now(), alive=alive, reason=f"not heard of for {self.dead_after_s:g} s"))

    def _notify(self, events: list[NodeEvent]) -> None:
        if not events:
            return
        for event in events:
            _log.info("node %s %s: %s", event.member.registration.node.id, event.kind.value, event.reason)
        for watcher in list(self.watchers):
            watcher(events)

    def _on_data_lost(self, era: int) -> None:
        """Keep rows of an earlier era until their nodes send a message or `dead_after_s` expires."""
        self._era = era
        lost = [row for row in self.table.rows.values() if row.revision and (not era or row.revision <= era)]
        if lost:
            _log.warning("redis lost the node table: %d nodes are kept until they send a heartbeat", len(lost))
        for row in lost:
            self.table.rows[row.id] = replace(row, revision=0)
            self._loose.add(row.id)

    def _on_store_error(self, error: LimitsUnavailable) -> None:
        if not self.table.stale:
            self.table.stale = True
            _log.warning("the node table can't be shared (%s): the last view stays in use", error)


def _require_lease(row: NodeRecord | None, lease: str, change: Callable[[NodeRecord], NodeRecord]) -> NodeRecord | RegistryDenial:
    """Apply a change to an existing row; deny an unknown or outdated lease."""
    if row is None or (lease and row.lease != lease):
        return RegistryDenial(DenialReason.UNKNOWN, "no such registration")
    return change(row)

"""The registry of one replica: takes what nodes say, writes it into the shared table, and follows what other replicas wrote there.

Rule: the shared table decides. While it can't be asked, the last view stays in use, is called stale, and nodes that speak to this
replica are still heard.
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
from din_extproc.edge.redis.nodes import NodeChange, NodeStore, PlaceTaken, RowConflict, RowWritten, heard
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
"""How long the dead are shown."""
_LEASE_BYTES: Final = 12

Step = Callable[[NodeRecord | None, bool], NodeRecord | RegistryDenial]
"""From a node's row, and whether it lives, to the row as it should be."""


class Registered(Struct, frozen=True):
    """A node is in."""

    lease: str
    warnings: tuple[str, ...]


class Registrar:
    """What the services and the role talk to.

    Args:
        table: This replica's view.
        store: The shared table.
        network: The name that nodes have to give.
        heartbeat_s: How often nodes are told to beat.
        dead_after_s: How long a silent node lives.
    """

    def __init__(self, table: NodeTable, store: NodeStore, *, network: str, heartbeat_s: float, dead_after_s: float) -> None:
        self.table = table
        self._network = network
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.watchers: set[Callable[[list[NodeEvent]], None]] = set()
        """Told of every change; they must not raise."""
        self._store = store
        self._offset_s = time.time() - SystemClock.monotonic()
        """Added to the monotonic clock, for this machine's wall clock may be set while it runs."""
        self._era = 0
        """Of the shared table when it was asked last; 0: there was none."""
        self._since = 0
        """Every change up to this revision is in the view."""
        self.doubt = asyncio.Event()
        """Something may have been missed: `sync` soon."""
        self._loose: set[str] = set()
        """Nodes whose rows are in this view only."""
        self._readings: dict[str, HeartbeatReading] = {}

    # -- what nodes ask --------------------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> Registered | RegistryDenial:
        """A node wants to be part of the network."""
        if registration.network != self._network:
            return RegistryDenial(
                DenialReason.UNTRUE, f"this is the registry of network {self._network!r}, not of {registration.network!r}"
            )
        lease = secrets.token_hex(_LEASE_BYTES)

        def step(before: NodeRecord | None, alive: bool) -> NodeRecord | RegistryDenial:  # noqa: FBT001 - the shape of a step
            row = record_registration(registration, lease, before, alive=alive, catalogue=self.table.catalogue, now=self.now())
            return row if isinstance(row, RegistryDenial) else self._placed(row)

        row = await self._write(registration.node.id, step, lives=True)
        if isinstance(row, NodeRecord):
            return Registered(row.lease, self.table.list_warnings(row))
        if row.kind is DenialReason.UNTRUE:
            _log.warning("node %s was refused: %s", registration.node.id, row.reason)
            await self._catch(registration.node.id, row.reason)
        return row

    async def beat(self, node_id: str, lease: str, beat: Heartbeat) -> NodeRecord | RegistryDenial:
        """A node says how it does."""
        row = await self._write(
            node_id, lambda before, _: record_heartbeat(before, lease, beat, interval_s=self.heartbeat_s, now=self.now()), lives=True
        )
        if isinstance(row, RegistryDenial) and row.kind is DenialReason.IMPOSSIBLE:
            reason = row.reason
            await self._write(node_id, lambda before, _: _known(before, lease, lambda known: reject_heartbeat(known, reason, self.now())))
        return row

    async def drain(self, node_id: str, reason: str, lease: str = "") -> NodeRecord | RegistryDenial:
        """The node takes nothing new. `lease` "": whichever is in force."""
        return await self._write(node_id, lambda before, _: _known(before, lease, lambda known: record_drain(known, reason)))

    async def release(self, node_id: str, operator: str) -> None:
        """An operator takes back what keeps the node out: a drain, a quarantine. Nothing happens for nodes that did not register."""
        if node_id in self.table.rows:
            await self._write(node_id, lambda before, _: _known(before, "", lambda known: record_release(known, operator)))

    async def deregister(self, node_id: str, reason: str, lease: str = "") -> RegistryDenial | None:
        """The node is no part of the network any more. `lease` "": whichever is in force."""
        for _ in range(_ATTEMPTS):
            row = _known(self.table.rows.get(node_id), lease, lambda known: known)
            if isinstance(row, RegistryDenial):
                return row
            try:
                outcome = await self._store.remove(row)
            except LimitsUnavailable as error:
                self._away(error)
                outcome = RowWritten(row.revision)
            if isinstance(outcome, RowWritten):
                self._tell(self.table.remove_row(node_id, outcome.revision, self.now(), reason or "deregistered"))
                return None
            await self.sync()
        return RegistryDenial(DenialReason.OUTDATED, "the node's row changes too often")

    async def observe(self, node_id: str, answers: int, failures: int) -> None:
        """So many requests were answered by the node lately, and so many failed at it."""
        if node_id in self.table.rows:
            await self._write(
                node_id,
                lambda before, _: _known(
                    before, "", lambda known: record_answers(known, answers=answers, failures=failures, now=self.now())
                ),
            )

    async def compare(self, node_id: str, *, agreements: int = 0, disagreements: int = 0, reason: str = "") -> None:
        """So many answers of the node were what another of the same model, version and dtype gives too, and so many were not.

        Once told here, every replica knows: trust falls, and from the third disagreement within minutes on the node is quarantined.

        Args:
            node_id: A node that registered; nothing happens for others.
            agreements: Answers that others give too.
            disagreements: Answers that differ by more than chance explains.
            reason: Of the latest disagreement, for people: no prompt and no answer.
        """
        if node_id in self.table.rows:
            await self._write(
                node_id,
                lambda before, _: _known(
                    before,
                    "",
                    lambda known: record_comparison(
                        known, agreements=agreements, disagreements=disagreements, reason=reason, now=self.now()
                    ),
                ),
            )

    # -- what keeps the view true ----------------------------------------------------------------------------------------------------

    def heard(self, message: bytes) -> None:
        """The channel said something."""
        change = heard(message)
        if change.revision <= self._since:
            return
        if change.revision == self._since + 1:
            self._since = change.revision
        else:
            self.doubt.set()
        self._apply(change)

    def began(self) -> None:
        """The channel is listened to from now on; what was said before is not known."""
        self.doubt.set()

    async def sync(self) -> None:
        """Take over everything that has changed in the shared table."""
        self.doubt.clear()
        try:
            while True:
                page = await self._store.changes(self._since)
                self._offset_s = page.now - SystemClock.monotonic()
                if page.era != self._era or not page.era:
                    self._found_lost(page.era)
                for change in page.found:
                    self._apply(change)
                    self._since = change.revision
                if page.last:
                    self._since = max(self._since, page.revision)
                    break
        except LimitsUnavailable as error:
            self._away(error)
            return
        if self.table.stale:
            self.table.stale = False
            _log.info("the node table is shared again")

    async def sweep(self) -> None:
        """Give up who is silent."""
        if self.table.stale:
            return
        now = self.now()
        for node_id in list(self._loose):
            row = self.table.rows.get(node_id)
            if row is None or row.revision:
                self._loose.discard(node_id)
            elif now - (row.beat_at or row.registered_at) > self.dead_after_s:
                self._loose.discard(node_id)
                self._tell(self.table.remove_row(node_id, 0, now, "not heard of in time"))
        try:
            await self._store.sweep(_FORGET_MS)
        except LimitsUnavailable as error:
            self._away(error)

    def readings(self) -> dict[str, HeartbeatReading]:
        """What nodes have said since this was last asked."""
        readings, self._readings = self._readings, {}
        return readings

    def members(self) -> list[Member]:
        """Every node that is known."""
        return list(self.table.iter_members(self.now()))

    def now(self) -> float:
        """Seconds since the epoch by the clock of Redis, as far as it is known."""
        return SystemClock.monotonic() + self._offset_s

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    async def _write(self, node_id: str, step: Step, *, lives: bool = False) -> NodeRecord | RegistryDenial:
        """Replace the node's row, whoever else writes at the same time."""
        lasts_ms = round(self.dead_after_s * 1000) if lives else 0
        asked = False
        for _ in range(_ATTEMPTS):
            alive = self.table.is_alive(node_id)
            row = step(self.table.rows.get(node_id), alive)
            if isinstance(row, RegistryDenial):
                if asked or row.kind not in {DenialReason.UNKNOWN, DenialReason.OUTDATED}:
                    return row
                asked = True  # another replica may know better
                await self.sync()
                continue
            try:
                outcome = await self._store.put(row, lasts_ms)
            except LimitsUnavailable as error:
                self._away(error)
                outcome = RowWritten(row.revision)
            if isinstance(outcome, RowWritten):
                row = replace(row, revision=outcome.revision)
                self._take(row, alive=alive or lives)
                return row
            if isinstance(outcome, PlaceTaken):
                return RegistryDenial(DenialReason.OUTDATED, f"node {outcome.owner!r} has this address and is heard of")
            await self._catch_up(outcome)
        return RegistryDenial(DenialReason.OUTDATED, "the node's row changes too often")

    async def _catch_up(self, outcome: RowConflict) -> None:
        """The row is another one than was thought."""
        if outcome.row is None:
            await self.sync()  # removed, or Redis has lost the table
        else:
            self._take(outcome.row, alive=outcome.alive)

    def _placed(self, row: NodeRecord) -> NodeRecord | RegistryDenial:
        """The row, when nobody else has its id or its place."""
        configured = self.table.find_configured(row)
        if configured is not None:
            return RegistryDenial(DenialReason.OUTDATED, f"node {configured.id!r} of the configuration has this id or this address")
        owner = self.table.find_owner(row)
        if owner is not None:
            return RegistryDenial(DenialReason.OUTDATED, f"node {owner.id!r} has this address and is heard of")
        return row

    async def _catch(self, node_id: str, reason: str) -> None:
        """A node that is in has lied: whatever it was before, it is not to be trusted now."""
        if self.table.is_alive(node_id):
            await self._write(node_id, lambda before, _: _known(before, "", lambda known: quarantine(known, reason, self.now())))

    def _apply(self, change: NodeChange) -> None:
        known = self.table.rows.get(change.node_id)
        if known is not None and known.revision >= change.revision:
            return
        row = change.row
        if row is None:
            self._tell(self.table.remove_row(change.node_id, change.revision, self.now(), "deregistered"))
        else:
            self._take(row, alive=change.alive)

    def _take(self, row: NodeRecord, *, alive: bool) -> None:
        before = self.table.rows.get(row.id)
        if row.beat is not None and (before is None or before.beat != row.beat):
            self._readings[row.id] = HeartbeatReading(row.beat, SystemClock.monotonic(), row.evidence.score_trust(self.now()))
        if not row.revision:
            self._loose.add(row.id)
        self._tell(self.table.apply_row(row, self.now(), alive=alive, reason=f"not heard of for {self.dead_after_s:g} s"))

    def _tell(self, events: list[NodeEvent]) -> None:
        if not events:
            return
        for event in events:
            _log.info("node %s %s: %s", event.member.registration.node.id, event.kind.value, event.reason)
        for watcher in list(self.watchers):
            watcher(events)

    def _found_lost(self, era: int) -> None:
        """Rows from before the table's era are not in it: kept until their nodes are heard of again, or as long as the silent live."""
        self._era = era
        lost = [row for row in self.table.rows.values() if row.revision and (not era or row.revision <= era)]
        if lost:
            _log.warning("redis has lost the node table: %d nodes are kept until they are heard of again", len(lost))
        for row in lost:
            self.table.rows[row.id] = replace(row, revision=0)
            self._loose.add(row.id)

    def _away(self, error: LimitsUnavailable) -> None:
        if not self.table.stale:
            self.table.stale = True
            _log.warning("the node table can't be shared (%s): the last view stays in use", error)


def _known(row: NodeRecord | None, lease: str, change: Callable[[NodeRecord], NodeRecord]) -> NodeRecord | RegistryDenial:
    """The change of a row that there is."""
    if row is None or (lease and row.lease != lease):
        return RegistryDenial(DenialReason.UNKNOWN, "no such registration")
    return change(row)

"""What the sidecar records for good, and when: admissions, endings, configurations, keys, nodes.

Rule: one process of a sidecar writes, the one that keeps the accounts; nothing here waits for the disk.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.audit.records import AdmissionRecord, Configured, Event, NodeChanged, Witness
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.audit.log import AuditLog, AuditOptions
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.audit_heads import AuditHeads
from din_extproc.edge.redis.ledger import Runner
from din_extproc.flow.audit_records import ending
from din_extproc.registry.table import NodeEvent
from din_extproc.settings.audit import AuditSettings
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_SECTIONS = ("gateway", "store", "pools", "tenants", "keys", "envoy", "fail_open_pool", "node_tokens", "audit")
_MS = 1000
_WITNESS_S = 10.0


class AuditRecorder:
    """The audit log of one sidecar.

    Args:
        audit: Where and how.
        network: Whose log it is.
        link: What carries commands to Redis, where replicas tell each other how far their logs have come.
        turned: Told when the disk takes no more (True), and when it does again (False).
    """

    def __init__(self, audit: AuditSettings, network: str, link: Runner, turned: Callable[[bool], None]) -> None:
        section = audit.section
        options = AuditOptions(
            folder=audit.folder,
            replica=audit.replica,
            network=network,
            fsync=section.fsync,
            fsync_s=section.fsync_s,
            rotate_bytes=audit.rotate_bytes,
            rotate_s=audit.rotate_s,
            on_full=section.on_full,
        )
        self._flush_s = section.flush_ms / _MS
        self._on_full = section.on_full
        self._log = AuditLog(options, audit.keys, _nobody if self._drops else turned)
        self._settings: Settings | None = None
        self._replica = audit.replica
        self._heads = AuditHeads(link, network)
        self._witnessed: dict[str, int] = {}
        """The last record of each other replica that this log speaks of."""

    def start(self, background: Background) -> None:
        """Go on with the log.

        Raises:
            OSError: its folder can't be used, or another process writes it.
        """
        self._log.start()
        background.every(self._flush_s, "writing the audit log", self._log.flush)
        background.every(_WITNESS_S, "witnessing the audit logs of other replicas", self.witness)

    async def stop(self) -> None:
        """Write the rest."""
        await self._log.close()

    def reload(self, settings: Settings) -> None:
        """Another configuration is in use."""
        before, self._settings = self._settings, settings
        if settings.audit is not None:
            self._log.use(settings.audit.keys)
        if before is None or before.fingerprint != settings.fingerprint:
            self.note(_configured(before, settings))

    async def witness(self) -> None:
        """Record how far the logs of other replicas have come, when that is more than they have to say of each other."""
        seq, chain = self._log.head
        try:
            heads = await self._heads.exchange(self._replica, seq, chain)
        except LimitsUnavailable:
            return
        for replica, (other, mac) in sorted(heads.items()):
            if other - self._witnessed.get(replica, 0) > len(heads):
                self._witnessed[replica] = other
                self.note(Witness(at=SystemClock.wall(), replica=replica, record=other, chain=mac))

    def note(self, event: Event) -> None:
        """Record an event."""
        self._log.note(event)

    def finished(self, record: ExchangeRecord) -> None:
        """An exchange is over."""
        self._log.note(ending(record))

    def admitted(self, records: Iterable[Any]) -> None:
        """Requests were sent on, as a request plane, of this process or another one, has noted it."""
        for record in records:
            self._log.note(record if type(record) is AdmissionRecord else msgspec.convert(record, AdmissionRecord))

    def nodes(self, events: list[NodeEvent]) -> None:
        """Nodes came, changed or went."""
        now = SystemClock.wall()
        for event in events:
            node = event.member.registration.node
            record = NodeChanged(
                at=now,
                node_id=node.id,
                event=event.kind.value,
                state=event.member.state.value,
                reason=event.reason,
                model=node.model,
                version=node.version,
            )
            self._log.note(record)

    @property
    def shut(self) -> str:
        """Why no request may be taken, "" when requests may."""
        return (
            ""
            if self._drops or not self._log.failing
            else f"the audit log can't be written, `on_full: {self._on_full}`: {self._log.failing}"
        )

    def shown(self) -> dict[str, object]:
        """For the admin page."""
        return self._log.shown()

    @property
    def _drops(self) -> bool:
        """What can't be recorded goes on all the same."""
        return self._on_full == "drop_with_alarm"


def _nobody(_shut: bool) -> None:  # noqa: FBT001 - the shape of who is told
    """Requests go on, recorded or not."""


def _configured(before: Settings | None, settings: Settings) -> Configured:
    added, removed, changed = _differing(_keys(before), _keys(settings))
    nodes = _differing({} if before is None else before.node_tokens, settings.node_tokens)
    differing: tuple[str, ...] = ()
    if before is not None:
        found = [name for name in _SECTIONS if getattr(before, name) != getattr(settings, name)]
        if before.catalog.models != settings.catalog.models:
            found.append("catalog")
        differing = tuple(found or ["routes"])
    return Configured(
        at=SystemClock.wall(),
        fingerprint=settings.fingerprint,
        before="" if before is None else before.fingerprint,
        sections=differing,
        keys_added=added,
        keys_removed=removed,
        keys_changed=changed,
        nodes_added=nodes[0],
        nodes_removed=nodes[1],
        nodes_changed=nodes[2],
    )


def _keys(settings: Settings | None) -> Mapping[str, object]:
    if settings is None:
        return {}
    return {f"{tenant.id}/{key.id}": key for tenant, keys in settings.keys for key in keys}


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What came, what went and what is another, by id."""
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return tuple(sorted(now.keys() - before.keys())), tuple(sorted(before.keys() - now.keys())), tuple(changed)

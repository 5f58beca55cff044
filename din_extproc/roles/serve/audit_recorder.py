"""The audit records of a sidecar: admissions, settlements, configurations, keys and nodes.

Rule: only the accounting process writes, and no caller waits for the disk.
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
from din_extproc.flow.audit_records import make_ending_record
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
        audit: Folder, keys and policy of the log.
        network: The network that the log belongs to.
        link: Runs Redis commands; replicas publish there how far their logs have come.
        on_blocked: Called with True when the disk takes no more, with False when it does again.
    """

    def __init__(self, audit: AuditSettings, network: str, link: Runner, on_blocked: Callable[[bool], None]) -> None:
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
        self._log = AuditLog(options, audit.keys, _ignore if self._drops else on_blocked)
        self._settings: Settings | None = None
        self._replica = audit.replica
        self._heads = AuditHeads(link, network)
        self._witnessed: dict[str, int] = {}
        """The last record of each other replica that this log has witnessed."""

    def start(self, background: Background) -> None:
        """Continue the log and start the periodic tasks.

        Raises:
            OSError: its folder can't be used, or another process writes it.
        """
        self._log.start()
        background.every(self._flush_s, "writing the audit log", self._log.flush)
        background.every(_WITNESS_S, "witnessing other replicas' audit logs", self.publish_head)

    async def stop(self) -> None:
        """Write the remaining records and close the log."""
        await self._log.close()

    def reload(self, settings: Settings) -> None:
        """Record what changed in the configuration, and use its keys."""
        before, self._settings = self._settings, settings
        if settings.audit is not None:
            self._log.set_keys(settings.audit.keys)
        if before is None or before.fingerprint != settings.fingerprint:
            self.record(_make_configured(before, settings))

    async def publish_head(self) -> None:
        """Record how far the logs of other replicas have come, if that is farther than recorded before."""
        seq, chain = self._log.head
        try:
            heads = await self._heads.publish(self._replica, seq, chain)
        except LimitsUnavailable:
            return
        for replica, (other, mac) in sorted(heads.items()):
            if other - self._witnessed.get(replica, 0) > len(heads):
                self._witnessed[replica] = other
                self.record(Witness(at=SystemClock.wall(), replica=replica, record=other, chain=mac))

    def record(self, event: Event) -> None:
        """Record an event."""
        self._log.record(event)

    def on_exchange(self, record: ExchangeRecord) -> None:
        """Record a settled exchange."""
        self._log.record(make_ending_record(record))

    def record_admissions(self, records: Iterable[Any]) -> None:
        """Record requests that a worker, of this process or another one, sent on."""
        for record in records:
            self._log.record(record if type(record) is AdmissionRecord else msgspec.convert(record, AdmissionRecord))

    def on_node_events(self, events: list[NodeEvent]) -> None:
        """Record that nodes joined, changed or left."""
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
            self._log.record(record)

    @property
    def blocked_reason(self) -> str:
        """The reason why requests are held, "" when they are not."""
        return (
            ""
            if self._drops or not self._log.failing
            else f"the audit log can't be written, `on_full: {self._on_full}`: {self._log.failing}"
        )

    def snapshot(self) -> dict[str, object]:
        """Return the state of the log for the admin page."""
        return self._log.snapshot()

    @property
    def _drops(self) -> bool:
        """Return whether requests that can't be recorded are served nevertheless."""
        return self._on_full == "drop_with_alarm"


def _ignore(_shut: bool) -> None:  # noqa: FBT001 - a callback takes the value alone
    """Ignore the state of the log: requests are served, recorded or not."""


def _make_configured(before: Settings | None, settings: Settings) -> Configured:
    added, removed, changed = _compare(_collect_keys(before), _collect_keys(settings))
    nodes = _compare({} if before is None else before.node_tokens, settings.node_tokens)
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


def _collect_keys(settings: Settings | None) -> Mapping[str, object]:
    if settings is None:
        return {}
    return {f"{tenant.id}/{key.id}": key for tenant, keys in settings.keys for key in keys}


def _compare(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the ids that were added, removed and changed."""
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return tuple(sorted(now.keys() - before.keys())), tuple(sorted(before.keys() - now.keys())), tuple(changed)

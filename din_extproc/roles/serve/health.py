"""Circuit breakers of the accounting process: they take the outcomes of requests and probes, and report changes to workers.

Rule: a breaker that opens is reported in the same event loop turn; what a client causes (deadline, errors, disconnect) does not count.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from msgspec.structs import replace

from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState, HoldKind, ProbeResult
from din_extproc.domain.membership import MembershipDelta, NodeState
from din_extproc.domain.node import Node, Pool
from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.probe.micro_probe import ProbeTarget
from din_extproc.edge.registry.forms import HealthForm, MemberForm
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind
from din_extproc.health.exchanges import BUSY_REASON, PROBE_CAUSES, REQUEST_CAUSES, classify_attempt, classify_exchange
from din_extproc.health.holds import NodeHolds
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.probing import ProbeSchedule
from din_extproc.health.registry import BreakerRegistry, select_strictest
from din_extproc.health.stopped import StoppedRequests
from din_extproc.settings.health import HealthSection
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
_EVERY_S = 10.0
_REMEMBERED = 50_000


class Prober(Protocol):
    """Probes nodes and shares the results with other replicas."""

    async def start(self) -> None:
        """Start probing."""

    async def stop(self) -> None:
        """Stop probing."""

    def snapshot(self) -> dict[str, object]:
        """Return the state of the prober for the admin page."""


class HealthMonitor:
    """The breakers of this replica.

    Args:
        settings: A valid configuration.
        on_change: Called with the breakers that changed.
        on_stopped: Called with the origins of all requests that are sent to no node, when they changed.
    """

    def __init__(
        self, settings: Settings, on_change: Callable[[BreakerSnapshots], None], on_stopped: Callable[[frozenset[str]], None]
    ) -> None:
        self.breakers = BreakerRegistry()
        self.holds = NodeHolds()
        self.prober: Prober | None = None
        """None: nodes are not probed, and results of other replicas are ignored."""
        self.settings = settings
        self._on_change = on_change
        self._on_stopped = on_stopped
        self._requests = StoppedRequests()
        self._pools: dict[str, Pool] = {}
        self._joined: dict[str, dict[str, Node]] = {}
        """The registered nodes, by node id and pool."""
        self._listed: dict[str, dict[str, Node]] = {}
        """The configured nodes, by node id and pool."""
        self._left: dict[str, None] = {}
        """Registered nodes that left, oldest first."""
        self._probed: dict[str, tuple[ProbeResult, float | None, float]] = {}
        """The last probe of each node, its last time to first token in ms, and when (monotonic seconds)."""
        self.busy: dict[str, float] = {}
        """Cool-downs in seconds that nodes asked for since other replicas were informed."""
        self.opened: dict[str, str] = {}
        """Reasons of breakers that opened here since other replicas were informed, by node id."""
        self.newly_stopped: set[str] = set()
        """Requests that were stopped here since other replicas were informed."""
        self._attempts_reported = False
        """Whether Envoy reports single attempts. If it does not, final failures count against the node."""
        self.probe_schedule = ProbeSchedule(_EVERY_S)
        self.reload(settings)

    async def start(self, background: Background) -> None:
        """Start the timers of pauses and ramps, and probing."""
        background.every(_LOOK_S, "advancing breakers", self._advance)
        if self.prober is not None:
            await self.prober.start()

    async def stop(self) -> None:
        """Stop probing."""
        if self.prober is not None:
            await self.prober.stop()

    def reload(self, settings: Settings) -> None:
        """Use the pools and parameters of this configuration. Breakers whose cause is switched off close."""
        before, self.settings = self.settings, settings
        self._pools = {pool.name: pool for pool in settings.pools}
        self.breakers.pools.reload({pool.name: settings.health.pool_policy(pool) for pool in settings.pools})
        self._listed = {}
        for pool in settings.pools:
            for node in pool.nodes:
                self._listed.setdefault(node.id, {})[pool.name] = node
        self.breakers.nodes.reload({node_id: self._get_policy(node_id) for node_id in (*self._listed, *self._joined)})
        self.breakers.shared = settings.has_several_tenants
        if settings.health.probe is not None:
            self.probe_schedule.interval_s = settings.health.probe.every_s
        self._schedule_probes()
        self._release(before.health, settings.health)
        self.on_holds(node_id for node_id in self._listed if self.holds.get(node_id) is not None)

    def _release(self, before: HealthSection, after: HealthSection) -> None:
        causes: frozenset[BreakerEventKind] = frozenset()
        if before.breaker and not after.breaker:
            causes |= REQUEST_CAUSES
            self.busy.clear()
        if before.probe is not None and after.probe is None:
            causes |= PROBE_CAUSES
        if causes:
            self.breakers.reset_caused_by(causes, SystemClock.monotonic())
            self.opened = {name: reason for name, reason in self.opened.items() if name in self.breakers.nodes.snapshot_not_closed()}
            self.publish_changes()

    def on_membership(self, delta: MembershipDelta) -> None:
        """Add nodes that joined and remove those that left. A node that returns begins with a share of its requests."""
        now = SystemClock.monotonic()
        for pool, ids in delta.left.items():
            for node_id in ids:
                pools = self._joined.get(node_id, {})
                pools.pop(pool, None)
                if not pools:
                    self._joined.pop(node_id, None)
                    self._left[node_id] = None
        for pool, nodes in delta.joined.items():
            for node in nodes:
                self._joined.setdefault(node.id, {})[pool] = node
        for node_id in {node.id for nodes in delta.joined.values() for node in nodes}:
            self.breakers.nodes.add_policy(node_id, self._get_policy(node_id))
            if node_id in self._left:
                del self._left[node_id]
                self.breakers.nodes.on_event(
                    node_id, BreakerEvent(BreakerEventKind.REJOINED, now, None, "the node has returned to the network")
                )
        while len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]
        self._schedule_probes()
        self.publish_changes()
        self.on_holds({node.id for nodes in delta.joined.values() for node in nodes if self.holds.get(node.id) is not None})

    def on_probe(self, probed: ProbeResult) -> None:
        """Take the result of a probe, of this replica or another one. Ignored if probes are switched off."""
        now = SystemClock.monotonic()
        before = self._probed.get(probed.node_id, (None, None, 0.0))[1]
        if self.get_probe_target(probed.node_id) is None or self.settings.health.probe is None:
            return
        self._probed[probed.node_id] = (probed, before if probed.ttft_ms is None else probed.ttft_ms, now)
        if probed.ok is None:
            return
        event = BreakerEventKind.PROBE_SUCCEEDED if probed.ok else BreakerEventKind.PROBE_FAILED
        self.breakers.on_node_event(probed.node_id, BreakerEvent(event, now, None, probed.reason))
        self._probe_soon(probed.node_id, now)
        self.publish_changes()

    def on_remote_open(self, node_id: str, reason: str, tenant: str = "") -> None:
        """Open the breaker because another replica's has opened, unless breakers are off. `tenant`: whose requests alone did it."""
        if not self.settings.health.breaker:
            return
        event = BreakerEvent(BreakerEventKind.REMOTE_OPEN, SystemClock.monotonic(), reason=reason, origin=tenant)
        self.breakers.on_node_event(node_id, event)
        self.publish_changes(ours=False)

    def on_remote_busy(self, node_id: str, rest_s: float) -> None:
        """Cool down a node that asked another replica for it."""
        if not self.settings.health.breaker:
            return
        self.breakers.nodes.on_event(node_id, BreakerEvent(BreakerEventKind.BUSY, SystemClock.monotonic(), None, BUSY_REASON, rest_s))
        self.publish_changes(ours=False)

    def on_remote_stopped(self, origins: Iterable[str]) -> None:
        """Send these requests to no node, because another replica does not."""
        if self._requests.stop(origins, SystemClock.monotonic()):
            self._on_stopped(self._requests.stopped)

    def get_probe_target(self, node_id: str) -> ProbeTarget | None:
        """Return how to probe a node; None: the node is unknown, or a remote API, of which every question costs money."""
        members = self._joined.get(node_id) or self._listed.get(node_id)
        if not members:
            return None
        pool, node = next(iter(members.items()))
        return ProbeTarget.of(node, self._pools[pool]) if pool in self._pools and node.remote is None else None

    def on_exchange(self, record: ExchangeRecord, now: float) -> None:
        """Feed the breakers with a finished exchange."""
        if record.outcome is Outcome.COMPLETED:
            self._requests.record_answer(record.origin)
        elif record.origin and record.ended_by_break and self._requests.record_failure(record.origin, now):
            self._stop(record.origin, record.node_id)
        if not self.settings.health.breaker:
            return
        longest_open_s = self.settings.health.longest_open_s
        events = classify_exchange(record, now, attempts_reported=self._attempts_reported, longest_open_s=longest_open_s)
        changed = self.breakers.on_exchange(record, events)
        if events.node is not None and events.node.kind is BreakerEventKind.SUCCEEDED:
            self.probe_schedule.record_answer(record.node_id, now)
        if changed:
            if events.node is not None and events.node.kind is BreakerEventKind.BUSY:
                self.busy[record.node_id] = events.node.cool_down_s
            self.publish_changes()

    def on_attempt_failed(self, attempt: FailedAttempt, now: float) -> None:
        """Feed the node's breaker with a failed attempt, and stop its request when it breaks nodes."""
        self._attempts_reported = True
        if attempt.origin and attempt.breaks_connection and self._requests.record_attempt(attempt.origin, now):
            self._stop(attempt.origin, attempt.node_id)
        event = classify_attempt(attempt, now, self.settings.envoy.retry.statuses, longest_open_s=self.settings.health.longest_open_s)
        if self.settings.health.breaker and event is not None:
            self.breakers.on_node_event(attempt.node_id, event)
            self.probe_schedule.expedite(attempt.node_id, now)
            self.publish_changes()

    def _stop(self, origin: str, node_id: str) -> None:
        _log.warning("a request broke two nodes, the last one %s: it is stopped for ten minutes", node_id)
        self.newly_stopped.add(origin)
        self._on_stopped(self._requests.stopped)

    @property
    def stopped(self) -> frozenset[str]:
        """Origins of the requests that are sent to no node."""
        return self._requests.stopped

    def get_open_breakers(self) -> BreakerSnapshots:
        """Everything that is not closed: what a worker has to know before it serves."""
        found = self.breakers.snapshot_not_closed()
        return BreakerSnapshots({**found.nodes, **self.holds.snapshots(SystemClock.monotonic())}, found.pools)

    def on_holds(self, node_ids: Iterable[str]) -> None:
        """Report the breakers of these nodes to workers, because operators' orders for them have changed."""
        self._update_members()
        now = SystemClock.monotonic()
        held, closed = self.holds.snapshots(now), BreakerSnapshot(BreakerState.CLOSED, now)
        snapshots = {each: held.get(each) or self.breakers.nodes.get_snapshot(each) or closed for each in node_ids}
        if snapshots:
            self._on_change(BreakerSnapshots(snapshots))

    def make_health_form(self, node_id: str) -> HealthForm | None:
        """Return a node's health for the admin page; None: nothing is known."""
        snapshot, now = self.breakers.nodes.get_snapshot(node_id), SystemClock.monotonic()
        form = None if snapshot is None else HealthForm.of(snapshot, now)
        found = self._probed.get(node_id)
        if found is None:
            return form
        probed, ttft_ms, at = found
        failure = "" if probed.ok else probed.reason
        return replace(form or HealthForm(state=BreakerState.CLOSED), ttft_ms=ttft_ms, probe=failure, probe_age_s=round(now - at, 3))

    def add_health(self, rows: Iterable[MemberForm]) -> Iterator[MemberForm]:
        """Yield the rows with the health of their nodes."""
        for row in rows:
            hold = self.holds.get(row.node.id)
            if hold is not None and row.state is not NodeState.DEAD:
                state = NodeState.DRAINING if hold.kind is HoldKind.DRAIN else NodeState.QUARANTINED
                row = replace(row, state=state, reasons=(*row.reasons, hold.text))  # noqa: PLW2901 - the same row, held
            yield replace(row, health=self.make_health_form(row.node.id))

    def snapshot(self) -> dict[str, object]:
        """Return every breaker that is not closed, the prober's state and the number of stopped requests, for the admin page."""
        now, snapshots = SystemClock.monotonic(), self.breakers.snapshot_not_closed()
        return {
            kind: {name: HealthForm.of(snapshot, now) for name, snapshot in found.items()}
            for kind, found in (("nodes", snapshots.nodes), ("pools", snapshots.pools))
        } | {"probes": {} if self.prober is None else self.prober.snapshot(), "stopped_requests": len(self.stopped)}

    def publish_changes(self, *, ours: bool = True) -> None:
        """Report changed breakers. `ours`: other replicas do not know about them."""
        changed = self.breakers.take_changes()
        if not changed:
            return
        for kind, snapshots in (("node", changed.nodes), ("pool", changed.pools)):
            for name, snapshot in snapshots.items():
                if ours and kind == "node" and snapshot.state is BreakerState.OPEN:
                    self.opened[name] = snapshot.reason
                level = logging.WARNING if snapshot.state is BreakerState.OPEN else logging.INFO
                _log.log(
                    level, "breaker of %s %s: %s%s", kind, name, snapshot.state.value, f": {snapshot.reason}" if snapshot.reason else ""
                )
        reported = BreakerSnapshots(
            {name: snapshot for name, snapshot in changed.nodes.items() if self.holds.get(name) is None}, changed.pools
        )
        if reported:
            self._on_change(reported)

    async def _advance(self) -> None:
        now = SystemClock.monotonic()
        if self._requests.expire(now):
            self._on_stopped(self._requests.stopped)
        self.breakers.on_tick(now)
        for node_id, snapshot in self.breakers.nodes.snapshot_not_closed().items():
            if snapshot.state is BreakerState.HALF_OPEN:
                self.probe_schedule.expedite(node_id, now)
        self.publish_changes()

    def _probe_soon(self, node_id: str, now: float) -> None:
        """Probe a node earlier that has failures and no success since."""
        if self.breakers.nodes.get_consecutive_failures(node_id):
            self.probe_schedule.expedite(node_id, now)

    def _schedule_probes(self) -> None:
        """Probe the current nodes."""
        members = self._joined.keys() | self._listed.keys()
        self.probe_schedule.set_nodes(members, SystemClock.monotonic())
        self._probed = {node_id: probed for node_id, probed in self._probed.items() if node_id in members}

    def _update_members(self) -> None:
        """Tell the breakers which nodes may take requests: all but those that operators hold."""
        members: dict[str, set[str]] = {}
        for node_id, pools in (*self._listed.items(), *self._joined.items()):
            if self.holds.get(node_id) is None:
                for pool in pools:
                    members.setdefault(pool, set()).add(node_id)
        self.breakers.members = members

    def _get_policy(self, node_id: str) -> BreakerPolicy:
        pools = (*self._listed.get(node_id, ()), *self._joined.get(node_id, ()))
        health = self.settings.health
        return select_strictest(
            [health.node_policy(self._pools[pool].traffic) for pool in pools if pool in self._pools] or [BreakerPolicy()]
        )

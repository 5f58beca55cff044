"""Micro probes: one replica of all probes the nodes, and all replicas get the results.

Rule: a probe costs one token; a node that has just answered a request is not probed, and no node is probed twice at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.health import BreakerSnapshots, ProbeResult
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.probe.micro_probe import MicroProbe, ProbeTarget
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.prober import ProberLease, ProberMessage
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from din_extproc.flow.trace import TraceIds
from din_extproc.roles.serve.decision_view import node_number
from din_extproc.roles.serve.health import HealthMonitor
from din_extproc.roles.serve.ledger import replica_name
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_STEP_S = 0.1
_LEASE_S = 1.0
_LEASE_MS = 5000
_AT_ONCE = 32


def make_health_monitor(
    settings: Settings,
    on_change: Callable[[BreakerSnapshots], None],
    on_stopped: Callable[[frozenset[str]], None],
    runner: Runner,
    background: Background,
) -> HealthMonitor:
    """Return the breakers of this replica, with their prober."""
    health = HealthMonitor(settings, on_change, on_stopped)
    health.prober = MicroProber(settings, health, runner, replica_name(), background)
    return health


class MicroProber:
    """The prober of this replica.

    Args:
        settings: A valid configuration.
        health: Takes the results and knows the nodes.
        runner: Runs Redis commands.
        replica: This process's name among all replicas.
        background: Runs periodic tasks.
    """

    def __init__(self, settings: Settings, health: HealthMonitor, runner: Runner, replica: str, background: Background) -> None:
        self._health = health
        self._lease = ProberLease(runner, settings.network, replica)
        self._subscription = ChannelSubscription(
            make_locator(settings.store.url.get_secret_value()), self._lease.channel, self._on_message, lambda: None
        )
        self._background = background
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self._ids = TraceIds(node_number(settings), hash(replica))
        self._stopped = False
        self._results: list[ProbeResult] = []
        self.holds_lease = False
        """Whether this replica holds the prober lease."""

    async def start(self) -> None:
        """Start probing and receiving the results of other replicas."""
        self._session = aiohttp.ClientSession()
        self._background.run("receiving probe results", self._subscription.run())
        self._background.every(_LEASE_S, "renewing the prober lease", self._renew_lease)
        self._background.every(_STEP_S, "probing nodes", self._probe_due_nodes)
        await self._renew_lease()

    async def stop(self) -> None:
        """Stop probing and give up the lease, so that another replica can take over at once."""
        self._stopped = True
        for task in list(self._probes.values()):
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self.holds_lease:
            with contextlib.suppress(LimitsUnavailable):
                await self._lease.acquire(0)

    def snapshot(self) -> dict[str, object]:
        """Return the state of the prober for the admin page."""
        return {"asked_here": self.holds_lease, "saved": self._health.probe_schedule.skipped}

    async def _renew_lease(self) -> None:
        try:
            self.holds_lease = await self._lease.acquire(_LEASE_MS)
        except LimitsUnavailable:
            self.holds_lease = True

    async def _probe_due_nodes(self) -> None:
        section, session = self._health.settings.health.probe, self._session
        opened, self._health.opened = self._health.opened, {}
        busy, self._health.busy = self._health.busy, {}
        stopped, self._health.newly_stopped = tuple(self._health.newly_stopped), set()
        results, self._results = tuple(self._results), []
        if results or opened or busy or stopped:
            tenants = {node_id: tenant for node_id in opened if (tenant := self._health.breakers.nodes.get_opened_for(node_id))}
            message = ProberMessage(self._lease.replica, results, opened, busy=busy, opened_for=tenants, stopped=stopped)
            with contextlib.suppress(LimitsUnavailable):
                await self._lease.publish(message)
        if section is None or session is None or self._stopped:
            return
        due = self._health.probe_schedule.take_due(SystemClock.monotonic())
        if not self.holds_lease or not due:
            return
        probe = MicroProbe(session, section.timeout_s, SystemClock.monotonic, lambda: self._ids.make(SystemClock.wall()))
        for node_id in due:
            target = self._health.get_probe_target(node_id)
            if target is not None and node_id not in self._probes:
                task = asyncio.get_running_loop().create_task(self._probe(probe, target), name=f"probing {node_id}")
                self._probes[node_id] = task

    async def _probe(self, probe: MicroProbe, target: ProbeTarget) -> None:
        try:
            async with self._slots:
                probed = await probe.probe(target)
            self._health.on_probe(probed)
            self._results.append(probed)
        finally:
            self._probes.pop(target.node_id, None)

    def _on_message(self, message: bytes) -> None:
        report = self._lease.on_message(message)
        if report is None:
            return
        for probed in report.probes:
            self._health.on_probe(probed)
        for node_id, reason in report.opened.items():
            self._health.on_remote_open(node_id, f"{reason} (reported by {report.replica})", report.opened_for.get(node_id, ""))
        self._health.on_remote_stopped(report.stopped)
        for node_id, rest_s in report.busy.items():
            self._health.on_remote_busy(node_id, rest_s)

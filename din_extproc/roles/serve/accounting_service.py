"""The parts of the accounting process: settlement, observers, breakers, node registry and xDS.

One process of a sidecar owns them. What flows where:

    Envoy's access log -> `AccountingPlane`  -> settlement, `ExchangeObservers`, `HealthMonitor`, learned statistics
    nodes              -> `RegistryService`  -> `_on_membership`: accounting plane, xDS, breakers, workers
    metrics pages      -> `Scraper`          -> workers
    probes, failures   -> `HealthMonitor`    -> workers

Workers get all of it as `WorkerUpdate`; `Worker` holds the table of their handlers.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec.structs import replace

from din_extproc.admit.reservation import OutputHistory
from din_extproc.audit.records import OperatorOrder
from din_extproc.domain.availability import ModelAvailability, compute_availability
from din_extproc.domain.health import HoldKind
from din_extproc.domain.membership import HeartbeatReading, MembershipDelta, join_deltas
from din_extproc.domain.node import Node
from din_extproc.domain.usage import FailedAttempt
from din_extproc.edge.access_log_port import AccessLogPort
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.credentials import CredentialFiles
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.http.node_orders import NodeOrder
from din_extproc.edge.probe.scrape import Scraper, ScrapeTarget
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.observe.families import Family
from din_extproc.roles.serve.accounting_plane import AccountingPlane
from din_extproc.roles.serve.envoy_nodes import EnvoyNodes
from din_extproc.roles.serve.micro_prober import make_health_monitor
from din_extproc.roles.serve.node_discovery import NodeDiscovery
from din_extproc.roles.serve.node_holds import OperatorHolds
from din_extproc.roles.serve.node_trust import NodeTrust
from din_extproc.roles.serve.observers import ExchangeObservers
from din_extproc.roles.serve.registry_service import RegistryService, configured_rows
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.roles.serve.xds_control_plane import XdsControlPlane
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_OBSERVE_S = 5.0
_GOODBYE_S = 1.0
_LEARNED_S = 0.5
_ENVOY_S = 3.0
_CREDENTIALS_S = 1.0


_HOLDS = {
    NodeOrder.DRAIN: HoldKind.DRAIN,
    NodeOrder.UNDRAIN: HoldKind.NONE,
    NodeOrder.QUARANTINE: HoldKind.QUARANTINE,
    NodeOrder.RELEASE: HoldKind.NONE,
}


class AccountingService:
    """The accounting of one sidecar. Call `reload`, `start`, `listen` in this order, and `leave` and `close` at the end.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
        ledger: The rate-limit counters.
        background: Runs periodic tasks.
        transport: The gRPC server for nodes and for Envoys that use xDS.
        counters: Counts how exchanges ended.
        calibrators: Learns prompt lengths.
        outputs: Learns output lengths.
        collect_state: Returns the state of the whole sidecar as metrics; None between them lets other tasks run.
        send: Sends an update to the workers.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        link: Runner,
        ledger: GuardedLedger,
        background: Background,
        transport: type[H2Server | GrpcioServer],
        counters: DecisionCounters,
        calibrators: TokenCalibrators,
        outputs: OutputHistory,
        collect_state: Callable[[], Iterator[Family | None]],
        send: Callable[[WorkerUpdate], None],
    ) -> None:
        self._background = background
        self._send = send
        self._audit_blocked = False
        self.observers = ExchangeObservers(settings, link, counters, collect_state, self._block_requests)
        self._breakers = make_health_monitor(
            settings,
            on_change=lambda changed: send(WorkerUpdate(breakers=changed)),
            on_stopped=lambda stopped: send(WorkerUpdate(stopped=stopped)),
            runner=link,
            background=background,
        )
        self._holds = OperatorHolds(settings, link, self._breakers.holds, self._breakers.on_holds)
        self.plane = AccountingPlane(
            settings,
            ledger,
            background,
            observers=self.observers.exchange_observers(),
            attempt_observers=(*self.observers.attempt_observers(), self._send_missing_adapter),
            calibrators=calibrators,
            outputs=outputs,
            health=self._breakers,
        )
        self._envoy_nodes = EnvoyNodes(settings)
        self._settings = settings
        self._credentials = CredentialFiles(os.environ)
        self._scraper = Scraper(self._send_scraped)
        self._xds = None if settings.gateway.xds is None else XdsControlPlane(transport, background)
        self._registry: RegistryService | None = None
        if settings.gateway.registry is not None:
            self._registry = RegistryService(
                settings=settings,
                section=settings.gateway.registry,
                runner=link,
                server=transport,
                background=background,
                on_membership=self._on_registered,
                on_readings=self._send_readings,
            )
            self._registry.registrar.watchers.add(self.observers.on_node_events)
        self._discovery = NodeDiscovery(self._on_found, self._get_registered, os.environ)
        self._trust = NodeTrust(None if self._registry is None else self._registry.registrar, self._quarantine)
        self.observers.checks.recorder = self._trust
        self._logs = AccessLogPort(self.plane.on_access_log, self.plane.on_log_entries)

    def _send_missing_adapter(self, attempt: FailedAttempt) -> None:
        """Send workers which node turned out to lack an adapter."""
        if attempt.lacks_adapter:
            self._send(WorkerUpdate(missing_adapters={attempt.node_id: attempt.adapter}))

    async def publish(self, settings: Settings) -> None:
        """Send this configuration to Envoys by xDS. To be awaited before a worker decides by it."""
        if self._xds is not None:
            await self._xds.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Settle exchanges and watch nodes by this configuration."""
        self._settings = settings
        for part in (self.plane, self.observers, self._breakers, self._registry, self._envoy_nodes, self._discovery):
            if part is not None:
                part.reload(settings)
        self._follow_nodes()

    def _follow_nodes(self) -> None:
        """Rate and scrape the nodes that are listed or were found; those that registered report by themselves."""
        pools = tuple(self._discovery.with_found(self._settings.pools))
        self._trust.reload(pools)
        targets = (ScrapeTarget.of(node, pool) for pool in pools for node in pool.nodes if node.remote is None)
        self._scraper.set_targets(targets, self._settings.gateway.scrape_s)

    async def start(self) -> None:
        """Start settlement, breakers and probes."""
        self.plane.start()
        await self._write_credentials()
        await self._breakers.start(self._background)
        await self._holds.start(self._background)
        self._background.every(_ENVOY_S, "asking Envoy which nodes it knows", self._envoy_nodes.look)
        self._background.every(_CREDENTIALS_S, "writing credentials for Envoy", self._write_credentials)
        self._background.every(_LEARNED_S, "sending learned statistics to workers", self._send_learned)
        self._background.every(_OBSERVE_S, "rating nodes by their answers", self._rate_nodes)

    async def _write_credentials(self) -> None:
        """Hand new credentials of remote APIs to Envoy."""
        remote = [pool for pool in self._settings.pools if pool.is_remote]
        if remote:
            folder = self._settings.credentials_folder
            await asyncio.get_running_loop().run_in_executor(None, self._credentials.write, remote, folder)

    async def listen(self, settings: Settings) -> None:
        """Open the ports for nodes and for Envoys that use xDS.

        Raises:
            OSError: an address is taken.
        """
        if self._registry is not None:
            await self._registry.start()
        if self._xds is not None and settings.gateway.xds is not None:
            where = secured(str(settings.gateway.xds.address), settings.gateway.xds.tls, settings.folder)
            await self._xds.start(where)
            _log.info("serving xDS to Envoys at %s", where)

    async def listen_for_logs(self, settings: Settings) -> None:
        """Open the port for Envoy's access log.

        Raises:
            OSError: the address is taken.
        """
        section = settings.gateway.access_log
        where = secured(str(section.address), section.tls, settings.folder)
        await self._logs.start(where)
        _log.info("receiving access logs at %s", where)

    async def stop_logs(self) -> None:
        """Take what Envoy still holds, then close that port."""
        await self._logs.stop()

    async def leave_network(self) -> None:
        """Close these ports."""
        if self._registry is not None:
            await self._registry.stop()
        if self._xds is not None:
            await self._xds.stop(_GOODBYE_S)

    async def close(self) -> None:
        """Settle and write what is left."""
        await self.plane.settler.retry()
        await self.observers.stop()
        await self._discovery.stop()
        await self._scraper.stop()
        await self._breakers.stop()

    def initial_update(self) -> WorkerUpdate:
        """Return what a new worker has to know before it decides."""
        found = self._discovery.snapshot()
        registered = None if self._registry is None else self._registry.registrar.table.snapshot()
        membership = join_deltas(registered, found) if registered and found else registered or found
        return WorkerUpdate(
            membership=membership,
            breakers=self._breakers.get_open_breakers(),
            stopped=self._breakers.stopped,
            audit_blocked=self._audit_blocked,
        )

    @property
    def stale(self) -> bool:
        """Whether the node table is the last known one because Redis can't be reached."""
        return self._registry is not None and self._registry.registrar.table.stale

    def get_rows(self, settings: Settings) -> Iterator[MemberForm]:
        """Yield every node, configured and registered, with its state and health."""
        listed = configured_rows(settings, self._discovery.get_found(), self._scraper.latest, self._trust.score)
        return self._breakers.add_health(listed if self._registry is None else chain(listed, self._registry.rows()))

    def get_availability(self, settings: Settings) -> tuple[ModelAvailability, ...]:
        """Return how much of each model's capacity takes requests now."""
        shares = [row.share for row in self.get_rows(settings)]
        return compute_availability(settings.pools, self._breakers.get_open_breakers().pools, shares, SystemClock.monotonic())

    async def apply_order(self, settings: Settings, order: NodeOrder, node_id: str, operator: str, reason: str) -> str | None:
        """Carry out an operator's order. Return what is still missing, "" for nothing; None: there is no such node."""
        if not any(row.node.id == node_id for row in self.get_rows(settings)):
            return None
        self.observers.record_event(
            OperatorOrder(at=SystemClock.wall(), node_id=node_id, order=order.value, operator=operator, reason=reason)
        )
        if order in (NodeOrder.UNDRAIN, NodeOrder.RELEASE):
            self._trust.release(node_id)
            if self._registry is not None:
                await self._registry.registrar.release_node(node_id, operator)
        return await self._holds.order(node_id, _HOLDS[order], operator, reason)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of breakers, xDS and audit log for the admin page."""
        xds = {} if self._xds is None else self._xds.snapshot()
        return {
            "breakers": self._breakers.snapshot(),
            "nodes_unknown_to_envoy": self._envoy_nodes.unknown,
            **xds,
            "discovery": self._discovery.status(),
            **self.observers.snapshot(),
        }

    def _get_registered(self) -> Mapping[str, tuple[Node, ...]]:
        """Return the registered nodes that are routed to, by pool."""
        return {} if self._registry is None else self._registry.registrar.table.snapshot().joined

    def _on_registered(self, delta: MembershipDelta) -> None:
        found = self._discovery.take_changes()
        if found is None:
            self._on_membership(delta)
            return
        self._follow_nodes()
        self._on_membership(join_deltas(delta, found))

    def _on_found(self, delta: MembershipDelta) -> None:
        self._follow_nodes()
        self._on_membership(delta)

    def _on_membership(self, delta: MembershipDelta) -> None:
        """Pass on that nodes joined or left. Envoys and breakers know a node before a worker sends requests to it."""
        self.plane.on_membership(delta)
        if self._xds is not None:
            self._xds.on_membership(delta)
        self._breakers.on_membership(delta)
        self._send(WorkerUpdate(membership=delta))

    def _send_readings(self, readings: dict[str, HeartbeatReading]) -> None:
        self._send(WorkerUpdate(readings=readings))

    def _send_scraped(self, readings: dict[str, HeartbeatReading]) -> None:
        self._send_readings({node_id: replace(reading, trust=self._trust.score(node_id)) for node_id, reading in readings.items()})

    async def _quarantine(self, node_id: str, reason: str) -> None:
        await self.apply_order(self._settings, NodeOrder.QUARANTINE, node_id, "double checks", reason)

    def _block_requests(self, blocked: bool) -> None:  # noqa: FBT001 - a handler takes the value alone
        self._audit_blocked = blocked
        self._send(WorkerUpdate(audit_blocked=blocked))

    async def _send_learned(self) -> None:
        learned = self.plane.take_learned()
        if learned != WorkerUpdate():
            self._send(learned)

    async def _rate_nodes(self) -> None:
        for node_id, (answers, failures) in self.plane.take_counts().items():
            await self._trust.record_answers(node_id, answers, failures)
        for node_id, (count, reason) in self.plane.take_mismatches().items():
            await self._trust.record_misidentified(node_id, count, reason)
        readings = self._trust.take_readings()
        if readings:
            self._send_readings(readings)

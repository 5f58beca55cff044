"""What keeps the accounts and knows the nodes: the accounting plane with those who hear of exchanges, breakers, registry, discovery.

Rule: one process of a sidecar has it. What those that decide have to know of it, it tells as news.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from din_extproc.admit.reservation import OutputHistory
from din_extproc.domain.membership import MembershipDelta
from din_extproc.edge.background import Background
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import AccessLogService, GrpcService
from din_extproc.edge.probe.scrape import Scraper, ScrapeTarget
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.observe.families import Family
from din_extproc.roles.serve.accounting_plane import AccountingPlane
from din_extproc.roles.serve.micro_prober import make_health
from din_extproc.roles.serve.observers import ExchangeObservers
from din_extproc.roles.serve.registry_service import RegistryService, configured
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.roles.serve.xds_control_plane import XdsControlPlane
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_OBSERVE_S = 5.0
_GOODBYE_S = 1.0


class AccountingService:
    """One sidecar's own: `open`, `use`, `start`, `listen`, and back by `leave` and `close`.

    Args:
        settings: The configuration.
        link: What carries commands to Redis.
        ledger: The counters.
        background: Runs what is to be done again and again.
        transport: What carries gRPC to nodes and to Envoys that ask for their configuration.
        counters: Told how exchanges ended.
        gauges: What prompts teach.
        outputs: What answers teach.
        standing: How the whole sidecar stands, as metrics; None: others may go first.
        tell: Tells those that decide.
    """

    def __init__(
        self,
        settings: Settings,
        link: Runner,
        ledger: GuardedLedger,
        background: Background,
        transport: type[H2Server | GrpcioServer],
        counters: DecisionCounters,
        gauges: TokenCalibrators,
        outputs: OutputHistory,
        standing: Callable[[], Iterator[Family | None]],
        tell: Callable[[WorkerUpdate], None],
    ) -> None:
        self._background = background
        self._tell = tell
        self._shut = False
        self._accounts = ExchangeObservers(settings, link, counters, standing, self._close_or_open)
        self._breakers = make_health(settings, lambda standings: tell(WorkerUpdate(standings=standings)), link, background)
        self._plane = AccountingPlane(
            settings=settings,
            ledger=ledger,
            background=background,
            observer=self._accounts,
            gauges=gauges,
            outputs=outputs,
            health=self._breakers,
        )
        self._scraper = Scraper(lambda readings: tell(WorkerUpdate(readings=readings)))
        self._membership: RegistryService | None = None
        if settings.gateway.registry is not None:
            self._membership = RegistryService(
                settings,
                settings.gateway.registry,
                link,
                transport,
                background,
                turned=self._turned,
                said=lambda readings: tell(WorkerUpdate(readings=readings)),
            )
            self._membership.registrar.watchers.add(self._accounts.nodes)
            self._accounts.checks.registrar = self._membership.registrar
        self._discovery = None if settings.gateway.xds is None else XdsControlPlane(transport, background)
        self.services: list[GrpcService] = [AccessLogService(self._plane.received)]
        self.recent = self._accounts.recent
        self.take = self._accounts.take
        self.families = self._accounts.families
        self.numbers = self._plane.shown

    def open(self) -> None:
        """Begin to write.

        Raises:
            OSError: the audit log's folder can't be used.
        """
        self._accounts.start(self._background)

    async def publish(self, settings: Settings) -> None:
        """Tell Envoys of this configuration: to be done before anybody decides by it."""
        if self._discovery is not None:
            await self._discovery.use(settings)

    def use(self, settings: Settings) -> None:
        """Keep accounts and look at nodes by this configuration."""
        self._plane.use(settings)
        self._accounts.use(settings)
        self._breakers.use(settings)
        if self._membership is not None:
            self._membership.use(settings)
        targets = (ScrapeTarget.of(node, pool.engine) for pool in settings.pools for node in pool.nodes)
        self._scraper.use(targets, settings.gateway.scrape_s)

    async def start(self) -> None:
        """Settle, and look after nodes."""
        self._plane.start()
        await self._breakers.start(self._background)

    async def listen(self, settings: Settings) -> None:
        """Open the ports for nodes and for Envoys that ask for their configuration.

        Raises:
            OSError: an address is taken.
        """
        if self._membership is not None:
            await self._membership.start()
            self._background.every(_OBSERVE_S, "telling what answers say of nodes", self._observe)
        if self._discovery is not None and settings.gateway.xds is not None:
            where = secured(str(settings.gateway.xds.address), settings.gateway.xds.tls, settings.folder)
            await self._discovery.start(where)
            _log.info("telling Envoys their nodes at %s", where)

    async def leave(self) -> None:
        """Close these ports."""
        if self._membership is not None:
            await self._membership.stop()
        if self._discovery is not None:
            await self._discovery.stop(_GOODBYE_S)

    async def close(self) -> None:
        """Settle and write what is left."""
        await self._plane.settler.retry()
        await self._accounts.stop()
        await self._scraper.stop()
        await self._breakers.stop()

    def teach(self) -> None:
        """Tell what answers have taught."""
        lessons = self._plane.lessons()
        if lessons:
            self._tell(WorkerUpdate(lessons=lessons))

    def greeting(self) -> WorkerUpdate:
        """What a process that is new has to know before it decides."""
        turnover = None if self._membership is None else self._membership.joined()
        return WorkerUpdate(turnover=turnover, standings=self._breakers.all(), shut=self._shut)

    @property
    def shut(self) -> str:
        """Why no request may be taken, "" when requests may."""
        return self._accounts.shut

    @property
    def stale(self) -> bool:
        """The table of registered nodes can't be shared: the last view is in use."""
        return self._membership is not None and self._membership.stale

    def rows(self, settings: Settings) -> Iterator[MemberForm]:
        """The nodes: those of the configuration, and those that registered."""
        listed = configured(settings, self._scraper.latest)
        return self._breakers.beside(listed if self._membership is None else chain(listed, self._membership.rows()))

    def shown(self) -> dict[str, Any]:
        """What stands beside the numbers on the admin page."""
        discovery = {} if self._discovery is None else self._discovery.shown()
        return {"breakers": self._breakers.shown(), **discovery, **self._accounts.shown()}

    def _turned(self, turnover: MembershipDelta) -> None:
        """Who settles requests and who sends them hears of nodes that came or went."""
        self._plane.turn(turnover)
        if self._discovery is not None:
            self._discovery.turn(turnover)
        self._breakers.turn(turnover)
        self._tell(WorkerUpdate(turnover=turnover))

    def _close_or_open(self, shut: bool) -> None:  # noqa: FBT001 - the shape of who is told
        self._shut = shut
        self._tell(WorkerUpdate(shut=shut))

    async def _observe(self) -> None:
        if self._membership is not None:
            for node_id, (answers, failures) in self._plane.tallies().items():
                await self._membership.registrar.observe(node_id, answers, failures)

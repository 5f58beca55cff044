"""The role `serve`: the sidecar beside Envoy, in one process or in several. Starts its parts, and takes them down in order.

Rule: it goes down the way that loses nothing: not serving -> no new streams -> open ones end -> what they cost is settled -> gone.

With one worker both planes run in this process. With more, this process keeps the accounting plane and the admin port, and starts a
worker process per socket for the request plane; it tells them what answers have taught, and they tell it what they do.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Any

from din_extproc.admit.reservation import OutputHistory
from din_extproc.control.topology import Address as ListenAddress
from din_extproc.control.topology import UnixSocket
from din_extproc.domain.node import Endpoint
from din_extproc.edge.background import Background
from din_extproc.edge.grpc.authorization import AuthorizationService
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import AccessLogService, ExtProcService, HealthService, Service
from din_extproc.edge.http.admin import AdminPages
from din_extproc.edge.http.dashboard import DashboardPages
from din_extproc.edge.probe.scrape import Scraper, Target
from din_extproc.edge.process.channel import Channel
from din_extproc.edge.process.workers import Workers
from din_extproc.edge.redis.guard import OnError
from din_extproc.edge.registry.catalog_source import CatalogSource
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.edge.telemetry.counters import Counters
from din_extproc.edge.tls import Secured
from din_extproc.flow.gauges import Gauges
from din_extproc.observe.exposition import slices
from din_extproc.observe.families import Family
from din_extproc.roles.accounts import Accounts
from din_extproc.roles.dashboard import Dashboard
from din_extproc.roles.discovery import Discovery
from din_extproc.roles.health import Health
from din_extproc.roles.ledger import ledger
from din_extproc.roles.membership import Membership, configured
from din_extproc.roles.planes import AccountingPlane, News, RequestPlane
from din_extproc.roles.probes import make_health
from din_extproc.roles.reload import Reloader
from din_extproc.roles.revoked import RevokedKeys
from din_extproc.roles.serve_options import ServeOptions
from din_extproc.roles.standing import added, kept_of, node_families, request_families, state_families
from din_extproc.roles.tenants import TenantsPage
from din_extproc.roles.view import load_tokenizers
from din_extproc.roles.waits import Waits
from din_extproc.settings.registry import Registry
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_TELL_S = 0.5
_OBSERVE_S = 5.0
_LAST_WORDS_S = 2.0
_GOODBYE_S = 1.0
_TRANSPORTS: dict[str, type[H2Server | GrpcioServer]] = {"wire": H2Server, "grpcio": GrpcioServer}


class Gateway:
    """One process of a sidecar."""

    def __init__(self, settings: Settings, options: ServeOptions, source: CatalogSource) -> None:
        self._options = options
        self._serving = self._shut = False
        self._background = Background()
        self._counters = Counters()
        self._former: dict[str, Any] = {}
        """What workers that are gone have counted."""
        self._reloader = Reloader(settings, self._use, source)
        self._link, self._ledger = ledger(settings)
        self._requests: RequestPlane | None = None
        self._waits: Waits | None = None
        self._accounting: AccountingPlane | None = None
        self._accounts: Accounts | None = None
        self._workers: Workers[dict[str, Any]] | None = None
        self._channel: Channel[News] | None = None
        self._membership: Membership | None = None
        self._discovery: Discovery | None = None
        self._scraper: Scraper | None = None
        self._breakers: Health | None = None
        self._dashboard: DashboardPages | None = None
        gauges, outputs = Gauges(settings.routes.preferred), OutputHistory()
        services: list[Service] = []
        if options.worker is not None or settings.gateway.workers == 1:
            self._waits = Waits(settings, self._link, self._ledger, self._background)
            self._requests = RequestPlane(settings, self._ledger, self._background, self._counters, self._waits.room)
            gauges, outputs = self._requests.gauges, self._requests.outputs
            services.append(ExtProcService(self._requests.desk))
            if self._requests.permits is not None:
                services.append(AuthorizationService(self._requests.permits.conductor))
        else:
            count, drain_s = settings.gateway.workers, options.drain_s
            self._workers = Workers(count, options.worker_command, dict[str, Any], drain_s, self._greeting, self._remember, self._take)
        if options.worker is None:
            self._accounts = Accounts(settings, self._link, self._counters, self._standing, self._close_or_open)
            self._breakers = make_health(settings, lambda standings: self._tell(News(standings=standings)), self._link, self._background)
            self._accounting = AccountingPlane(settings, self._ledger, self._background, self._accounts, gauges, outputs, self._breakers)
            services.append(AccessLogService(self._accounting.received))
            self._scraper = Scraper(lambda readings: self._tell(News(readings=readings)))
            if settings.gateway.dashboard is not None:
                self._dashboard = Dashboard(
                    self._reloader, self._shown, self._nodes, self._unready, self._tenants, self._accounts.recent
                ).pages
            if settings.gateway.registry is not None:
                self._membership = self._make_membership(settings, settings.gateway.registry)
                self._membership.registrar.watchers.add(self._accounts.nodes)
                self._accounts.checks.registrar = self._membership.registrar
            if settings.gateway.xds is not None:
                self._discovery = Discovery(_TRANSPORTS[options.transport], self._background)
        self._health = HealthService(*(service.name for service in services))
        self._server = _TRANSPORTS[options.transport]((*services, self._health), max_body_bytes=settings.body_limit)
        times, may = (lambda _: ()) if self._accounts is None else self._accounts.recent.times, self._reloader.opens
        self._admin = AdminPages(self._status, self._unready, self._nodes, self._tenants, self._metrics, times, may, self._dashboard).port
        self._tenants_page = TenantsPage(settings, self._link)

    async def run(self) -> None:
        """Serve until a signal.

        Raises:
            OSError: an address is taken.
            WorkerFailed: a worker did not get ready.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloader.demand)
        loop.add_signal_handler(signal.SIGUSR1, self._replace_workers)
        try:
            await self._start(stop)
            await stop.wait()
        finally:
            await self._stop()

    async def _start(self, stop: asyncio.Event) -> None:
        settings = self._reloader.settings
        if not await self._link.start():
            _log.warning("redis: %s; limits follow `on_error: %s`", self._link.state.reason, settings.store.on_error)
        await self._ledger.start()
        if self._accounts is not None:
            self._accounts.start(self._background)
        await self._use(settings)
        if self._options.channel is not None:
            self._channel = await Channel.over(socket.socket(fileno=self._options.channel), News)
            self._heed(await self._channel.receive() or News())
        if self._requests is not None:
            self._requests.start()
            await RevokedKeys(self._link, settings.network, self._requests.desk).start(self._background)
        if self._accounting is not None:
            self._accounting.start()
            self._background.every(_TELL_S, "telling what was learned", self._teach)
        look = self._reloader.look if self._channel is None else self._reloader.follow
        self._background.every(_LOOK_S, "looking at the configuration", look)
        if self._breakers is not None:
            await self._breakers.start(self._background)
        addresses = self._addresses(settings)
        await self._server.start(*addresses)
        _log.info("listening on %s", ", ".join(map(str, addresses)))
        if self._membership is not None:
            await self._membership.start()
            self._background.every(_OBSERVE_S, "telling what answers say of nodes", self._observe)
        if self._discovery is not None and settings.gateway.xds is not None:
            where = secured(str(settings.gateway.xds.address), settings.gateway.xds.tls, settings.folder)
            await self._discovery.start(where)
            _log.info("telling Envoys their nodes at %s", where)
        if self._workers is not None:
            await self._workers.start()
        if self._channel is None:
            await self._admin.start(secured(str(settings.gateway.admin.address), settings.gateway.admin.tls, settings.folder))
        else:
            self._background.run("hearing news", self._hear(self._channel, stop))
            self._background.every(_TELL_S, "reporting", self._report)
            await self._report()
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked at again by the collector
        self._switch(serving=True)
        _log.info("serving configuration %s", settings.fingerprint)

    async def _stop(self) -> None:
        self._switch(serving=False)
        if self._membership is not None:
            await self._membership.stop()
        if self._discovery is not None:
            await self._discovery.stop(_GOODBYE_S)
        if self._workers is not None:
            await self._workers.stop()
        await self._server.stop(self._options.drain_s)
        await self._background.quiet(_LAST_WORDS_S)
        if self._accounting is not None:
            await self._accounting.settler.retry()
        if self._accounts is not None:
            self._pass_on()
            await self._accounts.stop()
        if self._scraper is not None:
            await self._scraper.stop()
        if self._breakers is not None:
            await self._breakers.stop()
        if self._channel is not None:
            await self._report()
            self._channel.close()
        await self._background.close()
        if self._waits is not None:
            await self._waits.room.close()
        if self._dashboard is not None:
            self._dashboard.close()
        await self._admin.stop()
        await self._ledger.close()
        await self._link.close()
        _log.info("stopped")

    def _addresses(self, settings: Settings) -> list[str | Secured]:
        """Where this process listens for Envoy."""
        gateway = settings.gateway
        workers = [secured(_listen_text(address), gateway.ext_proc.tls, settings.folder) for address in gateway.worker_addresses]
        if self._options.worker is not None:
            return [workers[self._options.worker]]
        logs = secured(str(gateway.access_log.address), gateway.access_log.tls, settings.folder)
        return [*(workers if self._workers is None else ()), logs]

    def _switch(self, *, serving: bool) -> None:
        self._serving = serving
        self._health.switch(serving=serving)

    async def _use(self, settings: Settings) -> None:
        if self._discovery is not None:
            await self._discovery.use(settings)
        if self._requests is not None:
            self._requests.use(settings, await load_tokenizers(settings))
        if self._waits is not None:
            self._waits.use(settings)
        if self._accounting is not None:
            self._accounting.use(settings)
        if self._accounts is not None:
            self._accounts.use(settings)
        if self._breakers is not None:
            self._breakers.use(settings)
        if self._membership is not None:
            self._membership.use(settings)
        if self._scraper is not None:
            targets = (Target.of(node, pool.engine) for pool in settings.pools for node in pool.nodes)
            self._scraper.use(targets, settings.gateway.scrape_s)
        if self._workers is not None:
            self._workers.tell(News(configuration=settings.fingerprint))

    def _replace_workers(self) -> None:
        if self._workers is not None:
            self._background.run("replacing workers", self._workers.replace())

    async def _teach(self) -> None:
        if self._accounting is None:
            return
        self._pass_on()
        lessons = self._accounting.lessons()
        if lessons:
            self._tell(News(lessons=lessons))

    def _pass_on(self) -> None:
        """What the request plane of this process has admitted is recorded."""
        if self._requests is not None and self._accounts is not None:
            self._accounts.take(self._requests.to_record())

    def _take(self, report: dict[str, Any]) -> None:
        """A worker reports: what it admitted is recorded, its numbers are added up when somebody asks."""
        if self._accounts is not None:
            self._accounts.take(report)

    def _close_or_open(self, shut: bool) -> None:  # noqa: FBT001 - the shape of who is told
        self._shut = shut
        self._tell(News(shut=shut))

    def _make_membership(self, settings: Settings, section: Registry) -> Membership:
        return Membership(
            settings,
            section,
            self._link,
            _TRANSPORTS[self._options.transport],
            self._background,
            turned=lambda turnover: self._tell(News(turnover=turnover)),
            said=lambda readings: self._tell(News(readings=readings)),
        )

    def _greeting(self) -> News:
        """What a worker has to know before it serves."""
        standings = None if self._breakers is None else self._breakers.all()
        return News(turnover=None if self._membership is None else self._membership.joined(), standings=standings, shut=self._shut)

    def _tell(self, news: News) -> None:
        """Whoever decides about requests hears it, and who settles them hears of nodes."""
        if news.turnover is not None:
            for part in (self._accounting, self._discovery, self._breakers):
                if part is not None:
                    part.turn(news.turnover)
        if self._workers is not None:
            self._workers.tell(news)
        else:
            self._heed(news)

    def _heed(self, news: News) -> None:
        if self._requests is None:
            return
        if news.turnover is not None:
            self._requests.turn(news.turnover)
        if news.standings is not None:
            self._requests.judge(news.standings)
        if news.readings:
            self._requests.hear(news.readings)
        if news.lessons is not None:
            self._requests.adopt(news.lessons)
        if news.shut is not None:
            self._requests.shut(shut=news.shut)
        if news.configuration:
            self._background.run("taking the configuration over", self._reloader.follow(news.configuration))

    async def _observe(self) -> None:
        if self._accounting is not None and self._membership is not None:
            for node_id, (answers, failures) in self._accounting.tallies().items():
                await self._membership.registrar.observe(node_id, answers, failures)

    async def _hear(self, channel: Channel[News], stop: asyncio.Event) -> None:
        """Heed what the accounting process tells; without that process there is no reason to go on."""
        while (news := await channel.receive()) is not None:
            self._heed(news)
        stop.set()

    async def _report(self) -> None:
        if self._channel is not None and self._requests is not None:
            self._channel.send({**self._own_numbers(), **self._requests.to_record()})

    def _own_numbers(self) -> dict[str, Any]:
        planes = [plane.shown() for plane in (self._requests, self._accounting) if plane is not None]
        return added(*planes, {"counts": self._counters.shown()})

    def _unready(self) -> list[str]:
        reasons = [] if self._serving else ["starting or stopping"]
        if not self._link.state.up and OnError(self._reloader.settings.store.on_error) is OnError.CLOSED:
            reasons.append(f"redis is not reachable: {self._link.state.reason}")
        return reasons

    def _rows(self) -> Iterator[MemberForm]:
        """The nodes: those of the configuration, and those that registered."""
        listed = configured(self._reloader.settings, {} if self._scraper is None else self._scraper.latest)
        rows = listed if self._membership is None else chain(listed, self._membership.rows())
        return rows if self._breakers is None else self._breakers.beside(rows)

    def _nodes(self) -> dict[str, Any]:
        stale = self._membership is not None and self._membership.stale
        return {"network": self._reloader.settings.network, "stale": stale, "nodes": list(self._rows())}

    async def _tenants(self, tenant: str) -> dict[str, Any]:
        return await self._tenants_page.shown(self._reloader.settings, tenant, self._shown().get("queue", {}).get("by_tenant", {}))

    def _remember(self, report: dict[str, Any]) -> None:  # a worker is gone
        self._former = added(self._former, kept_of(report))

    def _metrics(self) -> Iterator[bytes]:
        return iter(()) if self._accounts is None else slices(self._accounts.families())

    def _standing(self) -> Iterator[Family | None]:
        """How everything stands, as metrics; None: others may go first."""
        shown = self._shown()
        yield from request_families(shown)
        yield from state_families(shown, ready=not self._unready())
        yield from node_families(self._rows(), stale=self._membership is not None and self._membership.stale)

    def _status(self) -> dict[str, object]:
        return {**self._shown(), "membership": self._nodes()}

    def _shown(self) -> dict[str, Any]:
        """What the admin page shows but for the nodes."""
        settings = self._reloader.settings
        workers: dict[str, object] = {}
        numbers = self._own_numbers()
        if self._workers is not None:
            workers = {"workers": {"configured": settings.gateway.workers, "restarts": self._workers.restarts}}
            numbers = added(numbers, self._former, *self._workers.reports)
        return {
            "configuration": {"file": settings.file, "fingerprint": settings.fingerprint, "rejected_successor": self._reloader.problem},
            "limits": self._ledger.state,
            "redis": self._link.state,
            "breakers": {} if self._breakers is None else self._breakers.shown(),
            **({} if self._discovery is None else self._discovery.shown()),
            **({} if self._accounts is None else self._accounts.shown()),
            **workers,
            **numbers,
        }


def _listen_text(address: ListenAddress) -> str:
    return f"unix:{address.path}" if isinstance(address, UnixSocket) else str(Endpoint(address.host, address.port))

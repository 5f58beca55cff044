"""The role `serve`: the sidecar beside Envoy, in one process or in several. Starts its parts, and takes them down in order.

Rule: it goes down the way that loses nothing: not serving -> no new streams -> open ones end -> what they cost is settled -> gone.

With one worker one process decides and keeps the accounts. With more, this process keeps the accounts and the admin port, and starts a
worker process per socket that decides; it tells them what answers have taught, and they tell it what they do.
"""

import asyncio
import gc
import logging
import signal
import socket
from typing import Any

from din_extproc.admit.reservation import OutputHistory
from din_extproc.control.topology import Address, UnixSocket
from din_extproc.domain.node import Endpoint
from din_extproc.edge.background import Background
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import HealthService
from din_extproc.edge.process.channel import MessageChannel
from din_extproc.edge.process.workers import WorkerPool
from din_extproc.edge.redis.guard import OnError
from din_extproc.edge.registry.catalog_source import CatalogSource
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.edge.tls import TlsAddress
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.roles.serve.accounting_service import AccountingService
from din_extproc.roles.serve.admin_server import AdminServer
from din_extproc.roles.serve.config_reloader import ConfigReloader
from din_extproc.roles.serve.ledger import ledger
from din_extproc.roles.serve.options import ServeOptions
from din_extproc.roles.serve.state_metrics import added, kept_of
from din_extproc.roles.serve.worker import Worker
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_TELL_S = 0.5
_LAST_WORDS_S = 2.0
_TRANSPORTS: dict[str, type[H2Server | GrpcioServer]] = {"wire": H2Server, "grpcio": GrpcioServer}


class GatewayProcess:
    """One process of a sidecar."""

    def __init__(self, settings: Settings, options: ServeOptions, source: CatalogSource) -> None:
        self._options = options
        self._serving = False
        self._background = Background()
        self._counters = DecisionCounters()
        self._former: dict[str, Any] = {}
        """What workers that are gone have counted."""
        self._reloader = ConfigReloader(settings, self._use, source)
        decides = options.worker is not None or settings.gateway.workers == 1
        self._link, self._ledger = ledger(settings, decides=decides)
        self._channel: MessageChannel[WorkerUpdate] | None = None
        self._workers: WorkerPool[dict[str, Any]] | None = None
        self._decider: Worker | None = None
        self._keeper: AccountingService | None = None
        self._pages: AdminServer | None = None
        transport = _TRANSPORTS[options.transport]
        if decides:
            self._decider = Worker(settings, self._link, self._ledger, self._background, self._counters)
        if options.worker is None:
            self._keeper = self._make_keeper(settings, transport)
            self._pages = AdminServer(
                reloader=self._reloader,
                link=self._link,
                ledger=self._ledger,
                keeper=self._keeper,
                numbers=self._numbers,
                unready=self._unready,
            )
            if self._decider is None:
                count, drain_s = settings.gateway.workers, options.drain_s
                greeting, take = self._keeper.greeting, self._keeper.take
                self._workers = WorkerPool(
                    count=count,
                    command=options.worker_command,
                    expected=dict[str, Any],
                    grace_s=drain_s,
                    greeting=greeting,
                    farewell=self._remember,
                    heard=take,
                )
        services = [service for half in (self._decider, self._keeper) if half is not None for service in half.services]
        self._health = HealthService(*(service.name for service in services))
        self._server = transport((*services, self._health), max_body_bytes=settings.body_limit)

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

    def _make_keeper(self, settings: Settings, transport: type[H2Server | GrpcioServer]) -> AccountingService:
        if self._decider is None:
            gauges, outputs = TokenCalibrators(settings.routes.preferred), OutputHistory()
        else:
            gauges, outputs = self._decider.plane.gauges, self._decider.plane.outputs
        return AccountingService(
            settings=settings,
            link=self._link,
            ledger=self._ledger,
            background=self._background,
            transport=transport,
            counters=self._counters,
            gauges=gauges,
            outputs=outputs,
            standing=lambda: iter(()) if self._pages is None else self._pages.standing(),
            tell=self._tell,
        )

    async def _start(self, stop: asyncio.Event) -> None:
        settings = self._reloader.settings
        if not await self._link.start():
            _log.warning("redis: %s; limits follow `on_error: %s`", self._link.state.reason, settings.store.on_error)
        await self._ledger.start()
        if self._keeper is not None:
            self._keeper.open()
        await self._use(settings)
        if self._options.channel is not None:
            self._channel = await MessageChannel.over(socket.socket(fileno=self._options.channel), WorkerUpdate)
            self._heed(await self._channel.receive() or WorkerUpdate())
        if self._decider is not None:
            await self._decider.start()
        look = self._reloader.look if self._channel is None else self._reloader.follow
        self._background.every(_LOOK_S, "looking at the configuration", look)
        if self._keeper is not None:
            await self._keeper.start()
            self._background.every(_TELL_S, "telling what was learned", self._teach)
        addresses = self._addresses(settings)
        await self._server.start(*addresses)
        _log.info("listening on %s", ", ".join(map(str, addresses)))
        if self._keeper is not None:
            await self._keeper.listen(settings)
        if self._workers is not None:
            await self._workers.start()
        if self._pages is not None:
            await self._pages.start(settings)
        if self._channel is not None:
            self._background.run("hearing news", self._hear(self._channel, stop))
            self._background.every(_TELL_S, "reporting", self._report)
            await self._report()
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked at again by the collector
        self._switch(serving=True)
        _log.info("serving configuration %s", settings.fingerprint)

    async def _stop(self) -> None:
        self._switch(serving=False)
        if self._keeper is not None:
            await self._keeper.leave()
        if self._workers is not None:
            await self._workers.stop()
        await self._server.stop(self._options.drain_s)
        await self._background.quiet(_LAST_WORDS_S)
        if self._keeper is not None:
            self._pass_on()
            await self._keeper.close()
        if self._channel is not None:
            await self._report()
            self._channel.close()
        await self._background.close()
        if self._decider is not None:
            await self._decider.close()
        if self._pages is not None:
            await self._pages.stop()
        await self._ledger.close()
        await self._link.close()
        _log.info("stopped")

    def _addresses(self, settings: Settings) -> list[str | TlsAddress]:
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
        if self._keeper is not None:
            await self._keeper.publish(settings)
        if self._decider is not None:
            await self._decider.use(settings)
        if self._keeper is not None:
            self._keeper.use(settings)
        if self._workers is not None:
            self._workers.tell(WorkerUpdate(configuration=settings.fingerprint))

    def _replace_workers(self) -> None:
        if self._workers is not None:
            self._background.run("replacing workers", self._workers.replace())

    async def _teach(self) -> None:
        if self._keeper is not None:
            self._pass_on()
            self._keeper.teach()

    def _pass_on(self) -> None:
        """What this process has admitted is recorded."""
        if self._decider is not None and self._keeper is not None:
            self._keeper.take(self._decider.plane.to_record())

    def _tell(self, news: WorkerUpdate) -> None:
        """Whoever decides about requests hears it."""
        if self._workers is not None:
            self._workers.tell(news)
        else:
            self._heed(news)

    def _heed(self, news: WorkerUpdate) -> None:
        if self._decider is not None:
            self._decider.heed(news)
        if news.configuration:
            self._background.run("taking the configuration over", self._reloader.follow(news.configuration))

    async def _hear(self, channel: MessageChannel[WorkerUpdate], stop: asyncio.Event) -> None:
        """Heed what the accounting process tells; without that process there is no reason to go on."""
        while (news := await channel.receive()) is not None:
            self._heed(news)
        stop.set()

    async def _report(self) -> None:
        if self._channel is not None and self._decider is not None:
            self._channel.send({**self._own_numbers(), **self._decider.plane.to_record()})

    def _remember(self, report: dict[str, Any]) -> None:  # a worker is gone
        self._former = added(self._former, kept_of(report))

    def _own_numbers(self) -> dict[str, Any]:
        decided = {} if self._decider is None else self._decider.plane.shown()
        kept = {} if self._keeper is None else self._keeper.numbers()
        return added(decided, kept, {"counts": self._counters.shown()})

    def _numbers(self) -> dict[str, Any]:
        """What all processes of the sidecar count."""
        if self._workers is None:
            return self._own_numbers()
        numbers = added(self._own_numbers(), self._former, *self._workers.reports)
        return {"workers": {"configured": self._reloader.settings.gateway.workers, "restarts": self._workers.restarts}, **numbers}

    def _unready(self) -> list[str]:
        reasons = [] if self._serving else ["starting or stopping"]
        if not self._link.state.up and OnError(self._reloader.settings.store.on_error) is OnError.CLOSED:
            reasons.append(f"redis is not reachable: {self._link.state.reason}")
        if self._keeper is not None and self._keeper.shut:
            reasons.append(self._keeper.shut)
        return reasons


def _listen_text(address: Address) -> str:
    return f"unix:{address.path}" if isinstance(address, UnixSocket) else str(Endpoint(address.host, address.port))

"""One process of a sidecar: it owns the parts, starts them and stops them in an order that loses nothing.

With one worker, one process holds the `Worker` and the `AccountingService`. With more, this process holds the accounting service,
the admin server and a `WorkerPool`; each worker process holds a `Worker` and a channel. The accounting side sends `WorkerUpdate`s,
workers send reports: their numbers, admissions to record and double checks.

Rule: shutdown goes not serving -> no new streams -> open ones end -> they are settled -> exit.
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
from din_extproc.edge.grpc.services import AccessLogService, HealthService
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
from din_extproc.roles.serve.ledger import make_ledger
from din_extproc.roles.serve.options import ServeOptions
from din_extproc.roles.serve.state_metrics import lasting_counters, sum_numbers
from din_extproc.roles.serve.worker import Worker
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_RELOAD_S = 1.0
_REPORT_S = 0.5
_QUIET_S = 2.0
_COLLECT_AFTER = 50_000
"""Allocations between garbage collections: a request makes some 150 and leaves no cycles, so the default of 700 pauses every fifth one."""
_TRANSPORTS: dict[str, type[H2Server | GrpcioServer]] = {"wire": H2Server, "grpcio": GrpcioServer}


class GatewayProcess:
    """One process of a sidecar. `run` returns after a signal."""

    def __init__(self, settings: Settings, options: ServeOptions, source: CatalogSource) -> None:
        self._options = options
        self._serving = False
        self._background = Background()
        self._counters = DecisionCounters()
        self._ended_workers: dict[str, Any] = {}
        """The counters of workers that have ended."""
        self._reloader = ConfigReloader(settings, self._reload, source)
        decides = options.worker is not None or settings.gateway.workers == 1
        self._link, self._ledger = make_ledger(settings, decides=decides)
        self._channel: MessageChannel[WorkerUpdate] | None = None
        """A worker process's end of the channel to the accounting process."""
        self._pool: WorkerPool[dict[str, Any]] | None = None
        self._worker: Worker | None = None
        self._accounting: AccountingService | None = None
        self._admin: AdminServer | None = None
        transport = _TRANSPORTS[options.transport]
        if decides:
            self._worker = Worker(
                settings, self._link, self._ledger, self._background, counters=self._counters, follow_config=self._follow_config
            )
        if options.worker is None:
            self._accounting = self._make_accounting(settings, transport)
            self._admin = AdminServer(
                self._reloader,
                self._link,
                self._ledger,
                self._accounting,
                numbers=self._collect_numbers,
                unready=self._list_unready_reasons,
            )
            if self._worker is None:
                self._pool = WorkerPool(
                    count=settings.gateway.workers,
                    command=options.worker_command,
                    expected=dict[str, Any],
                    grace_s=options.drain_s,
                    greeting=self._accounting.initial_update,
                    farewell=self._keep_counters,
                    on_report=self._accounting.observers.on_report,
                )
        services = [] if self._worker is None else self._worker.services
        self._health = HealthService(
            *(service.name for service in services), *(() if self._accounting is None else (AccessLogService.name,))
        )
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
        loop.add_signal_handler(signal.SIGHUP, self._reloader.force_reload)
        loop.add_signal_handler(signal.SIGUSR1, self._replace_workers)
        try:
            await self._start(stop)
            await stop.wait()
        finally:
            await self._stop()

    def _make_accounting(self, settings: Settings, transport: type[H2Server | GrpcioServer]) -> AccountingService:
        """Make the accounting service. Beside a worker it shares what the worker learns."""
        plane = None if self._worker is None else self._worker.plane
        return AccountingService(
            settings=settings,
            link=self._link,
            ledger=self._ledger,
            background=self._background,
            transport=transport,
            counters=self._counters,
            calibrators=TokenCalibrators(settings.routes.preferred_model) if plane is None else plane.gauges,
            outputs=OutputHistory() if plane is None else plane.outputs,
            collect_state=lambda: iter(()) if self._admin is None else self._admin.collect_state_metrics(),
            send=self._send_update,
        )

    async def _start(self, stop: asyncio.Event) -> None:
        settings = self._reloader.settings
        if not await self._link.start():
            _log.warning("redis: %s; limits follow `on_error: %s`", self._link.state.reason, settings.store.on_error)
        await self._ledger.start()
        if self._accounting is not None:
            self._accounting.observers.start(self._background)
        await self._reload(settings)
        if self._options.channel is not None:
            self._channel = await MessageChannel.over(socket.socket(fileno=self._options.channel), WorkerUpdate)
            self._send_update(await self._channel.receive() or WorkerUpdate())
        if self._worker is not None:
            await self._worker.start()
        reload = self._reloader.reload_if_changed if self._channel is None else self._reloader.follow
        self._background.every(_RELOAD_S, "checking the configuration for changes", reload)
        if self._accounting is not None:
            await self._accounting.start()
        addresses = self._list_addresses(settings)
        await self._server.start(*addresses)
        _log.info("listening on %s", ", ".join(map(str, addresses)))
        if self._accounting is not None:
            await self._accounting.listen_for_logs(settings)
            await self._accounting.listen(settings)
        if self._pool is not None:
            await self._pool.start()
        if self._admin is not None:
            await self._admin.start(settings)
        if self._channel is not None:
            self._background.run("receiving updates from the accounting process", self._receive_updates(self._channel, stop))
        if self._worker is not None:
            self._background.every(_REPORT_S, "reporting to the accounting process", self._report)
            await self._report()
        gc.collect()
        gc.freeze()  # objects that live as long as the process are not scanned again
        gc.set_threshold(_COLLECT_AFTER)
        self._set_serving(serving=True)
        _log.info("serving configuration %s", settings.fingerprint)

    async def _stop(self) -> None:
        self._set_serving(serving=False)
        if self._accounting is not None:
            await self._accounting.leave_network()
        if self._pool is not None:
            await self._pool.stop()
        await self._server.stop(self._options.drain_s)
        if self._accounting is not None:
            await self._accounting.stop_logs()
        await self._background.quiet(_QUIET_S)
        await self._report()
        if self._accounting is not None:
            await self._accounting.close()
        if self._channel is not None:
            self._channel.close()
        await self._background.close()
        if self._worker is not None:
            await self._worker.close()
        if self._admin is not None:
            await self._admin.stop()
        await self._ledger.close()
        await self._link.close()
        _log.info("stopped")

    def _list_addresses(self, settings: Settings) -> list[str | TlsAddress]:
        """Return the addresses where this process listens for Envoy."""
        gateway = settings.gateway
        workers = [secured(_listen_text(address), gateway.ext_proc.tls, settings.folder) for address in gateway.worker_addresses]
        if self._options.worker is not None:
            return [workers[self._options.worker]]
        return workers if self._pool is None else []

    def _set_serving(self, *, serving: bool) -> None:
        self._serving = serving
        self._health.set_serving(serving=serving)

    async def _reload(self, settings: Settings) -> None:
        """Use this configuration: Envoys know its pools before a worker decides by it."""
        if self._accounting is not None:
            await self._accounting.publish(settings)
        if self._worker is not None:
            await self._worker.reload(settings)
        if self._accounting is not None:
            self._accounting.reload(settings)
        if self._pool is not None:
            self._pool.broadcast(WorkerUpdate(configuration=settings.fingerprint))

    def _follow_config(self, fingerprint: str) -> None:
        self._background.run("taking over the configuration", self._reloader.follow(fingerprint))

    def _replace_workers(self) -> None:
        if self._pool is not None:
            self._background.run("replacing workers", self._pool.replace())

    def _send_update(self, update: WorkerUpdate) -> None:
        """Send an update to the worker of this process, or to all worker processes."""
        if self._pool is not None:
            self._pool.broadcast(update)
        elif self._worker is not None:
            self._worker.apply(update)

    async def _receive_updates(self, channel: MessageChannel[WorkerUpdate], stop: asyncio.Event) -> None:
        """Apply updates from the accounting process until it has ended; then stop this worker process."""
        while (update := await channel.receive()) is not None:
            self._send_update(update)
        stop.set()

    async def _report(self) -> None:
        """Hand admissions and double checks of this process's worker to the accounting service, with numbers if it is another process."""
        if self._worker is None:
            return
        if self._channel is not None:
            self._channel.send({**self._collect_own_numbers(), **self._worker.plane.take_records()})
        elif self._accounting is not None:
            self._accounting.observers.on_report(self._worker.plane.take_records())

    def _keep_counters(self, report: dict[str, Any]) -> None:
        """Add the counters of a worker that has ended."""
        self._ended_workers = sum_numbers(self._ended_workers, lasting_counters(report))

    def _collect_own_numbers(self) -> dict[str, Any]:
        """Return the numbers of this process for the admin page."""
        decided = {} if self._worker is None else self._worker.plane.snapshot()
        accounted = {} if self._accounting is None else self._accounting.plane.snapshot()
        return sum_numbers(decided, accounted, {"counts": self._counters.snapshot()})

    def _collect_numbers(self) -> dict[str, Any]:
        """Return the sum of the numbers of all processes."""
        if self._pool is None:
            return self._collect_own_numbers()
        numbers = sum_numbers(self._collect_own_numbers(), self._ended_workers, *self._pool.reports)
        return {"workers": {"configured": self._reloader.settings.gateway.workers, "restarts": self._pool.restarts}, **numbers}

    def _list_unready_reasons(self) -> list[str]:
        """Return the reasons why the sidecar is not ready."""
        reasons = [] if self._serving else ["starting or stopping"]
        if not self._link.state.up and OnError(self._reloader.settings.store.on_error) is OnError.CLOSED:
            reasons.append(f"redis is not reachable: {self._link.state.reason}")
        if self._accounting is not None and self._accounting.observers.blocked_reason:
            reasons.append(self._accounting.observers.blocked_reason)
        return reasons


def _listen_text(address: Address) -> str:
    return f"unix:{address.path}" if isinstance(address, UnixSocket) else str(Endpoint(address.host, address.port))

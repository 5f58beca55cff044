"""The role `serve`: the sidecar beside Envoy. Puts the rooms together, starts them, and takes them down in order.

Rule: it goes down the way that loses nothing: not serving -> no new streams -> open ones end -> what they cost is settled -> gone.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Literal

import uvloop
from msgspec import Struct

from din_extproc.admit.local import LocalLedger
from din_extproc.admit.reservation import OutputHistory
from din_extproc.control.topology import Address as ListenAddress
from din_extproc.control.topology import UnixSocket
from din_extproc.domain.node import Endpoint
from din_extproc.domain.usage import ExchangeRecord
from din_extproc.edge.admin_http import AdminServer
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.counters import Counters
from din_extproc.edge.h2_server import H2Server
from din_extproc.edge.h2_services import AccessLogService, ExtProcService, HealthService
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.guard import PRESENCE, GuardedLedger, OnError
from din_extproc.edge.redis.ledger import SCRIPTS, RedisLedger
from din_extproc.edge.redis.link import Link
from din_extproc.flow.gauges import Gauges
from din_extproc.flow.place import Placer
from din_extproc.flow.request import Desk
from din_extproc.flow.settle import Settler
from din_extproc.flow.trace import TraceIds
from din_extproc.observe.accesslog import records
from din_extproc.roles.reload import Reloader
from din_extproc.roles.view import load_tokenizers, make_view, node_names, node_number
from din_extproc.schedule.load import Load
from din_extproc.settings.load import load
from din_extproc.settings.problems import Rejected
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_RETRY_S = 0.5
_LAST_WORDS_S = 2.0
_SEED_BITS = 64
_TRANSPORTS = {"wire": H2Server}


class ServeOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc serve`."""

    config: Path
    transport: Literal["wire", "grpcio"] = "wire"
    """Our own HTTP/2, or grpcio's: the same services on both."""
    drain_s: float = 20.0
    """How long open exchanges may go on after SIGTERM."""


def run(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; 1 when the configuration is refused or an address is taken."""
    settings = load(options.config, os.environ)
    if isinstance(settings, Rejected):
        print(settings)  # noqa: T201 - for the person who starts it; nothing runs yet
        return 1
    for warning in settings.warnings:
        _log.warning("%s", warning)
    try:
        uvloop.run(Gateway(settings, options).run())
    except OSError as error:
        _log.error("can't listen: %s", error)
        return 1
    return 0


class Gateway:
    """One sidecar process: everything between Envoy's streams and the counters."""

    def __init__(self, settings: Settings, options: ServeOptions) -> None:
        self._options = options
        self._serving = False
        self._clock = SystemClock()
        self._background = Background()
        self._counters = Counters()
        self._reloader = Reloader(settings, self._use)
        self._link, self._ledger = _ledger(settings, self._clock)
        self._nodes = node_names(settings)
        view = make_view(settings, {})
        gauges = Gauges(view.table.preferred)
        self._desk = Desk(
            view=view,
            ledger=self._ledger,
            placer=Placer(Load()),
            gauges=gauges,
            outputs=OutputHistory(),
            ids=TraceIds(node_number(settings), secrets.randbits(_SEED_BITS)),
            clock=self._clock,
            watcher=self._counters,
            start=self._background.start,
        )
        self._settler = Settler(self._ledger, gauges, self._desk.outputs, self._counters)
        ext_proc, access_log = ExtProcService(self._desk), AccessLogService(self._access_logs)
        self._health = HealthService(ext_proc.name, access_log.name)
        self._server = _TRANSPORTS[options.transport]((ext_proc, access_log, self._health), max_body_bytes=view.body_limit)
        self._admin = AdminServer(self._status, self._unready)

    async def run(self) -> None:
        """Serve until a signal.

        Raises:
            OSError: an address is taken.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloader.demand)
        try:
            await self._start()
            await stop.wait()
        finally:
            await self._stop()

    async def _start(self) -> None:
        settings = self._reloader.settings
        if not await self._link.start():
            _log.warning(
                "redis %s: %s; limits follow `on_error: %s`", settings.store.address, self._link.state.reason, settings.store.on_error
            )
        await self._ledger.start()
        await self._use(settings)
        addresses = [_listen_text(at) for at in (*settings.gateway.worker_addresses, settings.gateway.access_log.address)]
        await self._server.start(*addresses)
        _log.info("listening on %s", ", ".join(addresses))
        admin = settings.gateway.admin.address
        await self._admin.start(admin.host, admin.port)
        self._background.every(_LOOK_S, "looking at the configuration", self._reloader.look)
        self._background.every(_RETRY_S, "settling what waits", self._retry)
        self._background.every(self._desk.lease_ms / 3000, "renewing leases", self._renew)
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked at again by the collector
        self._switch(serving=True)
        _log.info("serving configuration %s", settings.fingerprint)

    async def _stop(self) -> None:
        self._switch(serving=False)
        await self._server.stop(self._options.drain_s)
        await self._background.quiet(_LAST_WORDS_S)
        await self._settler.retry()
        await self._background.close()
        await self._admin.stop()
        await self._ledger.close()
        await self._link.close()
        _log.info("stopped")

    def _switch(self, *, serving: bool) -> None:
        self._serving = serving
        self._health.switch(serving=serving)

    async def _use(self, settings: Settings) -> None:
        view = make_view(settings, await load_tokenizers(settings))
        self._nodes = node_names(settings)
        self._desk.change(view)

    def _access_logs(self, message: bytes) -> None:
        try:
            finished = records(message, self._nodes)
        except ValueError:
            _log.warning("an access log message of %d bytes could not be read", len(message))
            return
        for record in finished:
            self._background.start(self._settle(record))

    async def _settle(self, record: ExchangeRecord) -> None:
        await self._settler.settle(record)

    async def _retry(self) -> None:
        if self._settler.waiting:
            await self._settler.retry()

    async def _renew(self) -> None:
        for request_id, tenant in list(self._desk.live.items()):
            self._background.start(self._ledger.renew(tenant, request_id, self._desk.lease_ms))

    def _unready(self) -> list[str]:
        reasons = []
        if not self._serving:
            reasons.append("starting or stopping")
        if not self._link.state.up and OnError(self._reloader.settings.store.on_error) is OnError.CLOSED:
            reasons.append(f"redis is not reachable: {self._link.state.reason}")
        return reasons

    def _status(self) -> dict[str, object]:
        settings = self._reloader.settings
        cache = self._desk.placer.cache
        return {
            "configuration": {"file": settings.file, "fingerprint": settings.fingerprint, "rejected_successor": self._reloader.problem},
            "limits": self._ledger.state,
            "redis": self._link.state,
            "exchanges": {
                "open": len(self._desk.live),
                "unsettled": self._settler.waiting,
                "given_up": self._settler.dropped,
                "unknown": self._settler.unknown,
            },
            "counts": self._counters.shown(),
            "route_cache": {"hits": cache.hits, "misses": cache.misses},
            "nodes": {node: {"tokens_in_use": tokens} for node, tokens in self._desk.placer.in_use().items()},
        }


def _ledger(settings: Settings, clock: SystemClock) -> tuple[Link, GuardedLedger]:
    """The counters in Redis, guarded by the outage policy."""
    address = settings.store.address

    async def locate() -> Address:
        return address

    link = Link(locate, (*SCRIPTS, PRESENCE), timeout_ms=settings.store.timeout_ms)
    replica = f"{socket.gethostname()}:{os.getpid()}"
    shared, local = RedisLedger(link), LocalLedger(clock.monotonic_ms)
    return link, GuardedLedger(link, shared, local, OnError(settings.store.on_error), replica)


def _listen_text(address: ListenAddress | Endpoint) -> str:
    return f"unix:{address.path}" if isinstance(address, UnixSocket) else str(Endpoint(address.host, address.port))

"""The role of `node`: the agent beside one engine, and the ext_proc server of the Envoy in front of it, if there is one.

Rule: weights are verified before the node registers. Shutdown loses nothing: report draining -> requests end -> deregister -> exit.
"""

import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from threading import Event
from zlib import crc32

import aiohttp
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from din_extproc.domain.membership import Registration
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.grpc.ext_proc import ExtProcService
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.services import HealthService
from din_extproc.edge.http.node_health import health_port
from din_extproc.edge.node.agent import EnvoyLoad, NodeAgent
from din_extproc.edge.node.batch_gate import BatchGate
from din_extproc.edge.node.engine_probe import EngineProbe
from din_extproc.edge.node.weights import WeightsMismatch, WeightsUnreadable, verify_weights
from din_extproc.edge.registry.client import RegistryClient
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.edge.tls import CertificateUnusable
from din_extproc.flow.node_handler import NodeHandlerFactory
from din_extproc.flow.trace import TraceIds
from din_extproc.settings.gateway import ExtProcSection
from din_extproc.settings.node import NodeSettings, load_node
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LAST_STREAMS_S = 5.0
_SEED_BITS = 64


class NodeOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc node`."""

    config: Path


class NodeNotFit(Exception):  # noqa: N818 - it says what the node is
    """The node can't register; the message says why."""


def run(options: NodeOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; 1 when the configuration or the weights are refused, or an address is taken."""
    settings = load_node(options.config, os.environ)
    if isinstance(settings, ConfigRejected):
        print(settings, file=sys.stderr)  # noqa: T201 - the log is for running processes
        return 1
    for warning in settings.warnings:
        _log.warning("%s", warning)
    try:
        token = "" if settings.token_file is None else settings.token_file.read_text().strip()
        uvloop.run(NodeProcess(settings, token).run())
    except NodeNotFit as error:
        _log.error("node not registered: %s", error)
        return 1
    except (OSError, CertificateUnusable) as error:
        _log.error("start failed: %s", error)
        return 1
    return 0


class NodeProcess:
    """The process of one node. `run` returns after a signal."""

    def __init__(self, settings: NodeSettings, token: str) -> None:
        self._settings = settings
        self._token = token
        self._background = Background()
        window = settings.window
        self._gate = None if window is None else BatchGate(window)
        self._handler_factory = NodeHandlerFactory(
            node=settings.node,
            engine=str(settings.engine_endpoint),
            gate=self._gate,
            ids=TraceIds(crc32(settings.node.id.encode()), secrets.randbits(_SEED_BITS)),
            clock=SystemClock(),
            watcher=DecisionCounters(),
            body_limit=settings.body_limit,
            operations=settings.operations,
        )
        extproc = ExtProcService(self._handler_factory)
        self._health = HealthService(extproc.name)
        self._server = H2Server((extproc, self._health), max_body_bytes=settings.body_limit)
        self._agent: NodeAgent

    async def run(self) -> None:
        """Serve until a signal.

        Raises:
            OSError: an address is taken.
            NodeNotFit: the weights are not those of the catalogue.
        """
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with aiohttp.ClientSession() as session:
            self._agent = self._make_agent(session)
            http = health_port(self._agent.get_health)
            await http.start(secured(str(self._settings.health.address), self._settings.health.tls, self._settings.folder))
            try:
                await self._serve(stop)
            finally:
                await self._background.close()
                await http.stop()
        _log.info("stopped")

    def _make_agent(self, session: aiohttp.ClientSession) -> NodeAgent:
        settings = self._settings
        started_ms = int(SystemClock.wall() * 1000)
        return NodeAgent(
            registration=Registration(
                node=settings.node, engine=settings.engine, network=settings.network, pool=settings.pool, epoch=started_ms
            ),
            engine_url=settings.engine_url,
            served_model=settings.served_model,
            probe=EngineProbe(session, settings.engine, settings.metrics_url, SystemClock.monotonic),
            client=RegistryClient(session, settings.registries, self._token, settings.registry_tls),
            held=None if settings.proxy is None else self._envoy_load,
            all_models=settings.all_models,
        )

    def _envoy_load(self) -> EnvoyLoad:
        return EnvoyLoad(self._handler_factory.in_flight, 0 if self._gate is None else self._gate.held)

    async def _serve(self, stop: asyncio.Event) -> None:
        """Register, send heartbeats and serve ext_proc until a signal, then deregister."""
        proxy = self._settings.proxy
        if proxy is not None:
            await self._server.start(secured(_listen_text(proxy.ext_proc), proxy.ext_proc.tls, self._settings.folder))
            self._health.set_serving(serving=True)
        try:
            if await self._verify(stop):
                self._background.every(_LOOK_S, "probing the engine", self._agent.watch)
                self._background.every(self._settings.heartbeat_s, "sending heartbeats", self._agent.report)
                await self._agent.watch()
                await stop.wait()
                if self._gate is not None:
                    self._gate.open()
                await self._agent.drain("the node stops", self._settings.drain_s)
        finally:
            if proxy is not None:
                self._health.set_serving(serving=False)
                await self._server.stop(_LAST_STREAMS_S)

    async def _verify(self, stop: asyncio.Event) -> bool:
        """Compare the weights with the catalogue; False: a signal came meanwhile."""
        settings, given_up = self._settings, Event()
        if settings.weights is None:
            return True
        self._agent.condition = self._agent.condition.with_reading("verifying the weights", slow=False)
        cache = settings.weights_cache or _user_cache()
        work = asyncio.create_task(asyncio.to_thread(_verify, settings.weights, settings.sha256, cache, given_up))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        given_up.set()
        stopped.cancel()
        sha256 = await work
        if sha256:
            self._agent.on_verified(sha256)
        return bool(sha256)


class _VerificationAbandoned(Exception):  # noqa: N818 - what happened
    """The digest is no longer needed."""


def _verify(path: Path, expected: str, cache: Path, given_up: Event) -> str:
    """Return the weights' digest; "" if it was abandoned.

    Raises:
        NodeNotFit: it is not the catalogue's, or can't be computed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"sha256 of {path}", total=None)

        def progress(done: int, total: int) -> None:
            if given_up.is_set():
                raise _VerificationAbandoned
            bar.update(task, completed=done, total=total)

        try:
            found = verify_weights(path, expected, cache, progress)
        except _VerificationAbandoned:
            return ""
        except WeightsUnreadable as error:
            raise NodeNotFit(str(error)) from error
    if isinstance(found, WeightsMismatch):
        raise NodeNotFit(str(found))
    _log.info("the weights' sha256 is %s%s", found.sha256, "" if expected else "; the catalogue does not say which it should be")
    return found.sha256


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "din-extproc" / "weights.json"


def _listen_text(section: ExtProcSection) -> str:
    return f"unix:{section.socket}" if section.address is None else str(section.address)

"""The node registry of the accounting process: node table, Redis store, channel and servers.

Rule: changes of membership are passed on at once, load readings several times a second; both as differences.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from din_extproc.admit.keys import NodeTokens
from din_extproc.domain.membership import HeartbeatReading, MembershipDelta, NodeState, Registration
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.registry_service import NodeRegistryService
from din_extproc.edge.http.registry import RegistryHttp
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.nodes import NodeStore
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from din_extproc.edge.registry.auth import RegistryAuth
from din_extproc.edge.registry.forms import MemberForm, NodeForm
from din_extproc.edge.registry.registrar import Registrar
from din_extproc.registry.claims import CatalogEntry, Catalogue
from din_extproc.registry.table import NodeEvent, NodeTable
from din_extproc.roles.serve.node_discovery import FoundNode
from din_extproc.settings.registry import RegistryListenSection
from din_extproc.settings.settings import Settings
from din_extproc.settings.tls import secured

_log = logging.getLogger(__name__)

_LONGEST_MESSAGE = 64 * 1024
_SYNC_S = 2.0
_BETWEEN_DOUBTS_S = 0.02
_READINGS_S = 0.1
_BETWEEN_DELTAS_S = 0.05
"""Minimum pause between two changes of membership: each makes workers rank nodes again."""
_LOOKS_PER_DEATH = 24
_STOP_S = 2.0


class RegistryService:
    """The registry of this replica.

    Args:
        settings: A configuration with a `gateway.registry` section.
        section: That section.
        runner: Runs Redis commands.
        server: The gRPC server to use.
        background: Runs periodic tasks.
        on_membership: Called with the nodes that joined or left.
        on_readings: Called with the latest heartbeats, by node id.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        section: RegistryListenSection,
        runner: Runner,
        server: type[H2Server | GrpcioServer],
        background: Background,
        on_membership: Callable[[MembershipDelta], None],
        on_readings: Callable[[dict[str, HeartbeatReading]], None],
    ) -> None:
        self._section = section
        self._background = background
        self._on_membership = on_membership
        self._on_readings = on_readings
        self._settings = settings
        self._flushing = False
        self._flushed_at = 0.0
        store = NodeStore(runner, settings.network)
        self.registrar = Registrar(
            NodeTable(settings.pools, _make_catalogue(settings)),
            store,
            network=settings.network,
            heartbeat_s=section.heartbeat_s,
            dead_after_s=section.dead_after_s,
        )
        self.registrar.watchers.add(self._schedule_delta)
        self._auth = RegistryAuth(
            self.registrar,
            NodeTokens(settings.node_tokens),
            settings.node_reaches,
            bound=section.bind_certificates,
            own=settings.own_addresses,
        )
        self._subscription = ChannelSubscription(
            make_locator(settings.store.url.get_secret_value()), store.channel, self.registrar.on_message, self.registrar.on_subscribed
        )
        self._grpc = server((NodeRegistryService(self._auth, background.start),), max_body_bytes=_LONGEST_MESSAGE)
        self._http = RegistryHttp(self._auth).port

    async def start(self) -> None:
        """Read the node table and open the ports.

        Raises:
            OSError: an address is taken.
        """
        await self.registrar.sync()
        self._background.run("receiving node changes", self._subscription.run())
        self._background.run("re-reading doubtful nodes", self._resync_suspects())
        self._background.every(_SYNC_S, "synchronizing the node table", self.registrar.sync)
        self._background.every(self._section.dead_after_s / _LOOKS_PER_DEATH, "marking silent nodes dead", self.registrar.sweep)
        self._background.every(_READINGS_S, "passing on load readings", self._pass_readings)
        if self._section.address is not None:
            where = secured(str(self._section.address), self._section.tls, self._settings.folder)
            await self._grpc.start(where)
            _log.info("node registry listening on %s (gRPC)", where)
        if self._section.http_address is not None:
            where = secured(str(self._section.http_address), self._section.tls, self._settings.folder)
            await self._http.start(where)
            _log.info("node registry listening on %s (HTTP)", where)

    async def stop(self) -> None:
        """Close the ports."""
        await self._http.stop()
        await self._grpc.stop(_STOP_S)

    def reload(self, settings: Settings) -> None:
        """Use the pools, catalogue and tokens of this configuration."""
        self._settings = settings
        self._auth.tokens, self._auth.reaches = NodeTokens(settings.node_tokens), settings.node_reaches
        registrar = self.registrar
        self._schedule_delta(registrar.table.reload(settings.pools, _make_catalogue(settings), registrar.get_now()))

    def rows(self) -> Iterator[MemberForm]:
        """Yield every registered node for the admin page."""
        registrar = self.registrar
        now = registrar.get_now()
        for member in registrar.get_members():
            yield MemberForm.of(member, registrar.table.get_pools(member.registration.node.id), now)

    def _schedule_delta(self, _events: list[NodeEvent]) -> None:
        """Schedule one delta for all changes of this event loop turn; in a storm of changes, one per pause."""
        if not self._flushing:
            self._flushing = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._flushed_at + _BETWEEN_DELTAS_S), self._pass_delta)

    def _pass_delta(self) -> None:
        self._flushing = False
        self._flushed_at = asyncio.get_running_loop().time()
        delta = self.registrar.table.take_changes()
        if delta is not None:
            self._on_membership(delta)

    async def _pass_readings(self) -> None:
        readings = self.registrar.take_readings()
        if readings:
            self._on_readings(readings)

    async def _resync_suspects(self) -> None:
        while True:
            await self.registrar.doubt.wait()
            await self.registrar.sync()
            await asyncio.sleep(_BETWEEN_DOUBTS_S)


def configured_rows(
    settings: Settings,
    found: Mapping[str, Iterable[FoundNode]],
    readings: Mapping[str, HeartbeatReading],
    trust: Callable[[str], float],
) -> Iterator[MemberForm]:
    """Yield the nodes that are listed or were found, with the latest readings of their metrics pages, and the trust in them."""
    now = SystemClock.monotonic()
    for pool in settings.pools:
        listed = ((node, NodeState.READY, "listed in the configuration") for node in pool.nodes)
        others = ((each.node, each.state, f"found at {each.source}") for each in found.get(pool.name, ()))
        for node, state, reason in chain(listed, others):
            reading = readings.get(node.id)
            yield MemberForm(
                node=NodeForm.of(Registration(node=node, engine=pool.engine, network=settings.network, pool=pool.name)),
                state=state,
                trust=round(trust(node.id), 3),
                reasons=(reason,),
                beat=None if reading is None else reading.beat,
                beat_age_s=None if reading is None else round(now - reading.at, 3),
                stale=False,
                pools=(pool.name,),
            )


def _make_catalogue(settings: Settings) -> Catalogue:
    found: dict[str, dict[str, CatalogEntry]] = {}
    for model in settings.catalog.models:
        described = CatalogEntry(model.dtype, model.max_seq_len, model.sha256)
        found.setdefault(model.model_name, {})[model.model_version] = described
    return found

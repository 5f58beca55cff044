"""What running Envoys are told of pools, nodes and routes, as the configuration and the membership change.

Rule: a new pool is known to the Envoys before a request is sent there, and an old one stays until the last request that was sent there
must have arrived. Nodes of which none is left are such a pool; any other node goes at once.
"""

import asyncio
import contextlib
import logging

from din_extproc.control.snapshot import Assigner, Blueprint, Snapshot
from din_extproc.domain.membership import MembershipDelta
from din_extproc.domain.node import Node
from din_extproc.edge.background import Background
from din_extproc.edge.grpc.grpcio_server import GrpcioServer
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.xds_service import DiscoveryService
from din_extproc.edge.tls import TlsAddress
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""How long a change waits for the answers of all Envoys, which look at new nodes before they answer; one that is slow must not keep it
from the others."""
_LINGER_S = 5.0
_MESSAGE_BYTES = 16 << 20


class XdsControlPlane:
    """The control plane of one sidecar.

    Args:
        transport: What carries it.
        background: Runs what is to be done later.
    """

    def __init__(self, transport: type[H2Server | GrpcioServer], background: Background) -> None:
        self._transport = transport
        self._background = background
        self._assigner = Assigner()
        self._blueprint: Blueprint | None = None
        self._members = PoolMembership.of(())
        self._pools: frozenset[str] = frozenset()
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._service: DiscoveryService | None = None
        self._server: H2Server | GrpcioServer | None = None

    async def start(self, address: str | TlsAddress) -> None:
        """Serve what was last used, on `host:port`.

        Raises:
            OSError: the address is taken.
            Unusable: certificates can't be used.
        """
        snapshot = self._snapshot()
        if snapshot is None:
            raise ValueError("there is nothing to serve yet")
        self._service = DiscoveryService(snapshot)
        self._server = self._transport((self._service,), max_body_bytes=_MESSAGE_BYTES)
        await self._server.start(address)

    async def stop(self, grace_s: float) -> None:
        """Say goodbye to the Envoys."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def reload(self, settings: Settings) -> None:
        """Serve this configuration. Returns when the Envoys that are connected know its pools, or have had the time to."""
        made = await asyncio.get_running_loop().run_in_executor(None, _blueprint, settings)
        former = self._blueprint
        self._blueprint = kept = made if former is None else made.keeping(former)
        self._pools = frozenset(pool.name for pool in settings.pools)
        self._members = members = self._members.under(settings.pools)
        self._nodes.update({pool: _bridged(self._nodes.get(pool, ()), members.nodes(pool)) for pool in self._pools})
        self._publish()
        if self._service is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._service.settled()
        self._background.run("taking away what is no more", self._retire(kept, made))

    def on_membership(self, delta: MembershipDelta) -> None:
        """Send nodes that joined or left to Envoys at once."""
        self._members = self._members.after(delta)
        self._tell()

    def shown(self) -> dict[str, object]:
        """For the admin page: what is served, and how each Envoy stands."""
        return {} if self._service is None else {"xds": self._service.shown()}

    def _snapshot(self) -> Snapshot | None:
        return None if self._blueprint is None else self._assigner.snapshot(self._blueprint, self._nodes)

    def _tell(self) -> None:
        self._nodes.update({pool: self._members.nodes(pool) for pool in self._pools})
        self._publish()

    def _publish(self) -> None:
        snapshot = self._snapshot()
        if self._service is not None and snapshot is not None:
            self._service.publish(snapshot)

    async def _retire(self, kept: Blueprint, made: Blueprint) -> None:
        """Take away what only the former configuration had, unless yet another one has come: then that one will."""
        await asyncio.sleep(_LINGER_S)
        if self._blueprint is kept:
            self._blueprint = made
            self._nodes = {}
            self._tell()


def _bridged(before: tuple[Node, ...], after: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes of a pool, with those before them for as long as all of them are new: Envoy has not looked at a new one yet."""
    ids = {node.id for node in before}
    if not after or any(node.id in ids for node in after):
        return after
    return (*after, *before)


def _blueprint(settings: Settings) -> Blueprint:
    from din_extproc.control.blueprint import blueprint  # noqa: PLC0415 - seconds, and only where Envoys are told anything

    return blueprint(settings.topology(""))

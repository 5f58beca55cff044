"""The xDS control plane: it sends pools, nodes and routes to Envoys as configuration and membership change.

Rule: Envoys know a new pool before a request is sent to it, and keep an old pool until the last request that was sent to it
must have arrived. The same holds when all nodes of a pool are replaced; any other node is removed at once.
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

_ACK_WAIT_S = 3.0
"""Seconds that a change waits for the ACKs of all Envoys, which health-check new nodes first; a slow one must not delay
the others."""
_LINGER_S = 5.0
_MESSAGE_BYTES = 16 << 20


class XdsControlPlane:
    """The control plane of one sidecar.

    Args:
        transport: The gRPC server to use.
        background: Runs delayed tasks.
    """

    def __init__(self, transport: type[H2Server | GrpcioServer], background: Background) -> None:
        self._transport = transport
        self._background = background
        self._assigner = Assigner()
        self._blueprint: Blueprint | None = None
        self._members = PoolMembership.from_pools(())
        self._pools: frozenset[str] = frozenset()
        self._nodes: dict[str, tuple[Node, ...]] = {}
        self._service: DiscoveryService | None = None
        self._server: H2Server | GrpcioServer | None = None

    async def start(self, address: str | TlsAddress) -> None:
        """Serve the last configuration on `host:port`.

        Raises:
            OSError: the address is taken.
            CertificateUnusable: the certificates can't be used.
        """
        snapshot = self._make_snapshot()
        if snapshot is None:
            raise ValueError("xDS can't start before a configuration is loaded")
        self._service = DiscoveryService(snapshot)
        self._server = self._transport((self._service,), max_body_bytes=_MESSAGE_BYTES)
        await self._server.start(address)

    async def stop(self, grace_s: float) -> None:
        """Close the streams of Envoys."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def reload(self, settings: Settings) -> None:
        """Serve this configuration. Return when the connected Envoys know its pools, or after the time limit."""
        made = await asyncio.get_running_loop().run_in_executor(None, _blueprint, settings)
        former = self._blueprint
        self._blueprint = kept = made if former is None else made.keep_from(former)
        self._pools = frozenset(pool.name for pool in settings.pools)
        self._members = members = self._members.with_pools(settings.pools)
        self._nodes.update({pool: _keep_until_checked(self._nodes.get(pool, ()), members.get_nodes(pool)) for pool in self._pools})
        self._publish()
        if self._service is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ACK_WAIT_S):
                await self._service.wait_settled()
        self._background.run("removing former pools", self._retire(kept, made))

    def on_membership(self, delta: MembershipDelta) -> None:
        """Send nodes that joined or left to Envoys at once, but keep the former ones for a while where all nodes of a pool are new."""
        self._members = members = self._members.apply_delta(delta)
        now = {pool: members.get_nodes(pool) for pool in self._pools}
        kept = {pool: _keep_until_checked(self._nodes.get(pool, ()), nodes) for pool, nodes in now.items()}
        self._nodes.update(kept)
        self._publish()
        if kept != now:
            self._background.run("removing former nodes", self._remove_former_nodes())

    def snapshot(self) -> dict[str, object]:
        """Return the served versions and each Envoy's state for the admin page."""
        return {} if self._service is None else {"xds": self._service.snapshot_status()}

    def _make_snapshot(self) -> Snapshot | None:
        return None if self._blueprint is None else self._assigner.make_snapshot(self._blueprint, self._nodes)

    def _publish_members(self) -> None:
        self._nodes.update({pool: self._members.get_nodes(pool) for pool in self._pools})
        self._publish()

    def _publish(self) -> None:
        snapshot = self._make_snapshot()
        if self._service is not None and snapshot is not None:
            self._service.publish(snapshot)

    async def _remove_former_nodes(self) -> None:
        await asyncio.sleep(_LINGER_S)
        self._publish_members()

    async def _retire(self, kept: Blueprint, made: Blueprint) -> None:
        """Remove what only the former configuration had, unless another configuration has arrived since."""
        await asyncio.sleep(_LINGER_S)
        if self._blueprint is kept:
            self._blueprint = made
            self._nodes = {}
            self._publish_members()


def _keep_until_checked(before: tuple[Node, ...], after: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes of a pool, together with the former ones while all are new: Envoy has not checked new ones yet."""
    ids = {node.id for node in before}
    if not after or any(node.id in ids for node in after):
        return after
    return (*after, *before)


def _blueprint(settings: Settings) -> Blueprint:
    from din_extproc.control.blueprint import make_blueprint  # noqa: PLC0415 - seconds, and only with xDS

    return make_blueprint(settings.make_topology(""))

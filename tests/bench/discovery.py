"""Time from a changed node list to the last byte at an xDS client.

Rule: both sizes are measured in turn, round by round; the client takes bytes and reads none of them.
"""

import time

import grpc.aio
import uvloop

from din_extproc._proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from din_extproc.control.snapshot import ASSIGNMENT, CLUSTER, ROUTES, Assigner, Blueprint, Resource
from din_extproc.domain.node import Endpoint, Node
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.xds_service import DiscoveryService
from tests.bench.field import Field, Figures
from tests.bench.harness import median
from tests.support.xds_client import SERVICE

_MANY = 10_000
_FEW = 10
_CHANGES = 20
_POOL = "pool"
_PLAN = Blueprint((Resource.of(_POOL, CLUSTER, b""),), Resource.of("din", ROUTES, b""))


def discovery(field: Field) -> Figures:
    """One node of ten thousand, and of ten, changes again and again."""
    many, few = _Size(_MANY), _Size(_FEW)
    for _ in range(field.effort.rounds):
        for size in (many, few):
            uvloop.run(size.measure())
    return {
        "xds_change_10k_nodes_built_ms": median(many.built),
        "xds_change_10k_nodes_ms": median(many.arrived),
        "xds_change_10_nodes_ms": median(few.arrived),
    }


def _node(number: int, version: int = 0) -> Node:
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return Node(
        id=f"gpu-{number}",
        endpoint=Endpoint(host, 8000),
        model="llama-3.3-70b-instruct",
        version=f"2025.3.{version}",
        dtype="bf16",
        compute_capability="9.0",
        tp_world_size=2,
        max_seq_len=32_768,
        max_concurrency=64,
    )


class _Size:
    """Changes of one pool of so many nodes, in milliseconds."""

    def __init__(self, count: int) -> None:
        self._assigner = Assigner()
        self._nodes = [_node(number) for number in range(count)]
        self._version = 0
        self.built: list[float] = []
        """Until the message is made."""
        self.arrived: list[float] = []
        """Until it is at the client."""

    async def measure(self) -> None:
        service = DiscoveryService(self._snapshot())
        server = H2Server((service,), max_body_bytes=16 << 20)
        (port,) = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as channel:
            call = channel.stream_stream(f"{SERVICE}/DeltaAggregatedResources")()
            await call.write(DeltaDiscoveryRequest(type_url=ASSIGNMENT, resource_names_subscribe=[_POOL]).SerializeToString())
            await self._answer(call, await call.read())
            for _ in range(_CHANGES):
                await service.wait_settled()
                self._version += 1
                self._nodes[len(self._nodes) // 2] = _node(len(self._nodes) // 2, self._version)
                nodes = tuple(self._nodes)
                began = time.perf_counter()
                snapshot = self._assigner.make_snapshot(_PLAN, {_POOL: nodes})
                self.built.append(1e3 * (time.perf_counter() - began))
                service.publish(snapshot)
                data = await call.read()
                self.arrived.append(1e3 * (time.perf_counter() - began))
                await self._answer(call, data)
            call.cancel()
        await server.stop(1)

    def _snapshot(self):
        return self._assigner.make_snapshot(_PLAN, {_POOL: tuple(self._nodes)})

    @staticmethod
    async def _answer(call, data: bytes) -> None:
        nonce = DeltaDiscoveryResponse.FromString(data).nonce
        await call.write(DeltaDiscoveryRequest(type_url=ASSIGNMENT, response_nonce=nonce).SerializeToString())

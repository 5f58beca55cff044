"""Discovery over each transport, asked by grpcio's client as foreign as Envoy's."""

import asyncio

import grpc
import grpc.aio
import pytest

from din_extproc.edge.grpc import grpcio_server, h2_server
from din_extproc.edge.grpc.xds_service import DiscoveryService
from tests.support.xds_client import SERVICE, XdsClient
from tests.unit.control.test_discovery import Names, content, moment

TRANSPORTS = {"our wire": h2_server.H2Server, "grpcio": grpcio_server.GrpcioServer}


class Rig:
    """A served moment, and a channel to it."""

    def __init__(self, transport):
        self.service = DiscoveryService(moment(p="1.1"))
        self.server = TRANSPORTS[transport]((self.service,), max_body_bytes=1 << 20)

    async def __aenter__(self):
        (port,) = await self.server.start("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)])
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(1)

    async def connect(self, *, delta):
        client = XdsClient(delta, Names())
        call = self.channel.stream_stream(client.path)()
        for request in client.opening():
            await call.write(request)
        return client, call


async def follow(client, call, until):
    """Answer what comes until it has this moment."""
    async with asyncio.timeout(20):
        while client.has != content(until):
            for request in client.take(await call.read()):
                await call.write(request)


@pytest.fixture(params=list(TRANSPORTS))
def transport(request):
    return request.param


@pytest.mark.parametrize("delta", [True, False])
async def test_a_client_gets_all_resources_and_every_change(transport, delta):
    async with Rig(transport) as rig:
        client, call = await rig.connect(delta=delta)
        await follow(client, call, moment(p="1.1"))
        for later in (moment(p="1.2"), moment("2", p="1.2", q="1.1"), moment("2", q="1.1")):
            rig.service.publish(later)
            await follow(client, call, later)
        async with asyncio.timeout(10):
            await rig.service.wait_settled()
        (envoy,) = rig.service.snapshot_status()["envoys"]
        assert envoy.id == "envoy-1"


async def test_many_clients_get_updates_and_a_silent_one_delays_no_other(transport):
    async with Rig(transport) as rig:
        _silent, silent_call = await rig.connect(delta=True)
        await silent_call.read()
        clients = [await rig.connect(delta=number % 2 == 0) for number in range(20)]
        await asyncio.gather(*(follow(*each, moment(p="1.1")) for each in clients))
        later = moment(p="1.3", q="1.1")
        rig.service.publish(later)
        await asyncio.gather(*(follow(*each, later) for each in clients))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rig.service.wait_settled()
        silent_call.cancel()
        async with asyncio.timeout(10):
            await rig.service.wait_settled()


async def test_garbage_ends_its_stream_with_a_reason_and_no_other(transport):
    async with Rig(transport) as rig:
        client, call = await rig.connect(delta=True)
        broken = rig.channel.stream_stream(f"{SERVICE}/DeltaAggregatedResources")()
        await broken.write(b"\xff")
        assert await broken.code() == grpc.StatusCode.INVALID_ARGUMENT
        await follow(client, call, moment(p="1.1"))
        assert len(rig.service.streams) == 1


async def test_a_server_that_stops_ends_its_streams_well(transport):
    async with Rig(transport) as rig:
        client, call = await rig.connect(delta=False)
        await follow(client, call, moment(p="1.1"))
        stopping = asyncio.ensure_future(rig.server.stop(5))
        assert await call.code() == grpc.StatusCode.OK
        await stopping
        assert not rig.service.streams

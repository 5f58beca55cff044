"""What every transport of the sidecar's port does, asked by grpcio's client: our own wire, and grpcio."""

import asyncio
import contextlib
import json
import socket

import grpc
import grpc.aio
import pytest

from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc._proto.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from din_extproc.domain.verdict import Send
from din_extproc.edge.grpc import grpcio_server, h2_server, services
from din_extproc.edge.grpc.ext_proc import ExtProcService
from tests.support.fakes import FakeHandlerFactory, send_on
from tests.support.peer import PROCESS, EnvoyPeer, message, play
from tests.support.waiting import until

TRANSPORTS = {"our wire": h2_server.H2Server, "grpcio": grpcio_server.GrpcioServer}
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
HEALTH = "/grpc.health.v1.Health/"


class Rig:
    """A server with all three services on a free port, and a channel to it."""

    def __init__(self, transport, decision, address):
        self.handler_factory = FakeHandlerFactory(decision)
        self.logged = []
        self.health = services.HealthService(EXT_PROC)
        log = services.AccessLogService(self.logged.append, linger_s=0.01)
        served = [self.health, ExtProcService(self.handler_factory), log]
        self.server = TRANSPORTS[transport](served, max_body_bytes=8 * 1024 * 1024)
        self.address = address

    async def __aenter__(self):
        (port,) = await self.server.start(self.address)
        target = self.address if self.address.startswith("unix:") else f"127.0.0.1:{port}"
        self.channel_target = target
        # A pool of its own: channels to one address would share a connection, also one to a server that has stopped.
        limit = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(target, options=limit)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(0)

    def process(self):
        return self.channel.stream_stream(PROCESS)()

    async def check(self, service=""):
        data = await self.channel.unary_unary(HEALTH + "Check")(HealthCheckRequest(service=service).SerializeToString())
        return HealthCheckResponse.FromString(data).status

    @property
    def flow(self):
        return self.handler_factory.flows[-1]


class Undecided:
    """A decision that is never made, and counts how often it was cancelled."""

    def __init__(self):
        self.reached = asyncio.Event()
        self.cancels = 0

    async def __call__(self, _head, _body):
        self.reached.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancels += 1
            raise


@pytest.fixture(params=list(TRANSPORTS))
def rig(request):
    """Makes a `Rig` on one of the transports."""

    @contextlib.asynccontextmanager
    async def make(decision=send_on, address="127.0.0.1:0"):
        async with Rig(request.param, decision, address) as made:
            yield made

    return make


async def test_an_exchange_goes_through_over_tcp(rig):
    async with rig() as made:
        peer = await play(EnvoyPeer(body=b'{"model":"m"}'), made.process())
        assert peer.reached.headers["x-din-cluster"] == "pool"
        assert peer.answered.status == 200
        assert made.flow.ends == 1


async def test_an_exchange_goes_through_over_a_unix_socket(rig, tmp_path):
    address = f"unix:{tmp_path}/ext_proc.sock"
    async with rig(address=address) as made:
        assert (await play(EnvoyPeer(), made.process())).answered.status == 200
    async with rig(address=address) as made:
        assert (await play(EnvoyPeer(), made.process())).answered.status == 200


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_address_that_is_taken_is_reported(transport):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = TRANSPORTS[transport]([], max_body_bytes=1)
        with pytest.raises(OSError, match=str(port)):
            await server.start(f"127.0.0.1:{port}")
        await server.stop(0)


async def test_bodies_up_to_the_cap_pass_both_ways(rig):
    async def decide(_head, body):
        return Send(cluster="c", endpoints=("1.1.1.1:1",), request_headers=(), response_headers=(), metadata={}, body=body[::-1])

    async with rig(decide) as made:
        body = b"{" + b"x" * (8 * 1024 * 1024 - 2) + b"}"
        peer = await play(EnvoyPeer(body=body), made.process())
        assert peer.reached.body == body[::-1]


async def test_a_message_over_the_cap_ends_only_its_stream(rig):
    async with rig() as made:
        call = made.process()
        await call.write(message("request_body", body=b"x" * (10 * 1024 * 1024), end=True))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await play(EnvoyPeer(), made.process())).answered.status == 200
        await until(lambda: made.handler_factory.flows[0].ends)


async def test_two_hundred_streams_at_once_each_end_once(rig):
    async with rig() as made:
        calls = [play(EnvoyPeer(body=b'{"n":%d}' % number), made.process()) for number in range(200)]
        peers = await asyncio.gather(*calls)
        assert [peer.reached.body for peer in peers] == [b'{"n":%d}' % number for number in range(200)]
        await until(lambda: all(flow.ends == 1 for flow in made.handler_factory.flows))
        assert len(made.handler_factory.flows) == 200


async def test_a_client_that_goes_away_cancels_the_decision(rig):
    undecided = Undecided()
    async with rig(undecided) as made:
        call = made.process()
        await call.write(message("request_headers", {":method": "GET", ":path": "/v1/models"}, end=True))
        await undecided.reached.wait()
        call.cancel()
        await until(lambda: made.flow.ends)
        assert (made.flow.ends, undecided.cancels) == (1, 1)


async def test_clients_that_go_away_between_messages_end_their_flows_once(rig):
    async with rig() as made:
        for _ in range(20):
            call = made.process()
            await call.write(message("request_headers", {":method": "POST", ":path": "/"}))
            await call.read()
            call.cancel()
        await until(lambda: all(flow.ends for flow in made.handler_factory.flows))
        assert len(made.handler_factory.flows) == 20
        assert all(flow.ends == 1 for flow in made.handler_factory.flows)


async def test_a_fault_in_the_decision_reaches_the_client_as_a_json_answer(rig):
    async def decide(_head, _body):
        raise ZeroDivisionError

    async with rig(decide) as made:
        peer = await play(EnvoyPeer(), made.process())
        assert peer.answered.status == 500
        assert json.loads(peer.answered.body)["error"]["code"] == "internal_error"


async def test_a_broken_protocol_closes_only_its_stream(rig):
    async with rig() as made:
        waiting = made.process()
        await waiting.write(message("request_headers", {":method": "POST", ":path": "/"}))
        await waiting.read()
        broken = made.process()
        await broken.write(message("request_body", body=b"{}", end=True))
        with pytest.raises(grpc.aio.AioRpcError, match="RequestBody may not come") as refused:
            await broken.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await waiting.write(message("request_body", body=b"{}", end=True))
        assert isinstance(await waiting.read(), bytes)
        await waiting.done_writing()
        assert await waiting.code() == grpc.StatusCode.OK


async def test_access_log_messages_arrive_as_they_were_sent(rig):
    async with rig() as made:
        sent = []
        for name in ("a", "b"):
            entry = StreamAccessLogsMessage()
            entry.identifier.log_name = name
            sent.append(entry.SerializeToString())
        call = made.channel.stream_unary(ACCESS_LOG)()
        for data in sent:
            await call.write(data)
        await call.done_writing()
        assert await call == b""
        assert made.logged == sent


async def test_an_access_log_that_goes_away_leaves_the_server_alone(rig):
    async with rig() as made:
        call = made.channel.stream_unary(ACCESS_LOG)()
        await call.write(b"")
        await until(lambda: made.logged)
        call.cancel()
        assert (await play(EnvoyPeer(), made.process())).answered.status == 200


async def test_health_returns_the_status_that_was_set(rig):
    async with rig() as made:
        assert await made.check() == HealthCheckResponse.NOT_SERVING
        made.health.set_serving(serving=True)
        assert await made.check() == HealthCheckResponse.SERVING
        assert await made.check(EXT_PROC) == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.check("nobody")
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_health_watch_gets_each_change_once(rig):
    async with rig() as made:
        statuses = []
        call = made.channel.unary_stream(HEALTH + "Watch")(b"")
        for serving in (True, True, False):
            statuses.append(HealthCheckResponse.FromString(await call.read()).status)
            made.health.set_serving(serving=serving)
            if serving and len(statuses) > 1:
                made.health.set_serving(serving=False)
        assert statuses == [HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]
        call.cancel()


async def test_a_health_watch_on_an_unknown_service_says_so_and_stays_open(rig):
    async with rig() as made:
        call = made.channel.unary_stream(HEALTH + "Watch")(HealthCheckRequest(service="nobody").SerializeToString())
        assert HealthCheckResponse.FromString(await call.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        assert not call.done()
        call.cancel()


async def test_an_unknown_method_is_unimplemented(rig):
    async with rig() as made:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.channel.unary_unary("/x.Y/Z")(b"")
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_graceful_stop_lets_streams_finish_and_takes_no_new_ones(rig):
    async with rig() as made:
        made.health.set_serving(serving=True)
        watch = made.channel.unary_stream(HEALTH + "Watch")(b"")
        await watch.read()
        log = made.channel.stream_unary(ACCESS_LOG)()
        await log.write(b"")
        await until(lambda: made.logged)
        peer, call = EnvoyPeer(), made.process()
        messages = peer.messages()
        await call.write(next(messages))
        peer.reply(await call.read())
        stopping = asyncio.ensure_future(made.server.stop(60))
        assert HealthCheckResponse.FromString(await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        for data in messages:
            await call.write(data)
            peer.reply(await call.read())
        assert not stopping.done()
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
        assert await log == b""
        await stopping
        assert (peer.answered.status, made.flow.ends) == (200, 1)


async def test_a_stop_cuts_off_what_outlives_its_grace(rig):
    async def decide(_head, _body):
        await asyncio.get_running_loop().create_future()

    async with rig(decide) as made:
        call = made.process()
        await call.write(message("request_headers", {":method": "GET", ":path": "/"}, end=True))
        await until(lambda: made.handler_factory.flows and made.flow.asked)
        await made.server.stop(0.05)
        assert await call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        await until(lambda: made.flow.ends)
        assert made.flow.ends == 1


async def test_a_deadline_that_passes_ends_the_call_and_cancels_the_decision(rig):
    undecided = Undecided()
    async with rig(undecided) as made:
        deadline_s = 0.25
        while not undecided.reached.is_set():  # a deadline that passes on the way there says nothing
            deadline_s *= 2
            call = made.channel.stream_stream(PROCESS)(timeout=deadline_s)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(message("request_headers", {":method": "GET", ":path": "/"}, end=True))
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: undecided.cancels and all(flow.ends for flow in made.handler_factory.flows))
        assert (made.flow.ends, undecided.cancels) == (1, 1)


async def test_two_connections_are_served_at_once(rig):
    async with rig() as made:
        target = made.channel_target
        async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            for call in (made.process(), other.stream_stream(PROCESS)()):
                assert (await play(EnvoyPeer(), call)).answered.status == 200

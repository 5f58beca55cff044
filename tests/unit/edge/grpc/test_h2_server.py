"""Our own transport between a socket and the services: guards, back-pressure, goodbyes, and what a stream costs."""

import asyncio
import gc
import tracemalloc
from contextlib import asynccontextmanager

import pytest

from din_extproc.edge.background import STEPS_PER_ITERATION
from din_extproc.edge.grpc.ext_proc import ExtProcService
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.wire import frames
from din_extproc.wire.frames import ErrorCode, frame
from din_extproc.wire.grpc import GrpcCall
from din_extproc.wire.limits import WireLimits, limits_for
from tests.support.fakes import FakeHandlerFactory
from tests.support.frame_peer import HELLO, data, message, opening, split
from tests.support.peer import message as extproc_message
from tests.support.waiting import turns, until

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class Echo:
    """Sends every message back, as many times as its first byte says; `!` raises."""

    def __init__(self, answers):
        self.answers = answers
        self.ends = []

    def message(self, data):
        if data == b"!":
            raise ZeroDivisionError("requested by the test")
        for _ in range(data[0]):
            self.answers.send(data)

    def ended(self, *, cancelled):
        self.ends.append(cancelled)
        if not cancelled:
            self.answers.finish()


class EchoService:
    name = "test.Echo"

    def __init__(self):
        self.handlers = []

    def methods(self):
        return {"Call": self.take, "Refuse": self.refuse}

    def take(self, answers):
        self.handlers.append(Echo(answers))
        return self.handlers[-1]

    def refuse(self, _answers):
        raise ZeroDivisionError("at the door")

    async def drain(self):
        pass


class RawClient:
    """A socket with frames on it."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def read_frames(self, count):
        seen = []
        async with asyncio.timeout(20):
            while len(seen) < count:
                head = await self.reader.readexactly(9)
                seen += split(head + await self.reader.readexactly(int.from_bytes(head[:3], "big")))
        return seen

    def say(self, *parts):
        self.writer.write(b"".join(parts))


class CountingTransport:
    """A transport that counts its writes, and notes when it is read no further."""

    def __init__(self, transport):
        self.writes = 0
        self.pauses = []
        self._transport = transport

    def pause_reading(self):
        self.pauses.append("paused")
        self._transport.pause_reading()

    def resume_reading(self):
        self.pauses.append("resumed")
        self._transport.resume_reading()

    def write(self, data):
        self.writes += 1
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)


@asynccontextmanager
async def served(*services, limits=None):
    server = H2Server(services, max_body_bytes=1 << 20, limits=limits)
    (port,) = await server.start("127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield server, RawClient(reader, writer)
    finally:
        writer.close()
        await server.stop(0)


async def counted(server, client):
    """Opens a call. Returns its connection, and the transport that counts from now on."""
    client.say(HELLO, call(1))
    await client.read_frames(3)
    (connection,) = server.connections
    connection._transport = CountingTransport(connection._transport)
    return connection, connection._transport


def call(stream_id, **changed):
    return opening(stream_id, path="/test.Echo/Call", **changed)


async def test_a_method_that_raises_fails_its_call_tells_the_operator_and_spares_the_others():
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
    service = EchoService()
    async with served(service) as (_, client):
        client.say(HELLO, call(1), call(3), opening(5, path="/test.Echo/Refuse"))
        client.say(data(1, message(b"!")), data(3, message(b"\x01fine"), end=True))
        await until(lambda: len(service.handlers) == 2 and service.handlers[1].ends)
        seen_frames = await client.read_frames(10)
        failed = {seen.stream_id for seen in seen_frames if b"internal error" in seen.payload}
        assert failed == {1, 5}
        assert [seen.payload for seen in seen_frames if seen.kind == frames.DATA] == [message(b"\x01fine")]
        assert [type(error) for error in errors] == [ZeroDivisionError] * 2
        assert service.handlers[0].ends == [True]


async def test_replies_wait_for_a_client_that_does_not_read_and_arrive_when_it_does():
    service = EchoService()
    async with served(service) as (server, client):
        wide = frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}) + frames.window_update(0, 2**31 - 1 - 65535)
        client.say(HELLO, wide)
        big = b"\x08" + b"x" * 500_000
        for stream_id in range(1, 21, 2):
            client.say(call(stream_id), data(stream_id, message(big), end=True))
        (connection,) = server.connections
        await until(lambda: len(service.handlers) == 10 and all(handler.ends for handler in service.handlers))
        assert connection.grpc.held > 30_000_000
        assert connection._transport.get_write_buffer_size() < 16_000_000
        received = 0
        while received < 10 * 8 * len(message(big)):
            received += sum(len(seen.payload) for seen in await client.read_frames(1) if seen.kind == frames.DATA)
        await until(lambda: server.calls == 0)
        assert connection.grpc.held == 0


async def test_a_client_that_never_reads_and_asks_for_ever_loses_its_calls_not_our_memory():
    limits = WireLimits(max_unsent_bytes_per_stream=3_000_000, max_unsent_bytes=6_000_000)
    service = EchoService()
    async with served(service, limits=limits) as (server, client):
        client.say(HELLO)
        (connection,) = server.connections
        for stream_id in range(1, 41, 2):
            client.say(call(stream_id), data(stream_id, message(b"\x08" + b"x" * 300_000)))
            await until(lambda at=stream_id: len(service.handlers) > at // 2)
            assert connection.grpc.held <= limits.max_unsent_bytes + limits.max_held_bytes
        await until(lambda: any(handler.ends == [True] for handler in service.handlers))
        assert connection.grpc.held <= limits.max_unsent_bytes


async def test_a_broken_peer_gets_the_reason_before_the_connection_closes():
    async with served() as (server, client):
        client.say(HELLO, frame(frames.PING, 0, 0, b"short"), b"\0" * 200_000)
        *_, goodbye = await client.read_frames(4)
        assert (goodbye.kind, goodbye.code, goodbye.reason) == (frames.GOAWAY, ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong size")
        assert await client.reader.read() == b""
        client.writer.close()
        await until(lambda: not server.connections)


async def test_a_lost_connection_cancels_its_calls():
    service = EchoService()
    async with served(service) as (server, client):
        client.say(HELLO, call(1), call(3))
        await until(lambda: len(service.handlers) == 2)
        client.writer.transport.abort()
        await until(lambda: not server.connections)
        assert [handler.ends for handler in service.handlers] == [[True], [True]]


@pytest.mark.parametrize(("messages", "writes"), [(STEPS_PER_ITERATION, 1), (2 * STEPS_PER_ITERATION + 1, 3)])
async def test_replies_of_one_turn_leave_in_one_write_and_a_burst_is_answered_in_several_turns(messages, writes):
    service = EchoService()
    async with served(service) as (server, client):
        _, counting = await counted(server, client)
        client.say(b"".join(data(1, message(b"\x03%d" % number)) for number in range(messages)))
        seen_frames = await client.read_frames(1 + 3 * messages)
        assert [seen.kind for seen in seen_frames] == [frames.HEADERS, *[frames.DATA] * 3 * messages]
        assert [seen.payload[6:] for seen in seen_frames[1::3]] == [b"%d" % number for number in range(messages)]
        assert counting.writes == writes


async def test_a_client_whose_messages_wait_for_their_turn_is_read_no_further_until_they_had_it():
    service = EchoService()
    async with served(service) as (server, client):
        connection, transport = await counted(server, client)
        burst = b"".join(data(1, message(b"\x01")) for _ in range(200))
        connection.data_received(burst)
        assert transport.pauses == []
        connection.data_received(burst)
        connection.data_received(burst)
        assert transport.pauses == ["paused"]
        await client.read_frames(601)
        assert transport.pauses == ["paused", "resumed"]


async def test_what_waits_for_its_turn_when_the_connection_goes_still_ends_once():
    service = EchoService()
    async with served(service) as (server, client):
        client.say(HELLO, *(call(stream) for stream in range(1, 41, 2)))
        client.writer.close()
        await until(lambda: len(service.handlers) == 20 and all(handler.ends for handler in service.handlers))
        assert [handler.ends for handler in service.handlers] == [[True]] * 20
        assert server.calls == 0


async def test_an_address_that_is_none_is_an_os_error():
    with pytest.raises(OSError, match="nowhere"):
        await H2Server([], max_body_bytes=1).start("nowhere")


@pytest.mark.parametrize("body", [0, 1 << 20, 64 << 20, 1 << 30])
def test_limits_let_the_largest_body_through_without_waiting(body):
    limits = limits_for(body)
    assert limits.max_message_bytes > body
    assert limits.max_message_bytes <= limits.stream_window <= limits.connection_window < 2**31
    assert limits.max_message_bytes < limits.max_unsent_bytes_per_stream <= limits.max_unsent_bytes


async def test_an_open_stream_costs_no_more_than_6000_bytes():
    count = 1000
    handler_factory = FakeHandlerFactory()
    service = ExtProcService(handler_factory)
    async with served(service) as (server, client):
        client.say(HELLO)
        await client.read_frames(3)
        (connection,) = server.connections
        head = message(extproc_message("request_headers", {":method": "POST", ":path": "/v1/chat/completions"}))
        parts = [opening(2 * at + 1, path=PROCESS) + data(2 * at + 1, head) for at in range(count)]
        connection.data_received(b"".join(parts[:10]))
        await turns()
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for part in parts[10:]:
                connection.data_received(part)
            await turns()
            gc.collect()
            each = (tracemalloc.get_traced_memory()[0] - before) / (count - 10)
        finally:
            tracemalloc.stop()
        print(f"{each:.0f} bytes for each open stream")
        assert server.calls == count
        assert each < 6000


async def test_calls_that_end_in_any_way_leave_nothing_for_the_garbage_collector():
    service = ExtProcService(FakeHandlerFactory())
    head = message(extproc_message("request_headers", {":method": "POST", ":path": "/v1/chat/completions"}))
    reset = frames.WORD.pack(ErrorCode.CANCEL)
    async with served(service) as (server, client):
        client.say(HELLO)
        await client.read_frames(3)
        (connection,) = server.connections
        gc.collect()
        gc.disable()
        try:
            for at in range(1, 4000, 8):
                connection.data_received(opening(at, path=PROCESS) + data(at, head) + frame(frames.RST_STREAM, 0, at, reset))
                connection.data_received(opening(at + 2, path=PROCESS) + data(at + 2, head, end=True))
                connection.data_received(opening(at + 4, path=PROCESS) + data(at + 4, message(b"no protobuf")))
                connection.data_received(opening(at + 6, path=PROCESS) + data(at + 6, b"\1\0\0\0\0"))
                await turns()
            left = [thing for thing in gc.get_objects() if type(thing) is GrpcCall]
        finally:
            gc.enable()
        assert (server.calls, service.calls, left) == (0, 0, [])


async def test_its_unix_socket_is_gone_after_the_stop_and_that_of_a_successor_stays(tmp_path):
    path = tmp_path / "own.sock"
    first, second = (H2Server((), max_body_bytes=1024) for _ in range(2))
    await first.start(f"unix:{path}")
    await second.start(f"unix:{path}")
    await first.stop(0.1)
    assert path.exists()
    await second.stop(0.1)
    assert not path.exists()


async def test_however_many_hold_a_connection_a_newcomer_finds_a_place_and_who_is_at_work_keeps_it():
    server = H2Server((EchoService(),), max_body_bytes=1 << 20, most=10)
    (port,) = await server.start("127.0.0.1:0")
    at_work = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    at_work.say(HELLO, call(1), data(1, message(b"\x01")))
    assert (await at_work.read_frames(5))[-1].payload == message(b"\x01")
    held = [RawClient(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(30)]
    for each in held[::2]:
        each.say(HELLO)
    newcomer = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    newcomer.say(HELLO, call(1), data(1, message(b"\x01")))
    assert (await newcomer.read_frames(5))[-1].payload == message(b"\x01")
    at_work.say(data(1, message(b"\x02")))
    assert [seen.payload for seen in await at_work.read_frames(2)] == [message(b"\x02")] * 2
    assert len(server.connections) <= 11
    assert server.connection_limiter.sent_away >= 20
    for each in (*held, at_work, newcomer):
        each.writer.close()
    await server.stop(0)

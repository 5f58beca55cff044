"""The access-log port takes Fluentd's forward protocol and gRPC, and closes what is neither."""

import asyncio

import msgpack
import pytest

from din_extproc.edge.access_log_port import AccessLogPort
from tests.support.waiting import until


class Received:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.entries: list[tuple[str, list[object]]] = []

    def on_entries(self, tag: str, entries: list[object]) -> None:
        self.entries.append((tag, entries))


@pytest.fixture
async def port():
    received = Received()
    made = AccessLogPort(received.messages.append, received.on_entries)
    number = await made.start("127.0.0.1:0")
    yield made, received, number
    await made.stop()


MESSAGE = msgpack.packb(["din", [[1, {"s": 200}], [2, {"s": 429}]]])


@pytest.mark.parametrize("cut", [1, 3, len(MESSAGE) - 1, len(MESSAGE)])
async def test_messages_arrive_whole_wherever_they_are_cut(port, cut):
    _, received, number = port
    _, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(MESSAGE + MESSAGE[:cut])
    await writer.drain()
    await until(lambda: len(received.entries) >= 1)
    writer.write(MESSAGE[cut:])
    await until(lambda: len(received.entries) == 2)
    assert received.entries == [("din", [[1, {"s": 200}], [2, {"s": 429}]])] * 2
    writer.close()


@pytest.mark.parametrize(
    "bad", [b"GET / HTTP/1.1\r\n\r\n", msgpack.packb({"a": 1}), msgpack.packb(["din"]), msgpack.packb([1, []]), b"\xc1"]
)
async def test_a_connection_that_speaks_another_protocol_is_closed(port, bad, caplog):
    _, received, number = port
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(bad)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    assert received.entries == []
    assert "not Fluentd's forward protocol" in caplog.text
    writer.close()


@pytest.mark.virtual_time
async def test_a_connection_that_sends_nothing_is_closed(port):
    made, _, number = port
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    assert asyncio.get_running_loop().time() < 60
    assert not made.limiter.connections
    writer.close()


async def test_a_stop_takes_what_is_under_way_and_closes(port):
    made, received, number = port
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(MESSAGE)
    await until(lambda: bool(received.entries))
    stopping = asyncio.create_task(made.stop())
    writer.write(MESSAGE)
    await until(lambda: len(received.entries) == 2)
    await stopping
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()

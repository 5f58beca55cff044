"""A real Envoy talks to our own HTTP/2: bodies of every size both ways, 10,000 streams, a drain, and nothing left behind."""

import asyncio
import gc
import sys
from collections import Counter
from io import BytesIO

import psutil
import pytest
from aiohttp import ClientSession, ClientTimeout

from din_extproc.edge.grpc.ext_proc import ExtProcStream
from din_extproc.edge.grpc.h2_server import H2ServerCall
from din_extproc.edge.inline_task import InlineTask
from din_extproc.wire.exchange import Exchange
from tests.support.clients import Http1, Http2, connected
from tests.support.waiting import until
from tests.support.wired import MIB, BareNode, Wired, wired

pytestmark = pytest.mark.e2e

SIZES = (0, 1_000, 127_000, 129_000, 3_900_000, 8 * MIB)


async def test_a_body_of_any_size_goes_up_changed_and_comes_back():
    async with wired() as made, ClientSession(timeout=ClientTimeout(60)) as client:
        for size in SIZES:
            body = (bytes(range(256)) * (size // 256 + 1))[:size]
            async with client.post(made.url, data=BytesIO(body)) as answer:
                assert answer.status == 200
                assert await answer.read() == body[::-1]
        await made.at_rest()


async def test_eight_large_bodies_at_once_share_the_connections_windows():
    async with wired() as made, ClientSession(timeout=ClientTimeout(60)) as client:

        async def one(number):
            body = bytes((number,)) * 2 * MIB + b"end"
            async with client.post(made.url, data=BytesIO(body)) as answer:
                assert await answer.read() == body[::-1]

        await asyncio.gather(*map(one, range(8)))
        await made.at_rest()


STREAMS, ROUNDS, LANES = 10_000, 5, 32
"""Bounded caches are full after about 4,000 streams; fewer would measure how they fill."""
BODIES = (None, b"x" * 128_000, *(bytes((65 + number,)) * size for number, size in enumerate((1, 300, 800, 801, 2_000, 8_000))))
"""One in eight has no body, one in eight a large one."""
PARTS_OF_A_CALL = (H2ServerCall, ExtProcStream, Exchange, InlineTask)


def alive():
    """How many parts of calls exist; and how many blocks of memory Python has given out."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return max(kinds[each] for each in PARTS_OF_A_CALL), sys.getallocatedblocks()


async def lane(port, number, count):
    """One in eight lanes speaks HTTP/2."""
    async with connected(Http2 if number % 8 == 0 else Http1, port, 1) as (client,):
        for at in range(count):
            body = BODIES[(number + at) % len(BODIES)]
            answer = await client.ask("GET" if body is None else "POST", body or b"")
            assert answer == (200, body[::-1] if body else b"")


@pytest.mark.timeout(300)
async def test_thousands_of_streams_leave_no_part_of_a_call_and_no_memory_behind():
    left, resident, before = [], [], alive()[0]  # what other tests of this process have left is not looked at
    async with wired(BareNode()) as made:
        envoy = psutil.Process(made.parts.envoy.process.pid)
        for _ in range(ROUNDS):
            each = STREAMS // ROUNDS
            await asyncio.gather(*(lane(made.port, number, each // LANES + (number < each % LANES)) for number in range(LANES)))
            await made.at_rest()
            assert len(made.handler_factory.flows) == each
            await until(lambda: len(made.logs) == each)  # noqa: B023 - awaited in its own turn
            made.forget()
            left.append(alive())
            resident.append((psutil.Process().memory_info().rss, envoy.memory_info().rss))
    print("parts and blocks after each round:", left, "resident, ours and Envoy's:", resident)
    assert all(parts <= before + 1 for parts, _ in left)  # the access log's call stays open
    assert left[-1][1] - left[0][1] < STREAMS // 4
    assert all(last < 1.25 * first for first, last in zip(resident[0], resident[-1], strict=True))


async def test_a_server_that_drains_finishes_what_is_under_way_and_its_successor_takes_over():
    async with wired() as made, ClientSession() as client:
        made.delay_s = 0.4
        under_way = [asyncio.ensure_future(client.post(made.url, data=b"%d" % number)) for number in range(10)]
        await until(lambda: made.open_streams == 10)
        successor = Wired(made.parts)
        await successor.server.start(*successor.addresses)
        await made.server.stop(20)
        answers = await asyncio.gather(*under_way)
        assert [answer.status for answer in answers] == [200] * 10
        assert len(made.handler_factory.flows) == 10
        async with client.post(made.url, data=b"new") as answer:
            assert await answer.read() == b"wen"
        assert len(successor.handler_factory.flows) == 1
        await successor.server.stop(1)

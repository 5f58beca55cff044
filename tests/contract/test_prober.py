"""Who asks the nodes, and what replicas tell each other of them, on a real Redis."""

import asyncio
from collections.abc import Iterator

import pytest

from din_extproc.domain.health import ProbeResult
from din_extproc.edge.redis.prober import PROBER, ProberLease, ProberMessage
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_carrier, make_locator
from tests.support.servers import FLAVOURS, RedisServer
from tests.support.waiting import until


@pytest.fixture(scope="module", params=FLAVOURS)
def server(request) -> Iterator[RedisServer]:
    with RedisServer(flavour=request.param) as running:
        yield running


@pytest.fixture
async def link(server):
    made = make_carrier(server.url, (PROBER,), timeout_ms=2000)
    assert await made.start(5)
    yield made
    await made.close()


async def test_one_replica_of_all_asks_until_it_goes_or_falls_silent(link):
    one, two, other_network = ProberLease(link, "n1", "one"), ProberLease(link, "n1", "two"), ProberLease(link, "n2", "one")
    assert await one.acquire(60_000)
    assert not await two.acquire(60_000)
    assert await other_network.acquire(60_000), "another network has its own"
    assert await one.acquire(60_000), "it keeps the right by asking for it again"
    assert not await two.acquire(0), "nobody gives away what another has"
    assert not await two.acquire(60_000)
    await one.acquire(0)
    assert await two.acquire(50)
    await until(lambda: one.acquire(60_000))
    await one.acquire(0)


async def test_a_message_of_one_replica_reaches_the_others_and_not_itself(link, server):
    one, two = ProberLease(link, "n3", "one"), ProberLease(link, "n3", "two")
    messages, listening = asyncio.Queue(), asyncio.Event()
    task = asyncio.create_task(ChannelSubscription(make_locator(server.url), two.channel, messages.put_nowait, listening.set).run())
    try:
        await asyncio.wait_for(listening.wait(), 10)
        probes = (ProbeResult("a", ok=True, ttft_ms=12.5), ProbeResult("b", ok=False, reason="no token within 5 s"))
        await one.publish(
            ProberMessage("one", probes, {"c": "3 consecutive failures"}, opened_for={"c": "aaaaaaaa"}, stopped=("aaaaaaaa01020304",))
        )
        message = await asyncio.wait_for(messages.get(), 10)
        probed = two.on_message(message)
        assert (probed.replica, probed.probes, probed.opened) == ("one", probes, {"c": "3 consecutive failures"})
        assert (probed.opened_for, probed.stopped) == ({"c": "aaaaaaaa"}, ("aaaaaaaa01020304",))
        assert one.on_message(message) is None
        assert two.on_message(b"nonsense") is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Nodes without an agent are asked for their metrics pages."""

import asyncio

import pytest

from din_extproc.domain.node import Adapters, Endpoint, Node, Pool
from din_extproc.edge.probe.scrape import Scraper, ScrapeTarget
from tests.support.fakes import FakeEngine
from tests.support.waiting import let_pass, turns

pytestmark = pytest.mark.virtual_time


def node_at(port, host="127.0.0.1"):
    return Node("gpu-1", Endpoint(host, port), "m", "2025.3.1", "bf16", "", 1, 8192, 8)


def pool_of(engine, *adapters):
    return Pool(name="p", model="m", served_model="m", engine=engine, scheduler="round_robin", nodes=(), adapters=Adapters(adapters))


@pytest.fixture
async def engine():
    made = FakeEngine()
    await made.start()
    yield made
    await made.stop()


class Readings:
    """Keeps the latest reading of each node."""

    def __init__(self):
        self.readings = {}
        self.count = 0
        self.more = asyncio.Event()

    def __call__(self, readings):
        self.readings |= readings
        self.count += 1
        self.more.set()

    async def until(self, holds):
        async with asyncio.timeout(3600):
            while not holds():
                self.more.clear()
                await self.more.wait()


@pytest.mark.parametrize(
    ("engine", "host", "url"),
    [
        ("vllm", "10.0.0.1", "http://10.0.0.1:8000/metrics"),
        ("triton", "fd00::1", "http://[fd00::1]:8002/metrics"),
        ("tensorrt_llm", "10.0.0.1", "http://10.0.0.1:8000/prometheus/metrics"),
    ],
)
def test_a_nodes_page_is_where_its_engine_usually_has_it(engine, host, url):
    assert ScrapeTarget.of(node_at(8000, host), pool_of(engine)).url == url


async def test_a_page_becomes_a_reading_again_and_again(engine):
    observer = Readings()
    scraper = Scraper(observer)
    engine.waiting, engine.running = 4, 2
    scraper.set_targets([ScrapeTarget.of(node_at(engine.port), pool_of("vllm"))], 0.02)
    await observer.until(lambda: observer.count >= 2)
    beat = observer.readings["gpu-1"].beat
    assert (beat.waiting, beat.running, beat.state) == (4, 2, "ready")
    engine.waiting = 9
    await observer.until(lambda: observer.readings["gpu-1"].beat.waiting == 9)
    await scraper.stop()


async def test_a_node_that_is_gone_says_nothing_and_is_asked_again(engine):
    observer = Readings()
    scraper = Scraper(observer)
    await engine.stop()
    scraper.set_targets([ScrapeTarget.of(node_at(engine.port), pool_of("vllm"))], 0.02)
    await let_pass(60)
    assert observer.count == 0
    await engine.start()
    await observer.until(lambda: observer.count)
    await scraper.stop()


async def test_an_engine_that_does_not_tell_is_no_reading(engine):
    observer = Readings()
    scraper = Scraper(observer)
    scraper.set_targets(
        [ScrapeTarget.of(node_at(engine.port), pool_of("llamacpp")), ScrapeTarget.of(node_at(engine.port), pool_of("ollama"))], 0.02
    )
    await let_pass(60)
    await scraper.stop()
    assert observer.count == 0


async def test_a_node_that_left_the_configuration_is_not_asked_any_more(engine):
    observer = Readings()
    scraper = Scraper(observer)
    target = ScrapeTarget.of(node_at(engine.port), pool_of("vllm"))
    scraper.set_targets([target], 0.02)
    await observer.until(lambda: observer.count)
    scraper.set_targets([target], 0.02)
    await observer.until(lambda: observer.count >= 2)
    scraper.set_targets([], 0.02)
    await turns()
    before = observer.count
    await let_pass(60)
    assert observer.count == before
    await scraper.stop()


async def test_nobody_is_asked_any_more_once_the_interval_is_0(engine):
    observer = Readings()
    scraper = Scraper(observer)
    target = ScrapeTarget.of(node_at(engine.port), pool_of("vllm"))
    scraper.set_targets([target], 0.02)
    await observer.until(lambda: observer.readings)
    scraper.set_targets([target], 0)
    assert scraper.latest == {}
    await scraper.stop()


async def test_the_adapters_of_a_node_are_read_from_its_list_of_models(engine):
    engine.adapters = ["sql", "law"]
    observer = Readings()
    scraper = Scraper(observer)
    scraper.set_targets([ScrapeTarget.of(node_at(engine.port), pool_of("vllm", "sql", "law"))], 0.02)
    await observer.until(lambda: observer.readings)
    assert observer.readings["gpu-1"].beat.adapters == ("law", "sql")
    engine.adapters = ["law"]
    await observer.until(lambda: observer.readings["gpu-1"].beat.adapters == ("law",))
    await scraper.stop()

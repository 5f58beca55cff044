"""Fixtures that several folders share."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.support.servers import FLAVOURS, RedisServer
from tests.support.waiting import VirtualLoop

settings.register_profile("din", deadline=None)  # how long an example takes says more about the machine than about the code
settings.load_profile("din")


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loop of a test: one with a clock that jumps if the test is marked with `virtual_time`, or else the usual one."""
    return {"loop": VirtualLoop if item.get_closest_marker("virtual_time") else asyncio.new_event_loop}


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[dict[str, RedisServer]]:
    """One running server per flavour for the whole run. For tests that leave the server itself alone."""
    servers = {flavour: RedisServer(flavour=flavour) for flavour in FLAVOURS}
    try:
        yield {flavour: server.start() for flavour, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()

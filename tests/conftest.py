"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.servers import FLAVOURS, RedisServer

settings.register_profile("din", deadline=None)  # how long an example takes says more about the machine than about the code
settings.load_profile("din")


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[dict[str, RedisServer]]:
    """One running server per flavour for the whole run. For tests that leave the server itself alone."""
    servers = {flavour: RedisServer(flavour=flavour) for flavour in FLAVOURS}
    try:
        yield {flavour: server.start() for flavour, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()

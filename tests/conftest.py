"""Fixtures that several folders share."""

from collections.abc import Iterator

import pytest

from tests.servers import FLAVOURS, RedisServer


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[dict[str, RedisServer]]:
    """One running server per flavour for the whole run. For tests that leave the server itself alone."""
    servers = {flavour: RedisServer(flavour=flavour) for flavour in FLAVOURS}
    try:
        yield {flavour: server.start() for flavour, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()

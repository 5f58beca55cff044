"""Factory of Redis clients by URL: one server, the master behind Sentinel, or the masters of a cluster.

Invariant: the scheme selects the client, and a malformed URL is rejected before anything connects.
"""

from itertools import cycle
from urllib.parse import unquote, urlsplit

from din_extproc.edge.redis.address import Address, parse_redis_url
from din_extproc.edge.redis.cluster import ClusterLinks
from din_extproc.edge.redis.connection import LuaScript
from din_extproc.edge.redis.link import Link, Locate
from din_extproc.edge.redis.sentinel import make_master_locator, parse_members

_REDIS_PORT = 6379


def make_carrier(url: str, scripts: tuple[LuaScript, ...], *, timeout_ms: int, max_in_flight: int = 4096) -> Link | ClusterLinks:
    """Create the client of a URL. The caller starts and closes it.

    Args:
        url: `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service[/db]` or
            `redis+cluster://host:port,host:port`.
        scripts: Scripts to load on every new connection.
        timeout_ms: Maximum time without a reply.
        max_in_flight: Maximum unanswered commands per server.

    Raises:
        ValueError: the URL can't be read.
    """
    if urlsplit(url).scheme == "redis+cluster":
        return ClusterLinks(_list_seeds(url), scripts, timeout_ms=timeout_ms, max_in_flight=max_in_flight)
    return Link(make_locator(url), scripts, timeout_ms=timeout_ms, max_in_flight=max_in_flight)


def make_locator(url: str) -> Locate:
    """Return a function that locates a server to subscribe to: the server, the master, or the seeds of a cluster in rotation.

    Raises:
        ValueError: the URL can't be read.
    """
    scheme = urlsplit(url).scheme
    if scheme == "redis+sentinel":
        return make_master_locator(url)
    addresses = cycle(_list_seeds(url) if scheme == "redis+cluster" else (parse_redis_url(url),))

    async def locate() -> Address:
        return next(addresses)

    return locate


def _list_seeds(url: str) -> tuple[Address, ...]:
    login, _, hosts = urlsplit(url).netloc.rpartition("@")
    username, _, password = login.partition(":")
    if not hosts:
        raise ValueError("redis+cluster://host:port,host:port: hosts are needed")
    greeting = Address(host="", port=0, username=unquote(username), password=unquote(password))
    return tuple(greeting.with_host(*parse_members(host, _REDIS_PORT)) for host in hosts.split(","))

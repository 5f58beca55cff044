"""Discovery of the Redis master by Sentinel: `redis+sentinel://[user:password@]host:port,host:port/service[/db]`.

Invariant: Sentinel is queried for every connection, so a failover takes effect once the old master is lost or replies READONLY.
"""

import contextlib
from urllib.parse import unquote, urlsplit

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.address import Address
from din_extproc.edge.redis.link import Locate

_QUERY_TIMEOUT_S = 0.3
_OPTIONS = {"socket_timeout": _QUERY_TIMEOUT_S, "socket_connect_timeout": _QUERY_TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
_SENTINEL_PORT = 26379


def make_master_locator(url: str) -> Locate:
    """Return a function that locates the master of the URL's service.

    Raises:
        ValueError: The URL has no hosts or no service.
    """
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, _, db = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("redis+sentinel://host:port,host:port/service: hosts and service are needed")
    sentinels = [parse_members(host, _SENTINEL_PORT) for host in hosts.split(",")]
    greeting = Address(host="", port=0, db=int(db or 0), username=unquote(username), password=unquote(password))

    async def locate() -> Address:
        sentinel = Sentinel(sentinels, sentinel_kwargs=_OPTIONS)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(service)
        except (RedisError, OSError) as error:
            raise LimitsUnavailable(f"no master of {service}: {error}") from error
        finally:
            for client in sentinel.sentinels:
                with contextlib.suppress(RedisError, OSError):
                    await client.aclose()
        return greeting.with_host(host, port)

    return locate


def parse_members(text: str, default_port: int) -> tuple[str, int]:
    """Parse one `host` or `host:port` of a list; an IPv6 address is in brackets."""
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        return text.strip("[]"), default_port
    return host.strip("[]"), int(port)

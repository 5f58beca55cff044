"""Revoked API keys, shared by all replicas through Redis.

Invariant: a replica keeps every revocation it has read, even if Redis is lost. Revocations expire after one month; deploy the updated
key file before that.
"""

import time
from typing import Final

from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.ledger import Runner

_KEPT_S: Final = 30 * 86_400


class Revocations:
    """Store of the ids of revoked keys. Every method may raise `LimitsUnavailable`.

    Args:
        runner: The started client.
        network: Name of the network.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._key = f"{make_namespace(network)}revoked"

    async def add(self, key_id: str) -> None:
        """Revoke the key."""
        now = int(time.time())
        await self._runner.call("ZADD", self._key, now + _KEPT_S, key_id)
        await self._runner.call("ZREMRANGEBYSCORE", self._key, "-inf", now)
        await self._runner.call("EXPIRE", self._key, _KEPT_S)

    async def fetch_all(self) -> frozenset[str]:
        """Return the ids of all revoked keys."""
        return frozenset(key_id.decode() for key_id in await self._runner.call("ZRANGE", self._key, 0, -1))

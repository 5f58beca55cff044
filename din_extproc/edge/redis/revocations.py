"""Keys that were revoked, told to every replica through Redis.

Rule: what a replica has once heard it keeps, be Redis away or flushed; the file of keys has to say the same within a month.
"""

import time
from typing import Final

from din_extproc.edge.redis.ledger import Runner, namespace

_KEPT_S: Final = 30 * 86_400


class Revocations:
    """The ids of revoked keys. Every verb may raise `LimitsUnavailable`.

    Args:
        runner: the link.
        network: whose keys.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._key = f"{namespace(network)}revoked"

    async def add(self, key_id: str) -> None:
        """Refuse the key from now on."""
        now = int(time.time())
        await self._runner.call("ZADD", self._key, now + _KEPT_S, key_id)
        await self._runner.call("ZREMRANGEBYSCORE", self._key, "-inf", now)
        await self._runner.call("EXPIRE", self._key, _KEPT_S)

    async def known(self) -> frozenset[str]:
        """All of them."""
        return frozenset(key_id.decode() for key_id in await self._runner.call("ZRANGE", self._key, 0, -1))

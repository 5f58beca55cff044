"""The bell of those who wait: a key in Redis says that somebody does, and the scripts that give something back tell it on a channel.

Rule: where nobody waits there is no key, and nothing is told. There processes also tell each other what they grant, of what tenants
share, to those who waited: so weights hold over all of them.
"""

import contextlib
import secrets
from collections.abc import Callable
from typing import Final

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.ledger import WAITING, Names, Runner, forget

_GRANTED: Final = b"\0granted"
"""No key begins so."""
_PARTS: Final = 4
_ID_BYTES: Final = 6


class RedisWakeupChannel:
    """A `WakeupChannel` that rings in every process.

    Args:
        runner: the link.
        names: what keys begin with.
    """

    def __init__(self, runner: Runner, names: Names) -> None:
        self._runner = runner
        self._names = names
        self._tenants: dict[bytes, str | None] = {names.shared + WAITING: None}
        """By key."""
        self._own = secrets.token_hex(_ID_BYTES).encode()
        """Tells what this process has said itself."""

    def want(self, tenant: str, lasting_ms: int) -> None:
        """From now on, for so long, it has to ring for this tenant and for what all share."""
        key = self._names.of(tenant) + WAITING
        self._tenants[key] = tenant
        with contextlib.suppress(LimitsUnavailable):
            for each in (key, self._names.shared + WAITING):
                self._runner.call("SET", each, 1, "PX", lasting_ms).add_done_callback(forget)

    def granted(self, tenant: str, cost: float) -> None:
        """Tell other processes that the tenant has got so much, tokens by weight, of what tenants share."""
        message = b" ".join((_GRANTED, self._own, b"%.3f" % cost, tenant.encode()))
        with contextlib.suppress(LimitsUnavailable):
            self._runner.call("PUBLISH", self._names.channel, message).add_done_callback(forget)

    def heard(self, ring: Callable[[str | None], None], granted: Callable[[str, float], None]) -> Callable[[bytes], None]:
        """What to do with a message of the channel.

        Args:
            ring: for the tenant to which something came back; None: for what all share.
            granted: told what another process has granted to whom.
        """

        def hear(key: bytes) -> None:
            if key in self._tenants:
                ring(self._tenants[key])
                return
            told = key.split(b" ", _PARTS - 1)
            if len(told) == _PARTS and told[0] == _GRANTED and told[1] != self._own:
                with contextlib.suppress(ValueError):
                    granted(told[3].decode(), float(told[2]))

        return hear

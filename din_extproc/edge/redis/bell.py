"""The bell of those who wait: a key in Redis says that somebody does, and the scripts that give something back tell it on a channel.

Rule: where nobody waits there is no key, and nothing is told.
"""

import contextlib
from collections.abc import Callable

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.ledger import WAITING, Names, Runner, forget


class RedisBell:
    """A `Bell` that rings in every process.

    Args:
        runner: the link.
        names: what keys begin with.
    """

    def __init__(self, runner: Runner, names: Names) -> None:
        self._runner = runner
        self._names = names
        self._tenants: dict[bytes, str | None] = {names.shared + WAITING: None}
        """By key."""

    def want(self, tenant: str, lasting_ms: int) -> None:
        """From now on, for so long, it has to ring for this tenant and for what all share."""
        key = self._names.of(tenant) + WAITING
        self._tenants[key] = tenant
        with contextlib.suppress(LimitsUnavailable):
            for each in (key, self._names.shared + WAITING):
                self._runner.call("SET", each, 1, "PX", lasting_ms).add_done_callback(forget)

    def heard(self, ring: Callable[[str | None], None]) -> Callable[[bytes], None]:
        """What to do with a message of the channel: ring for the tenant; None: for what all share."""

        def hear(key: bytes) -> None:
            if key in self._tenants:
                ring(self._tenants[key])

        return hear

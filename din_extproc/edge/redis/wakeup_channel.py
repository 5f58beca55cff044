"""Wake-ups between processes: a key in Redis marks waiting requests, and the scripts that release resources publish to a channel.

Invariant: without waiting requests there is no key and no message. Processes also publish grants of shared limits to queued requests,
so that weights apply across processes.
"""

import contextlib
import secrets
from collections.abc import Callable
from typing import Final

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.redis.calls import WAITING, Names
from din_extproc.edge.redis.ledger import Runner, ignore_result

_GRANTED: Final = b"\0granted"
"""Prefix of a grant message; no key has it."""
_PARTS: Final = 4
_ID_BYTES: Final = 6


class RedisWakeupChannel:
    """A `WakeupChannel` across processes.

    Args:
        runner: The started client.
        names: Prefixes of keys.
    """

    def __init__(self, runner: Runner, names: Names) -> None:
        self._runner = runner
        self._names = names
        self._tenants: dict[bytes, str | None] = {names.shared + WAITING: None}
        """The tenant of each waiting key; None: shared by all tenants."""
        self._own = secrets.token_hex(_ID_BYTES).encode()
        """Id by which this process recognises its own messages."""

    def request_wakeup(self, tenant: str, lasting_ms: int) -> None:
        """Request wake-ups for the tenant and for shared limits for `lasting_ms`."""
        key = self._names.of(tenant) + WAITING
        self._tenants[key] = tenant
        with contextlib.suppress(LimitsUnavailable):
            for each in (key, self._names.shared + WAITING):
                self._runner.call("SET", each, 1, "PX", lasting_ms).add_done_callback(ignore_result)

    def announce_grant(self, tenant: str, cost: float) -> None:
        """Publish that the tenant was granted `cost` (tokens divided by weight) of shared limits."""
        message = b" ".join((_GRANTED, self._own, b"%.3f" % cost, tenant.encode()))
        with contextlib.suppress(LimitsUnavailable):
            self._runner.call("PUBLISH", self._names.channel, message).add_done_callback(ignore_result)

    def make_listener(self, on_freed: Callable[[str | None], None], on_granted: Callable[[str, float], None]) -> Callable[[bytes], None]:
        """Return the handler of messages of the channel.

        Args:
            on_freed: Called with the tenant whose resources were released; None: shared limits.
            on_granted: Called with the tenant and cost of a grant by another process.
        """

        def on_message(key: bytes) -> None:
            if key in self._tenants:
                on_freed(self._tenants[key])
                return
            parts = key.split(b" ", _PARTS - 1)
            if len(parts) == _PARTS and parts[0] == _GRANTED and parts[1] != self._own:
                with contextlib.suppress(ValueError):
                    on_granted(parts[3].decode(), float(parts[2]))

        return on_message

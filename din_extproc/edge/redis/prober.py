"""Election of the replica that probes the nodes, and exchange of node health between replicas.

Invariant: nothing waits for it. While Redis is unreachable every replica probes by itself.
"""

from typing import Final

import msgspec
from msgspec import Struct

from din_extproc.domain.health import ProbeResult
from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load_script

PROBER: Final = load_script("prober")
_NOT_THE_QUESTION: Final = -1
_ENCODER: Final = msgspec.msgpack.Encoder()


class ProberMessage(Struct, frozen=True):
    """Message from one replica to the others."""

    replica: str
    probes: tuple[ProbeResult, ...] = ()
    opened: dict[str, str] = {}
    """Nodes whose breaker the replica opened, with the reason."""
    busy: dict[str, float] = {}
    """Nodes that asked for a pause, with its length in seconds."""
    opened_for: dict[str, str] = {}
    """The tenant whose requests alone opened a node's breaker, where there is one."""
    stopped: tuple[str, ...] = ()
    """Origins of requests that are sent to no node any more."""


_DECODER: Final = msgspec.msgpack.Decoder(ProberMessage)


class ProberLease:
    """Lease on probing the nodes of one network, and the channel for node health.

    Args:
        runner: The started client.
        network: Name of the network; networks share no data.
        replica: Name of this process, unique in the network.
    """

    def __init__(self, runner: Runner, network: str, replica: str) -> None:
        self._runner = runner
        self._key = f"{make_namespace(network)}{{prober}}"
        self.replica = replica
        self.channel = f"{self._key}:said"

    async def acquire(self, lasts_ms: int) -> bool:
        """Take or extend the lease; 0 releases it. Return whether this replica holds it. Raise `LimitsUnavailable` without Redis."""
        return bool(await self._run(lasts_ms, b""))

    async def publish(self, message: ProberMessage) -> None:
        """Publish node health to the other replicas. Raise as `take` does."""
        await self._run(_NOT_THE_QUESTION, _ENCODER.encode(message))

    def on_message(self, message: bytes) -> ProberMessage | None:
        """Parse a message of the channel. Return None if it is this replica's own or malformed."""
        try:
            notice = _DECODER.decode(message)
        except msgspec.DecodeError:
            return None
        return None if notice.replica == self.replica else notice

    async def _run(self, lasts_ms: int, message: bytes) -> int:
        return int(await self._runner.run(PROBER, *bulks(1, self._key, self.replica, lasts_ms, self.channel, message)))

"""What replicas say to each other of their nodes' health, and which of them asks the nodes.

Rule: nothing waits for it: while Redis is away every replica asks for itself, and hears of what it missed by asking again.
"""

from typing import Final

import msgspec
from msgspec import Struct

from din_extproc.domain.health import ProbeResult
from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load, namespace

PROBER: Final = load("prober")
_NOT_THE_QUESTION: Final = -1
_ENCODER: Final = msgspec.msgpack.Encoder()


class ProberMessage(Struct, frozen=True):
    """What one replica tells the others."""

    replica: str
    probes: tuple[ProbeResult, ...] = ()
    opened: dict[str, str] = {}
    """Nodes whose breaker it has opened, with the reason."""
    busy: dict[str, float] = {}
    """Nodes that have asked it to be left alone, and for how many seconds."""


_DECODER: Final = msgspec.msgpack.Decoder(ProberMessage)


class ProberLease:
    """The right to ask the nodes of one network, and the channel of what is known of them.

    Args:
        runner: The started link.
        network: Networks of different names never see each other.
        replica: This process's name among all.
    """

    def __init__(self, runner: Runner, network: str, replica: str) -> None:
        self._runner = runner
        self._key = f"{namespace(network)}{{prober}}"
        self._replica = replica
        self.channel = f"{self._key}:said"

    async def take(self, lasts_ms: int) -> bool:
        """Be the one that asks, for so long from now on; 0: no longer. Raises `LimitsUnavailable` when Redis can't be asked."""
        return bool(await self._run(lasts_ms, b""))

    async def say(self, probes: tuple[ProbeResult, ...], opened: dict[str, str], busy: dict[str, float]) -> None:
        """Tell the others. Raises as `take` does."""
        await self._run(_NOT_THE_QUESTION, _ENCODER.encode(ProberMessage(self._replica, probes, opened, busy)))

    def heard(self, message: bytes) -> ProberMessage | None:
        """A message of the channel; None: it is this replica's own, or none that can be read."""
        try:
            said = _DECODER.decode(message)
        except msgspec.DecodeError:
            return None
        return None if said.replica == self._replica else said

    async def _run(self, lasts_ms: int, message: bytes) -> int:
        return int(await self._runner.run(PROBER, *bulks(1, self._key, self._replica, lasts_ms, self.channel, message)))

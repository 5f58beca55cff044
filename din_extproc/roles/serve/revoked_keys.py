"""Keys that were revoked, as a process that decides about requests knows them.

Rule: while Redis is away, what is known of them stays.
"""

import contextlib

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.background import Background
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.revocations import Revocations
from din_extproc.flow.request import WorkerContext

_LOOK_S = 0.2
"""A key is refused everywhere within a second of its revocation: five looks, so that four may fail or be late."""


class RevokedKeys:
    """Keeps a desk up to date.

    Args:
        link: What carries commands to Redis.
        network: Whose keys.
        desk: Told which keys are valid no more.
    """

    def __init__(self, link: Runner, network: str, desk: WorkerContext) -> None:
        self._revocations = Revocations(link, network)
        self._desk = desk

    async def start(self, background: Background) -> None:
        """Know them now, and look again and again."""
        await self._look()
        background.every(_LOOK_S, "looking for revoked keys", self._look)

    async def _look(self) -> None:
        with contextlib.suppress(LimitsUnavailable):
            self._desk.revoked |= await self._revocations.known()

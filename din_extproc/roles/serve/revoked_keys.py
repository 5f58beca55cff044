"""The revoked keys, as a worker knows them.

Rule: while Redis can't be reached, the known ones stay revoked.
"""

import contextlib

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.background import Background
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.revocations import Revocations
from din_extproc.flow.request import WorkerContext

_LOOK_S = 0.2
"""A revocation takes effect within a second: five polls, so that four may fail or be late."""


class RevokedKeys:
    """Polls revoked keys for a worker.

    Args:
        link: Runs Redis commands.
        network: The network of the keys.
        context: The worker's shared state, whose `revoked` is extended.
    """

    def __init__(self, link: Runner, network: str, context: WorkerContext) -> None:
        self._revocations = Revocations(link, network)
        self._context = context

    async def start(self, background: Background) -> None:
        """Read the revoked keys now and periodically."""
        await self._fetch_revocations()
        background.every(_LOOK_S, "reading revoked keys", self._fetch_revocations)

    async def _fetch_revocations(self) -> None:
        with contextlib.suppress(LimitsUnavailable):
            self._context.revoked |= await self._revocations.fetch_all()

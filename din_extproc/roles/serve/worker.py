"""What decides about requests in one process: the request plane, where requests wait, and who is to be refused by now.

Rule: it serves Envoy's calls and heeds news; it tells nobody anything by itself.
"""

from din_extproc.edge.background import Background
from din_extproc.edge.grpc.authorization import AuthorizationService
from din_extproc.edge.grpc.services import ExtProcService, GrpcService
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.decision_view import load_tokenizers
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.roles.serve.revoked_keys import RevokedKeys
from din_extproc.roles.serve.worker_queue import WorkerQueue
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.settings.settings import Settings


class Worker:
    """One process's own. `start` it after the first `use`, and `close` it.

    Args:
        settings: The configuration.
        link: What carries commands to Redis.
        ledger: The counters.
        background: Runs what is to be done again and again.
        counters: Told of verdicts.
    """

    def __init__(self, settings: Settings, link: Runner, ledger: GuardedLedger, background: Background, counters: DecisionCounters) -> None:
        self._background = background
        self._waits = WorkerQueue(settings, link, ledger, background)
        self.plane = RequestPlane(settings, ledger, background, counters, self._waits.room)
        self._revoked = RevokedKeys(link, settings.network, self.plane.desk)
        self.services: list[GrpcService] = [ExtProcService(self.plane.desk)]
        if self.plane.permits is not None:
            self.services.append(AuthorizationService(self.plane.permits.conductor))

    async def start(self) -> None:
        """From now on it may be asked."""
        self.plane.start()
        await self._revoked.start(self._background)

    async def use(self, settings: Settings) -> None:
        """Decide by this configuration from the next request on."""
        self.plane.use(settings, await load_tokenizers(settings))
        self._waits.use(settings)

    def heed(self, news: WorkerUpdate) -> None:
        """Know it from the next request on."""
        if news.turnover is not None:
            self.plane.turn(news.turnover)
        if news.standings is not None:
            self.plane.judge(news.standings)
        if news.readings:
            self.plane.hear(news.readings)
        if news.lessons is not None:
            self.plane.adopt(news.lessons)
        if news.shut is not None:
            self.plane.shut(shut=news.shut)

    async def close(self) -> None:
        """Whoever still waits is told that it is over."""
        await self._waits.room.close()

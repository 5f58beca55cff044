"""A worker: the parts of a process that decide about requests.

It owns the request plane, the admission queue and the list of revoked keys. `_handlers` is the table of what each part of a
`WorkerUpdate` changes; nothing else passes from the accounting process to the request plane.
"""

from collections.abc import Callable
from typing import Any

from din_extproc.edge.background import Background
from din_extproc.edge.grpc.ext_authz import ExtAuthzService
from din_extproc.edge.grpc.ext_proc import ExtProcService
from din_extproc.edge.grpc.services import GrpcService
from din_extproc.edge.redis.guard import GuardedLedger
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.decision_view import load_tokenizers
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.roles.serve.revoked_keys import RevokedKeys
from din_extproc.roles.serve.tenant_report import TenantReports
from din_extproc.roles.serve.worker_queue import WorkerQueue
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.settings.settings import Settings


class Worker:
    """The worker of this process. Call `start` after the first `reload`, and `close` at the end.

    Args:
        settings: The configuration.
        link: Runs Redis commands.
        ledger: The rate-limit counters.
        background: Runs periodic tasks.
        counters: Counts decisions.
        follow_config: Takes over the configuration with this fingerprint.
    """

    def __init__(
        self,
        settings: Settings,
        link: Runner,
        ledger: GuardedLedger,
        background: Background,
        counters: DecisionCounters,
        follow_config: Callable[[str], None],
    ) -> None:
        self._background = background
        self._queue = WorkerQueue(settings, link, ledger, background)
        self.plane = RequestPlane(settings, ledger, background, counters, self._queue.queue)
        self._revoked = RevokedKeys(link, settings.network, self.plane.context)
        self._reports = self.plane.context.reports = TenantReports(settings, link)
        self.services: list[GrpcService] = [ExtProcService(self.plane.context)]
        if self.plane.ext_authz_leases is not None:
            self.services.append(ExtAuthzService(self.plane.ext_authz_leases.factory))
        self._handlers: dict[str, Callable[[Any], None]] = {
            "membership": self.plane.selector.on_membership,
            "breakers": self.plane.selector.on_breakers,
            "stopped": self.plane.stop_requests,
            "readings": self.plane.selector.load.on_readings,
            "missing_adapters": self.plane.on_missing_adapters,
            "calibrations": self.plane.gauges.apply,
            "outputs": self.plane.outputs.merge,
            "paces": self.plane.selector.load.on_paces,
            "audit_blocked": self.plane.block_requests,
            "configuration": follow_config,
        }

    async def start(self) -> None:
        """Start periodic tasks and read the revoked keys."""
        self.plane.start()
        await self._revoked.start(self._background)

    async def reload(self, settings: Settings) -> None:
        """Decide by this configuration from the next request on."""
        self.plane.reload(settings, await load_tokenizers(settings))
        self._queue.reload(settings)
        self._reports.settings = settings

    def apply(self, update: WorkerUpdate) -> None:
        """Apply an update from the next request on."""
        update.apply(self._handlers)

    async def close(self) -> None:
        """Refuse the requests that still wait."""
        await self._queue.queue.close()

"""Slots of requests that other proxies were permitted to send on: renewed until their settlement, wherever that happens.

Rule: what is never heard of again is renewed no longer after `longest_s`.
"""

import asyncio

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.flow.ext_authz import ExtAuthzHandlerFactory
from din_extproc.flow.request import WorkerContext

_RENEWALS_PER_LEASE = 3
_AT_ONCE = 64
_BETWEEN_S = 0.005


class ExtAuthzLeases:
    """The permitted requests of one process.

    Args:
        desk: What decides.
        longest_s: How long a request may take.
    """

    def __init__(self, desk: WorkerContext, longest_s: float) -> None:
        self._desk = desk
        self._longest_s = longest_s
        self.conductor = ExtAuthzHandlerFactory(desk)

    def start(self, background: Background) -> None:
        """Renew from now on."""
        background.every(self._desk.lease_ms / 1000 / _RENEWALS_PER_LEASE, "renewing permits", self.renew)

    async def renew(self) -> None:
        """Renew what has not been settled; forget the rest."""
        permits = self.conductor.permits
        for at, (request_id, (tenant, since)) in enumerate(list(permits.items())):
            if at % _AT_ONCE == 0:
                await asyncio.sleep(_BETWEEN_S)
            if SystemClock.monotonic() - since > self._longest_s or not await self._renewed(tenant, request_id):
                del permits[request_id]

    async def _renewed(self, tenant: str, request_id: str) -> bool:
        try:
            return await self._desk.ledger.renew(tenant, request_id, self._desk.lease_ms)
        except LimitsUnavailable:
            return True

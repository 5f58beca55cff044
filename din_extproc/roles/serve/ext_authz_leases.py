"""Slots of requests that ext_authz has permitted: renewed until their settlement, in any process.

Rule: a request that is never settled is renewed for `longest_s` at most.
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
    """Renews the leases of the permitted requests of one process.

    Args:
        context: The worker's shared state.
        longest_s: Maximum duration of a request, in seconds.
    """

    def __init__(self, context: WorkerContext, longest_s: float) -> None:
        self._context = context
        self._longest_s = longest_s
        self.factory = ExtAuthzHandlerFactory(context)

    def start(self, background: Background) -> None:
        """Start renewing."""
        background.every(self._context.lease_ms / 1000 / _RENEWALS_PER_LEASE, "renewing ext_authz leases", self.renew)

    async def renew(self) -> None:
        """Renew the leases of requests that are not settled; forget the others."""
        permits = self.factory.permits
        for at, (request_id, (tenant, since)) in enumerate(list(permits.items())):
            if at % _AT_ONCE == 0:
                await asyncio.sleep(_BETWEEN_S)
            if SystemClock.monotonic() - since > self._longest_s or not await self._renew_lease(tenant, request_id):
                del permits[request_id]

    async def _renew_lease(self, tenant: str, request_id: str) -> bool:
        try:
            return await self._context.ledger.renew(tenant, request_id, self._context.lease_ms)
        except LimitsUnavailable:
            return True

"""Ledger with a fallback while Redis is unreachable: a local share of each limit, no limits, or no requests.

Invariant: a request is released and settled in the ledger that granted it. Releases and settlements that Redis missed are sent once it
is reachable again.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus, Settlement
from din_extproc.admit.local import LocalLedger, scale_claim
from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.connection import CommandUnanswered, RedisError, bulks
from din_extproc.edge.redis.ledger import RedisLedger, Runner, load_script

_log = logging.getLogger(__name__)

PRESENCE: Final = load_script("presence")
_BEAT_S: Final = 1.0
_PRESENT_MS: Final = 5000
_MOST_OWED: Final = 10_000
_ONLY_SLOTS: Final = -1
"""Instead of tokens: the slots are to be given back, the settlement follows."""
_LATER: Final = "TRYAGAIN"
"""Error of a cluster while the keys of a tenant migrate to another master."""
_UNMETERED: Final = Granted(RateLimitStatus(), roomy=True, recorded=False)


class OnError(StrEnum):
    """Policy while the counters are unreachable."""

    LOCAL_SHARE = "local_share"
    """Every deciding process enforces the limit divided by the number of such processes, in memory."""
    OPEN = "open"
    """All requests pass without accounting."""
    CLOSED = "closed"
    """All requests fail with `LimitsUnavailable`."""


def _is_budgeted(claim: Claim) -> bool:
    return any(window.enforced for window in claim.spending)


class GuardState(Struct, frozen=True):
    """How limits are enforced now, for the status page and metrics."""

    shared: bool
    """True: by the counters in Redis; False: by the policy."""
    since: float
    """Seconds since the epoch."""
    reason: str
    """Reason why limits are not shared; "" when they are."""
    replicas: int
    """Last known number of deciding processes: the workers of all sidecars, at least the workers of this sidecar."""


class GuardedLedger:
    """A `Ledger` that always answers in time. Call `start` before use and `close` at the end.

    Args:
        runner: The client that announces this process.
        shared: The ledger in Redis.
        local: The ledger in this process, for `local_share`.
        on_error: The policy.
        replica: Name of this process among all that share the limits.
        network: Name of the network.
        workers: Number of deciding processes of this sidecar; the minimum divisor of a limit.
        decides: Whether this process decides; the accounting process takes no share.
    """

    def __init__(
        self,
        runner: Runner,
        shared: RedisLedger,
        local: LocalLedger,
        on_error: OnError,
        replica: str,
        network: str = "",
        *,
        workers: int = 1,
        decides: bool = True,
    ) -> None:
        self._runner = runner
        self._shared = shared
        self._local = local
        self._on_error = on_error
        self._replica = replica
        self._replicas = f"{make_namespace(network)}replicas"
        self._workers = workers
        self._decides = decides
        self._owed: deque[tuple[str, str, int | None, int]] = deque(maxlen=_MOST_OWED)
        """Operations to send later: tenant, request, tokens to settle (`_ONLY_SLOTS`: release), their cost."""
        self._failed_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.state = GuardState(shared=True, since=time.time(), reason="", replicas=workers)

    async def start(self) -> None:
        """Announce this process and renew the announcement periodically."""
        with contextlib.suppress(LimitsUnavailable):
            await self._count_replicas()
        self._task = asyncio.get_running_loop().create_task(self._keep_checking(), name="limits guard")

    async def close(self) -> None:
        """Withdraw the announcement of this process. The client stays open."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(LimitsUnavailable):
            await self._runner.run(PRESENCE, *bulks(1, self._replicas, self._replica, 0))

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget, in Redis or by the policy.

        Raises:
            LimitsUnavailable: Redis is unreachable, and the policy is `closed`; or it is `local_share` and the claim has a hard budget, of
                which only the shared counters know the rest.
        """
        try:
            return await self._shared.reserve(claim)
        except LimitsUnavailable as error:
            if isinstance(error, CommandUnanswered):
                self._owed.append((claim.tenant, claim.request_id, None, 0))
            self._on_failure(str(error))
            if self._on_error is OnError.CLOSED or (self._on_error is OnError.LOCAL_SHARE and _is_budgeted(claim)):
                raise
            if self._on_error is OnError.OPEN:
                return _UNMETERED
            return await self._local.reserve(scale_claim(claim, self.state.replicas))

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Extend the lease of a running request; a renewal also restores an expired lease. Return False if the request has ended."""
        if self._local.has_record(tenant, request_id):
            return await self._local.renew(tenant, request_id, lease_ms)
        try:
            return await self._shared.renew(tenant, request_id, lease_ms)
        except LimitsUnavailable:
            return True

    async def release(self, tenant: str, request_id: str) -> None:
        """Release the slots; in Redis as soon as it is reachable."""
        if self._local.has_record(tenant, request_id):
            await self._local.release(tenant, request_id)
            return
        try:
            await self._shared.release(tenant, request_id)
        except LimitsUnavailable:
            self._owed.append((tenant, request_id, _ONLY_SLOTS, 0))

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens with the actual ones, once, and release the slots. Return True also if Redis receives it later."""
        return bool(await self.settle_all([Settlement(tenant, request_id, tokens, cost)]))

    async def settle_all(self, settlements: Sequence[Settlement]) -> int:
        """Settle several requests, each in the ledger that granted it. Those that Redis receives later count as settled."""
        settled, shared = 0, []
        for each in settlements:
            if self._local.has_record(each.tenant, each.request_id):
                settled += await self._local.settle(each.tenant, each.request_id, each.tokens)
            else:
                shared.append(each)
        try:
            return settled + await self._shared.settle_all(shared)
        except LimitsUnavailable:
            self._owed.extend((each.tenant, each.request_id, each.tokens, each.cost) for each in shared)
            return settled + len(shared)

    def _on_failure(self, reason: str) -> None:
        self._failed_at = time.monotonic()
        if self.state.shared:
            self.state = GuardState(shared=False, since=time.time(), reason=reason, replicas=self.state.replicas)
            _log.warning("limits are not shared (%s): %s among %d processes", reason, self._on_error, self.state.replicas)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self._local.sweep()
            try:
                await self._count_replicas()
                await self._settle_pending()
            except LimitsUnavailable as error:
                if not self._decides:  # other errors show in requests
                    self._on_failure(str(error))
                continue
            if not self.state.shared and time.monotonic() - self._failed_at > _BEAT_S:
                self.state = GuardState(shared=True, since=time.time(), reason="", replicas=self.state.replicas)
                _log.info("limits are shared again among %d processes", self.state.replicas)

    async def _count_replicas(self) -> None:
        """Announce this process if it decides, and read the number of deciding processes."""
        present = await self._runner.run(PRESENCE, *bulks(1, self._replicas, self._replica, _PRESENT_MS if self._decides else 0))
        replicas, before = max(self._workers, present), self.state
        if replicas != before.replicas:
            self.state = GuardState(shared=before.shared, since=before.since, reason=before.reason, replicas=replicas)

    async def _settle_pending(self) -> None:
        """Send pending releases and settlements. Those without a reply stay pending; repeating them is harmless."""
        while self._owed:
            tenant, request_id, tokens, cost = debt = self._owed.popleft()
            try:
                if tokens == _ONLY_SLOTS:
                    await self._shared.release(tenant, request_id)
                else:
                    await self._shared.settle(tenant, request_id, tokens, cost)
            except RedisError as error:
                if str(error).startswith(_LATER):
                    self._owed.append(debt)
                    return
                _log.warning("redis rejected a delayed release or settlement: %s", error)
            except LimitsUnavailable:
                self._owed.appendleft(debt)
                raise

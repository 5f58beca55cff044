"""What holds while Redis is away: each process that decides its share, everything, or nothing.

Rule: a request is released and settled where it was granted; what could not be said to Redis is said when it is back, once.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from enum import StrEnum
from typing import Final

from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus
from din_extproc.admit.local import LocalLedger, scale_claim
from din_extproc.edge.redis.connection import CommandUnanswered, RedisError, bulks
from din_extproc.edge.redis.ledger import RedisLedger, Runner, load, namespace

_log = logging.getLogger(__name__)

PRESENCE: Final = load("presence")
_BEAT_S: Final = 1.0
_PRESENT_MS: Final = 5000
_MOST_OWED: Final = 10_000
_ONLY_SLOTS: Final = -1
"""Instead of tokens: the slots are to be given back, the settlement follows."""
_LATER: Final = "TRYAGAIN"
"""What a cluster says while the tenant's keys are on their way to another master."""
_UNMETERED: Final = Granted(RateLimitStatus(), roomy=True)


class OnError(StrEnum):
    """The policy while the counters can't be reached."""

    LOCAL_SHARE = "local_share"
    """Every process that decides enforces limit / such processes, in memory."""
    OPEN = "open"
    """Everything passes, unmetered."""
    CLOSED = "closed"
    """Nothing passes: `LimitsUnavailable`."""


class GuardState(Struct, frozen=True):
    """How limits are enforced at the moment, for people and metrics."""

    shared: bool
    """By the counters in Redis; False: by the policy."""
    since: float
    """Seconds since the epoch."""
    reason: str
    """Why not shared; "" when shared."""
    replicas: int
    """Last known number of processes that decide by the limits: the workers of all sidecars. Never fewer than this sidecar's own."""


class GuardedLedger:
    """A `Ledger` that always answers in time. `start` it, `close` it.

    Args:
        runner: the link, for the presence of this process.
        shared: the ledger over that link.
        local: the counters of this process, for `local_share`.
        on_error: the policy.
        replica: this process's name among all that share the limits.
        network: whose limits they are.
        workers: how many processes of this sidecar decide: they share the limits, even when Redis never told of any other.
        decides: whether this process is one of them; one that only keeps accounts takes no share.
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
        self._replicas = f"{namespace(network)}replicas"
        self._workers = workers
        self._decides = decides
        self._owed: deque[tuple[str, str, int | None]] = deque(maxlen=_MOST_OWED)
        """Tenant, request, tokens to settle; None: to release."""
        self._failed_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.state = GuardState(shared=True, since=time.time(), reason="", replicas=workers)

    async def start(self) -> None:
        """Announce this process, and keep doing so."""
        with contextlib.suppress(LimitsUnavailable):
            await self._beat()
        self._task = asyncio.get_running_loop().create_task(self._tend(), name="limits guard")

    async def close(self) -> None:
        """Leave the count of replicas. The link stays open."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(LimitsUnavailable):
            await self._runner.run(PRESENCE, *bulks(1, self._replicas, self._replica, 0))

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget: in Redis, or as the policy has it.

        Raises:
            LimitsUnavailable: only under `closed`.
        """
        try:
            return await self._shared.reserve(claim)
        except LimitsUnavailable as error:
            if isinstance(error, CommandUnanswered):
                self._owed.append((claim.tenant, claim.request_id, None))
            self._failed(str(error))
            if self._on_error is OnError.CLOSED:
                raise
            if self._on_error is OnError.OPEN:
                return _UNMETERED
            return await self._local.reserve(scale_claim(claim, self.state.replicas))

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Keep the slots of a request that still runs. Missed once, the next renewal takes them again. False: it has ended, as is known."""
        if self._local.has_record(tenant, request_id):
            return await self._local.renew(tenant, request_id, lease_ms)
        try:
            return await self._shared.renew(tenant, request_id, lease_ms)
        except LimitsUnavailable:
            return True

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back, in Redis as soon as it is there."""
        if self._local.has_record(tenant, request_id):
            await self._local.release(tenant, request_id)
            return
        try:
            await self._shared.release(tenant, request_id)
        except LimitsUnavailable:
            self._owed.append((tenant, request_id, _ONLY_SLOTS))

    async def settle(self, tenant: str, request_id: str, tokens: int | None) -> bool:
        """Replace the reserved tokens by the actual ones, once, and give the slots back; True as well when Redis will be told later."""
        if self._local.has_record(tenant, request_id):
            return await self._local.settle(tenant, request_id, tokens)
        try:
            return await self._shared.settle(tenant, request_id, tokens)
        except LimitsUnavailable:
            self._owed.append((tenant, request_id, tokens))
            return True

    def _failed(self, reason: str) -> None:
        self._failed_at = time.monotonic()
        if self.state.shared:
            self.state = GuardState(shared=False, since=time.time(), reason=reason, replicas=self.state.replicas)
            _log.warning("limits are not shared (%s): %s among %d processes", reason, self._on_error, self.state.replicas)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self._local.sweep()
            try:
                await self._beat()
                await self._pay()
            except LimitsUnavailable as error:
                if not self._decides:  # the others learn it from requests
                    self._failed(str(error))
                continue
            if not self.state.shared and time.monotonic() - self._failed_at > _BEAT_S:
                self.state = GuardState(shared=True, since=time.time(), reason="", replicas=self.state.replicas)
                _log.info("limits are shared again among %d processes", self.state.replicas)

    async def _beat(self) -> None:
        """Say that this process decides, if it does, and learn how many do."""
        present = await self._runner.run(PRESENCE, *bulks(1, self._replicas, self._replica, _PRESENT_MS if self._decides else 0))
        replicas, before = max(self._workers, present), self.state
        if replicas != before.replicas:
            self.state = GuardState(shared=before.shared, since=before.since, reason=before.reason, replicas=replicas)

    async def _pay(self) -> None:
        """Say what could not be said. What Redis does not answer stays owed: saying it twice is harmless."""
        while self._owed:
            tenant, request_id, tokens = debt = self._owed.popleft()
            try:
                if tokens == _ONLY_SLOTS:
                    await self._shared.release(tenant, request_id)
                else:
                    await self._shared.settle(tenant, request_id, tokens)
            except RedisError as error:
                if str(error).startswith(_LATER):
                    self._owed.append(debt)
                    return
                _log.warning("redis refused what was owed to a request: %s", error)
            except LimitsUnavailable:
                self._owed.appendleft(debt)
                raise

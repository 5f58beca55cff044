"""The counters in Redis, shared by every replica: the `Ledger` port over a link and four scripts.

Rule: every key of a tenant lives under one hash tag that no tenant name can forge, and every key a script touches is declared.
"""

import asyncio
import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, Standing
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.connection import Argument
from din_extproc.edge.redis.link import Script


def load(name: str) -> Script:
    """The script `lua/<name>.lua`."""
    return Script(files("din_extproc.edge.redis").joinpath("lua", f"{name}.lua").read_bytes())


ADMIT: Final = load("admit")
SETTLE: Final = load("settle")
RELEASE: Final = load("release")
RENEW: Final = load("renew")
SCRIPTS: Final = (ADMIT, SETTLE, RELEASE, RENEW)

_DIMENSIONS: Final = ("", "rpm", "tpm", "max_streams", "oversize")
_LONGEST_PLAIN_TENANT: Final = 64
_REMEMBERED: Final = 8192
"""Requests whose scopes are known without asking Redis; older ones cost one look-up when they end."""
_UNLIMITED: Final = Granted(Standing())


class Runner(Protocol):
    """What carries the commands: a `Link`, or one link per master of a cluster."""

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Ask for one command's answer."""

    def run(self, script: Script, *tail: Argument) -> asyncio.Future[Any]:
        """Run a script: number of keys, keys, arguments."""


class _Keys(Struct, frozen=True):
    """Where one request's budgets are counted."""

    counters: tuple[str, ...]
    leases: tuple[str, ...]


class _Plan(Struct, frozen=True):
    """What is the same for all requests of one tenant with the same budgets."""

    record: str
    """The record's key, but for the request id."""
    keys: _Keys
    key_count: int
    """Of the reservation: record, counters, leases."""
    limits: tuple[Argument, ...]
    """Per budget: scope, rpm, tpm, max_streams."""
    budgets: tuple[Budget, ...]


class Record(Struct, array_like=True, frozen=True):
    """A request's record as the scripts pack it (MessagePack)."""

    expires_ms: int
    tokens: int
    state: int
    reply: tuple[int, ...]
    charges: tuple[int, ...]
    scopes: tuple[str, ...]


_RECORD: Final = msgspec.msgpack.Decoder(Record)


def tag(tenant: str) -> str:
    """The tenant's hash tag: its name percent-encoded, a long one hashed. Two tenants never share one."""
    plain = quote(tenant, safe="", errors="surrogatepass")
    if len(plain) <= _LONGEST_PLAIN_TENANT:
        return "{t=" + plain + "}"
    return "{h=" + hashlib.sha256(plain.encode()).hexdigest() + "}"


@lru_cache(maxsize=262_144)
def _prefix(tenant: str) -> str:
    return f"din:{tag(tenant)}:"


def _keys(tenant: str, scopes: tuple[str, ...]) -> _Keys:
    prefix = _prefix(tenant)
    return _Keys(tuple(f"{prefix}count:{scope}" for scope in scopes), tuple(f"{prefix}lease:{scope}" for scope in scopes))


@lru_cache(maxsize=65_536)
def _plan(tenant: str, budgets: tuple[Budget, ...]) -> _Plan:
    limited = tuple(b for b in budgets if (b.limits.rpm, b.limits.tpm, b.limits.max_streams) != (None, None, None))
    limits: list[Argument] = []
    for budget in limited:
        limits += (budget.scope, budget.limits.rpm or 0, budget.limits.tpm or 0, budget.limits.max_streams or 0)
    keys = _keys(tenant, tuple(budget.scope for budget in limited))
    return _Plan(f"{_prefix(tenant)}request:", keys, 2 * len(limited) + 1, tuple(limits), limited)


class RedisLedger:
    """A `Ledger` that all replicas share.

    Args:
        runner: the started link.
        now: for tests only: the time in ms that the scripts take instead of Redis TIME. "" in production.
    """

    def __init__(self, runner: Runner, now: Argument = "") -> None:
        self._runner = runner
        self.now = now
        self._keys: dict[str, _Keys] = {}
        """Of the latest requests, by record key."""

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget. Given up before the answer came: what it took is given back."""
        plan = _plan(claim.tenant, claim.budgets)
        if not plan.budgets:
            return _UNLIMITED
        record = plan.record + claim.request_id
        keys = plan.keys
        future = self._runner.run(
            ADMIT,
            plan.key_count,
            record,
            *keys.counters,
            *keys.leases,
            self.now,
            claim.request_id,
            claim.tokens,
            claim.lease_ms,
            *plan.limits,
        )
        try:
            reply = await future
        except LimitsUnavailable:
            raise
        except BaseException:
            future.cancel()
            self._undo(record, keys, claim.request_id)
            raise
        if reply[0] != 1:
            return Denied(plan.budgets[reply[1] - 1].scope, _DIMENSIONS[reply[2]], reply[3], reply[4], _standing(reply))
        if not reply[1]:
            self._remember(record, keys)
        return Granted(_standing(reply))

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> None:
        """Keep the slots of a request that still runs."""
        record = f"{_prefix(tenant)}request:{request_id}"
        keys = await self._known(tenant, record)
        if keys is not None:
            await self._run(RENEW, len(keys.leases) + 1, record, *keys.leases, self.now, request_id, lease_ms)

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back: the request has ended."""
        record = f"{_prefix(tenant)}request:{request_id}"
        keys = await self._known(tenant, record)
        if keys is not None:
            await self._run(RELEASE, len(keys.leases) + 1, record, *keys.leases, self.now, request_id)

    async def settle(self, tenant: str, request_id: str, tokens: int) -> bool:
        """Replace the reserved tokens by the actual ones, both ways, once. False: unknown, expired or already settled."""
        record = f"{_prefix(tenant)}request:{request_id}"
        keys = await self._known(tenant, record)
        if keys is None:
            return False
        self._keys.pop(record, None)
        return bool(await self._run(SETTLE, len(keys.counters) + 1, record, *keys.counters, self.now, tokens))

    async def _run(self, script: Script, *tail: Argument) -> Any:
        future = self._runner.run(script, *tail)
        try:
            return await future
        finally:
            future.cancel()

    async def _known(self, tenant: str, record: str) -> _Keys | None:
        """The request's keys: remembered, or looked up in its record."""
        keys = self._keys.get(record)
        if keys is not None:
            return keys
        future = self._runner.call("GET", record)
        try:
            found = await future
        finally:
            future.cancel()
        return _keys(tenant, _RECORD.decode(found).scopes) if found else None

    def _remember(self, record: str, keys: _Keys) -> None:
        if len(self._keys) >= _REMEMBERED:
            del self._keys[next(iter(self._keys))]
        self._keys[record] = keys

    def _undo(self, record: str, keys: _Keys, request_id: str) -> None:
        """Nobody waits for the verdict any more: give back what it may take. Sent after it on the same connection."""
        for script, some, argument in ((RELEASE, keys.leases, request_id), (SETTLE, keys.counters, 0)):
            try:
                future = self._runner.run(script, len(some) + 1, record, *some, self.now, argument)
            except LimitsUnavailable:
                return
            future.add_done_callback(_forget)


def _forget(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not miss anybody who does."""
    if not future.cancelled():
        future.exception()


def _standing(reply: list[int]) -> Standing:
    limit_requests, remaining_requests, reset_requests, limit_tokens, remaining_tokens, reset_tokens = reply[5:]
    return Standing(
        limit_requests=limit_requests if limit_requests >= 0 else None,
        remaining_requests=remaining_requests if limit_requests >= 0 else None,
        reset_requests_ms=reset_requests if limit_requests >= 0 else None,
        limit_tokens=limit_tokens if limit_tokens >= 0 else None,
        remaining_tokens=remaining_tokens if limit_tokens >= 0 else None,
        reset_tokens_ms=reset_tokens if limit_tokens >= 0 else None,
    )

"""The counters in Redis, shared by every replica: the `Ledger` port over a link and four scripts.

Rule: every key of a tenant lives under one hash tag that no tenant name can forge, and every key a script touches is declared.
"""

import asyncio
import contextlib
import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, Standing
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.connection import Argument, Script, bulk, bulks


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

    def run(self, script: Script, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script: `count` bulk strings (number of keys, keys, arguments)."""


class _Keys(Struct, frozen=True):
    """Where one request's budgets are counted, as bulk strings."""

    budgets: int
    one_each: bytes
    """The number of keys: the record's and one per budget."""
    counters: bytes
    leases: bytes

    def call(self, each: bytes, record: bytes, *arguments: bytes) -> tuple[int, bytes]:
        """A script's call over the record and one key per budget: how many bulk strings, and they."""
        return self.budgets + 2 + len(arguments), b"".join((self.one_each, record, each, *arguments))


class _Plan(Struct, frozen=True):
    """What is the same for all requests of one tenant with the same budgets."""

    keys: _Keys
    count: int
    """Arguments of the reservation."""
    start: bytes
    """Its number of keys."""
    middle: bytes
    """Between the record's key and the request's own arguments: counters, leases; per budget scope, rpm, tpm, max_streams."""
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


def _prefix(tenant: str) -> str:
    return f"din:{tag(tenant)}:"


@lru_cache(maxsize=65_536)
def _record_prefix(tenant: str) -> bytes:
    return f"{_prefix(tenant)}request:".encode()


def _keys(tenant: str, scopes: tuple[str, ...]) -> _Keys:
    prefix = _prefix(tenant)
    return _Keys(
        budgets=len(scopes),
        one_each=bulk(b"%d" % (len(scopes) + 1)),
        counters=bulks(*(f"{prefix}count:{scope}" for scope in scopes))[1],
        leases=bulks(*(f"{prefix}lease:{scope}" for scope in scopes))[1],
    )


@lru_cache(maxsize=65_536)
def _plan(tenant: str, budgets: tuple[Budget, ...]) -> _Plan:
    limited = tuple(b for b in budgets if (b.limits.rpm, b.limits.tpm, b.limits.max_streams) != (None, None, None))
    keys = _keys(tenant, tuple(budget.scope for budget in limited))
    limits: list[Argument] = []
    for budget in limited:
        limits += (budget.scope, budget.limits.rpm or 0, budget.limits.tpm or 0, budget.limits.max_streams or 0)
    return _Plan(
        keys=keys,
        count=6 + 6 * len(limited),
        start=bulk(b"%d" % (2 * len(limited) + 1)),
        middle=keys.counters + keys.leases + bulks(*limits)[1],
        budgets=limited,
    )


class RedisLedger:
    """A `Ledger` that all replicas share.

    Args:
        runner: the started link.
        now: for tests only: the time in ms that the scripts take instead of Redis TIME. "" in production.
    """

    def __init__(self, runner: Runner, now: Argument = "") -> None:
        self._runner = runner
        self._keys: dict[bytes, _Keys] = {}
        """Of the latest requests, by record key."""
        self.read_clock(now)

    def read_clock(self, now: Argument) -> None:
        """For tests only: from here on it is `now`, in ms."""
        self._now = bulks(now)[1]

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget. Given up before the answer came: what it took is given back."""
        plan = _plan(claim.tenant, claim.budgets)
        if not plan.budgets:
            return _UNLIMITED
        record, request_id = _record_key(claim.tenant, claim.request_id)
        numbers = b"$%d\r\n%d\r\n$%d\r\n%d\r\n" % (len(str(claim.tokens)), claim.tokens, len(str(claim.lease_ms)), claim.lease_ms)
        future = self._runner.run(ADMIT, plan.count, b"".join((plan.start, record, plan.middle, self._now, request_id, numbers)))
        try:
            reply = await future
        except LimitsUnavailable:
            raise
        except BaseException:
            future.cancel()
            self._undo(plan.keys, record, request_id)
            raise
        if reply[0] != 1:
            return Denied(plan.budgets[reply[1] - 1].scope, _DIMENSIONS[reply[2]], reply[3], reply[4], _standing(reply))
        if not reply[1]:
            self._remember(record, plan.keys)
        return Granted(_standing(reply))

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> None:
        """Keep the slots of a request that still runs."""
        record, name = _record_key(tenant, request_id)
        keys = await self._known(tenant, record)
        if keys is not None:
            await self._runner.run(RENEW, *keys.call(keys.leases, record, self._now, name, bulk(b"%d" % lease_ms)))

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back: the request has ended."""
        record, name = _record_key(tenant, request_id)
        keys = await self._known(tenant, record)
        if keys is not None:
            await self._runner.run(RELEASE, *keys.call(keys.leases, record, self._now, name))

    async def settle(self, tenant: str, request_id: str, tokens: int) -> bool:
        """Replace the reserved tokens by the actual ones, both ways, once. False: unknown, expired or already settled."""
        record, _ = _record_key(tenant, request_id)
        keys = await self._known(tenant, record)
        if keys is None:
            return False
        self._keys.pop(record, None)
        return bool(await self._runner.run(SETTLE, *keys.call(keys.counters, record, self._now, bulk(b"%d" % tokens))))

    async def _known(self, tenant: str, record: bytes) -> _Keys | None:
        """The request's keys: remembered, or looked up in its record."""
        keys = self._keys.get(record)
        if keys is not None:
            return keys
        found = await self._runner.call("GET", record[record.index(b"\n") + 1 : -2])
        return _keys(tenant, _RECORD.decode(found).scopes) if found else None

    def _remember(self, record: bytes, keys: _Keys) -> None:
        if len(self._keys) >= _REMEMBERED:
            del self._keys[next(iter(self._keys))]
        self._keys[record] = keys

    def _undo(self, keys: _Keys, record: bytes, request_id: bytes) -> None:
        """Nobody waits for the verdict any more: give back what it may take. Sent after it on the same connection."""
        with contextlib.suppress(LimitsUnavailable):
            self._runner.run(RELEASE, *keys.call(keys.leases, record, self._now, request_id)).add_done_callback(_forget)
            self._runner.run(SETTLE, *keys.call(keys.counters, record, self._now, bulk(b"0"))).add_done_callback(_forget)


def _record_key(tenant: str, request_id: str) -> tuple[bytes, bytes]:
    """The key of the request's record, and the request's id, as bulk strings."""
    name = request_id.encode()
    return bulk(_record_prefix(tenant) + name), bulk(name)


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

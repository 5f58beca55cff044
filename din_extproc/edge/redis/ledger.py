"""The counters in Redis, shared by every replica: the `Ledger` port over a link and four scripts.

Rule: every key of a tenant lives under one hash tag that no tenant name can forge, and every key a script touches is declared.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.connection import Argument, LuaScript, bulk, bulks


def load(name: str) -> LuaScript:
    """The script `lua/<name>.lua`."""
    return LuaScript(files("din_extproc.edge.redis").joinpath("lua", f"{name}.lua").read_bytes())


ADMIT: Final = load("admit")
SETTLE: Final = load("settle")
RELEASE: Final = load("release")
RENEW: Final = load("renew")
SCRIPTS: Final = (ADMIT, SETTLE, RELEASE, RENEW)

_DIMENSIONS: Final = ("", "rpm", "tpm", "max_streams", "oversize")
_LONGEST_PLAIN_TENANT: Final = 64
_REMEMBERED: Final = 8192
"""Requests whose scopes are known without asking Redis; older ones cost one look-up when they end."""
_UNLIMITED: Final = Granted(RateLimitStatus(), roomy=True)


class Runner(Protocol):
    """What carries the commands: a `Link`, or one link per master of a cluster."""

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Ask for one command's answer."""

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script: `count` bulk strings (number of keys, keys, arguments)."""


class Charge(Struct, array_like=True, frozen=True):
    """What one budget holds of a request: the note in its record, so that every replica can end it."""

    scope: str
    tpm: int
    """0: no tokens were charged."""
    max_streams: int
    """0: no slot was taken."""
    shared: bool = False
    """Charged to the counters of the network."""
    counted: bool = False
    """The request has a place in the budget's window."""


class Names(Struct, frozen=True):
    """What keys begin with."""

    network: str = ""
    one_slot: bool = False
    """All keys of the network under one hash tag, so that a cluster can count for all tenants at once."""

    def of(self, tenant: str) -> bytes:
        """The tenant's own keys."""
        return f"{namespace(self.network)}{'{n}' if self.one_slot else ''}{tag(tenant)}:".encode()

    @property
    def channel(self) -> str:
        """Where those who wait hear that something came back."""
        return f"{namespace(self.network)}freed"

    @property
    def shared(self) -> bytes:
        """The keys that all tenants share. No tenant's hash tag is `n`."""
        return f"{namespace(self.network)}{{n}}:".encode()


class _Counted(Struct, frozen=True):
    """The counters that a settlement changes, as bulk strings."""

    number: int
    all_keys: bytes
    """The number of keys; then, after the record's, the counters, those of who waits, and the leases."""
    counters: bytes
    limits: bytes
    """Which of them give a place back, and their tpm."""


class _End(Struct, frozen=True):
    """How a request of certain budgets is renewed, released and settled, as bulk strings; `_PREFIX` stands for the tenant's."""

    slots: int
    slot_keys: bytes
    """The number of keys of a renewal; then, after the record's, the leases."""
    leases: bytes
    release_keys: bytes
    """The number of keys of a release; then, after the record's, those of who waits, and the leases."""
    waits: int
    waiting: bytes
    """Keys that are there while somebody waits."""
    waits_told: bytes
    """How many these are."""
    used: "_Counted"
    """For a settlement."""
    unused: "_Counted"
    """For one of a request that reached no node."""

    def renewal(self, request: "_Request", now: bytes, lease: bytes) -> tuple[int, bytes]:
        """The renewing script's call: how many bulk strings, and they."""
        leases = self.leases.replace(_PREFIX, request.prefix)
        return self.slots + 5, b"".join((self.slot_keys, request.record, leases, now, request.id, lease))

    def release(self, request: "_Request", now: bytes, channel: bytes) -> tuple[int, bytes]:
        """The releasing script's call."""
        keys = (self.waiting + self.leases).replace(_PREFIX, request.prefix)
        arguments = (now, request.id, channel, self.waits_told)
        return self.slots + self.waits + 6, b"".join((self.release_keys, request.record, keys, *arguments))

    def settlement(self, request: "_Request", now: bytes, tokens: int | None, channel: bytes) -> tuple[int, bytes]:
        """The settling script's call. Tokens None: no node was reached."""
        counted = self.unused if tokens is None else self.used
        keys = (counted.counters + self.waiting + self.leases).replace(_PREFIX, request.prefix)
        arguments = (now, bulk(b"%d" % (tokens or 0)), request.id, channel, self.waits_told, counted.limits)
        return 2 * counted.number + self.slots + self.waits + 8, b"".join((counted.all_keys, request.record, keys, *arguments))


class _Plan(Struct, frozen=True):
    """What is the same for all requests with the same budgets, as bulk strings; `_PREFIX` stands for the tenant's."""

    count: int
    """Bulk strings of the reservation."""
    start: bytes
    """Its number of keys."""
    keys: bytes
    """Counters and leases."""
    limits: bytes
    """rpm, tpm, max_streams of each budget, which of them are enforced, and the note."""
    scopes: tuple[str, ...]
    end: _End


class _Request(Struct, frozen=True, gc=False):
    """One request's names."""

    prefix: bytes
    """What all keys of its tenant begin with."""
    record: bytes
    """The key of its record, a bulk string."""
    id: bytes
    """A bulk string."""

    @classmethod
    def of(cls, prefix: bytes, request_id: str) -> "_Request":
        name = request_id.encode()
        return cls(prefix, bulk(b"%brequest:%b" % (prefix, name)), bulk(name))


_PREFIX: Final = b"\0"
_PLAIN: Final = Names()
WAITING: Final = b"waiting"
"""After a prefix: the key that is there while somebody waits."""
_NOTE: Final = msgspec.msgpack.Decoder(tuple[Charge, ...])
_NOTE_AT: Final = 73
"""Bytes of a record before its note."""
_OLD_NOTE_AT: Final = 65
"""The same without the time of admission, as records were before: no time begins with a byte over 127, every note does."""


def namespace(network: str) -> str:
    """What every key of a network begins with. A network's name has no brace: a key without one has no network."""
    return f"din:{network}:" if network else "din:"


def tag(tenant: str) -> str:
    """The tenant's hash tag: its name percent-encoded, a long one hashed. Two tenants never share one."""
    plain = quote(tenant, safe="", errors="surrogatepass")
    if len(plain) <= _LONGEST_PLAIN_TENANT:
        return "{t=" + plain + "}"
    return "{h=" + hashlib.sha256(plain.encode()).hexdigest() + "}"


def _keys(prefix_length: int, shared: bytes, kind: bytes, charges: Sequence[Charge]) -> bytes:
    """Keys as bulk strings; the tenant's prefix is still to be filled in."""
    keys = []
    for charge in charges:
        name = b"%b:%b" % (kind, charge.scope.encode())
        if charge.shared:
            keys.append(bulk(shared + name))
        else:
            keys.append(b"$%d\r\n%b%b\r\n" % (prefix_length + len(name), _PREFIX, name))
    return b"".join(keys)


@lru_cache(maxsize=16_384)
def _end(prefix_length: int, shared: bytes, charges: tuple[Charge, ...]) -> _End:
    slots = [charge for charge in charges if charge.max_streams]
    waiting = [b"$%d\r\n%b%b\r\n" % (prefix_length + len(WAITING), _PREFIX, WAITING)]
    if any(charge.shared for charge in charges):
        waiting.append(bulk(shared + WAITING))

    def counted(chosen: list[Charge], places: str) -> _Counted:
        return _Counted(
            number=len(chosen),
            all_keys=bulks(1 + len(chosen) + len(waiting) + len(slots))[1],
            counters=_keys(prefix_length, shared, b"count", chosen),
            limits=bulks(places, *(charge.tpm for charge in chosen))[1],
        )

    both = [charge for charge in charges if charge.tpm or charge.counted]
    return _End(
        slots=len(slots),
        slot_keys=bulks(1 + len(slots))[1],
        leases=_keys(prefix_length, shared, b"lease", slots),
        release_keys=bulks(1 + len(waiting) + len(slots))[1],
        waits=len(waiting),
        waiting=b"".join(waiting),
        waits_told=bulks(len(waiting))[1],
        used=counted([charge for charge in charges if charge.tpm], ""),
        unused=counted(both, "".join(str(int(charge.counted)) for charge in both)),
    )


def _charge(budget: Budget) -> Charge:
    limits = budget.limits
    return Charge(budget.scope, limits.tpm or 0, limits.max_streams or 0, shared=budget.shared, counted=limits.rpm is not None)


@lru_cache(maxsize=16_384)
def _plan(prefix_length: int, shared: bytes, budgets: tuple[Budget, ...]) -> _Plan:
    counted = [budget for budget in budgets if any(budget.limits.as_tuple)]
    charges = tuple(_charge(budget) for budget in counted)
    numbers = [number or 0 for budget in counted for number in budget.limits.as_tuple]
    enforced = "" if all(budget.enforced for budget in counted) else "".join(str(int(budget.enforced)) for budget in counted)
    count, packed = bulks(*numbers, enforced, msgspec.msgpack.encode(charges))
    return _Plan(
        count=6 + 2 * len(charges) + count,
        start=bulks(1 + 2 * len(charges))[1],
        keys=_keys(prefix_length, shared, b"count", charges) + _keys(prefix_length, shared, b"lease", charges),
        limits=packed,
        scopes=tuple(charge.scope for charge in charges),
        end=_end(prefix_length, shared, charges),
    )


class RedisLedger:
    """A `Ledger` that all replicas share.

    Args:
        runner: the started link.
        now: for tests only: the time in ms that the scripts take instead of Redis TIME. "" in production.
        names: what its keys begin with.
    """

    def __init__(self, runner: Runner, now: Argument = "", names: Names = _PLAIN) -> None:
        self._runner = runner
        self._prefix_of = lru_cache(maxsize=262_144)(names.of)
        self._shared = names.shared
        self._channel = bulk(names.channel.encode())
        self._held: dict[tuple[str, str], tuple[_Request, _End]] = {}
        """Of the latest requests, by tenant and id."""
        self.read_clock(now)

    def read_clock(self, now: Argument) -> None:
        """For tests only: from here on it is `now`, in ms."""
        self._now = bulks(now)[1]

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget. Given up before the answer came: what it took is given back."""
        request = _Request.of(self._prefix_of(claim.tenant), claim.request_id)
        plan = _plan(len(request.prefix), self._shared, claim.budgets)
        if not plan.scopes:
            return _UNLIMITED
        keys = plan.keys.replace(_PREFIX, request.prefix)
        numbers = bulk(b"%d" % claim.tokens) + bulk(b"%d" % claim.lease_ms)
        tail = b"".join((plan.start, request.record, keys, plan.limits, self._now, request.id, numbers))
        future = self._runner.run(ADMIT, plan.count, tail)
        try:
            reply = await future
        except LimitsUnavailable:
            raise
        except BaseException:
            future.cancel()
            self._undo(plan.end, request)
            raise
        if not reply[0]:
            return _denied(plan, reply)
        if reply[0] != 1 or not reply[1]:
            if len(self._held) >= _REMEMBERED:
                del self._held[next(iter(self._held))]
            self._held[claim.tenant, claim.request_id] = request, plan.end
        if reply[0] == 1:
            return Granted(_standing(reply), roomy=reply[2] == 1)
        return Granted(_standing(reply), _denied(plan, reply))

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Keep the slots of a request that still runs. False: it is unknown, or has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is None:
            return False
        request, end = held
        return bool(await self._runner.run(RENEW, *end.renewal(request, self._now, bulk(b"%d" % lease_ms))))

    async def release(self, tenant: str, request_id: str) -> None:
        """Give the slots back: the request has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is not None:
            request, end = held
            await self._runner.run(RELEASE, *end.release(request, self._now, self._channel))

    async def settle(self, tenant: str, request_id: str, tokens: int | None) -> bool:
        """Replace the reserved tokens by the actual ones, both ways, once, and give back slots still held. False: unknown or settled.

        Tokens None: no node was reached, so the request's places in the windows come back as well.
        """
        held = self._held.pop((tenant, request_id), None) or await self._look_up(tenant, request_id)
        if held is None:
            return False
        request, end = held
        return bool(await self._runner.run(SETTLE, *end.settlement(request, self._now, tokens, self._channel)))

    async def _look_up(self, tenant: str, request_id: str) -> tuple[_Request, _End] | None:
        """How a request is ended that is not remembered: its record says."""
        request = _Request.of(self._prefix_of(tenant), request_id)
        found = await self._runner.call("GET", request.record[request.record.index(b"\n") + 1 : -2])
        if not found:
            return None
        note = found[_NOTE_AT if found[_OLD_NOTE_AT:] < b"\x80" else _OLD_NOTE_AT :]
        return request, _end(len(request.prefix), self._shared, _NOTE.decode(note))

    def _undo(self, end: _End, request: _Request) -> None:
        """Nobody waits for the verdict any more: give back what it may take. Sent after it on the same connection."""
        with contextlib.suppress(LimitsUnavailable):
            self._runner.run(SETTLE, *end.settlement(request, self._now, None, self._channel)).add_done_callback(forget)


def forget(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not miss anybody who does."""
    if not future.cancelled():
        future.exception()


def _denied(plan: _Plan, reply: list[int]) -> Denied:
    return Denied(plan.scopes[reply[1] - 1], _DIMENSIONS[reply[2]], reply[3], reply[4], _standing(reply))


def _standing(reply: list[int]) -> RateLimitStatus:
    limit_requests, remaining_requests, reset_requests, limit_tokens, remaining_tokens, reset_tokens = reply[5:]
    return RateLimitStatus(
        limit_requests=limit_requests if limit_requests >= 0 else None,
        remaining_requests=remaining_requests if limit_requests >= 0 else None,
        reset_requests_ms=reset_requests if limit_requests >= 0 else None,
        limit_tokens=limit_tokens if limit_tokens >= 0 else None,
        remaining_tokens=remaining_tokens if limit_tokens >= 0 else None,
        reset_tokens_ms=reset_tokens if limit_tokens >= 0 else None,
    )

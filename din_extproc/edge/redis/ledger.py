"""`Ledger` in Redis, shared by all replicas: four Lua scripts over one client.

Invariant: all keys of a tenant have one hash tag that no tenant name can forge, and every key that a script accesses is declared.
"""

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus
from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.connection import Argument, LuaScript, bulk, bulks


def load_script(name: str) -> LuaScript:
    """Load the script `lua/<name>.lua`."""
    return LuaScript(files("din_extproc.edge.redis").joinpath("lua", f"{name}.lua").read_bytes())


ADMIT: Final = load_script("admit")
SETTLE: Final = load_script("settle")
RELEASE: Final = load_script("release")
RENEW: Final = load_script("renew")
SCRIPTS: Final = (ADMIT, SETTLE, RELEASE, RENEW)

_DIMENSIONS: Final = ("", "rpm", "tpm", "max_streams", "oversize", "token_budget", "cost_budget")
_TOKEN_BUDGET: Final = 5
_LONGEST_PLAIN_TENANT: Final = 64
_REMEMBERED: Final = 8192
"""Number of requests whose budgets are remembered; older requests cost one look-up when they end."""
_UNLIMITED: Final = Granted(RateLimitStatus(), roomy=True, recorded=False)


class Runner(Protocol):
    """A client that sends commands: a `Link`, or one link per master of a cluster."""

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply."""

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script with `count` bulk strings: number of keys, keys, arguments."""


class Charge(Struct, array_like=True, frozen=True):
    """The charge of a request to one budget. The record of the request holds all charges, so that any replica can end it."""

    scope: str
    tpm: int
    """Limit of tokens per minute; 0: no tokens were charged."""
    max_streams: int
    """Limit of concurrent streams; 0: no slot was taken."""
    shared: bool = False
    """The charge went to counters that all tenants share."""
    counted: bool = False
    """The request has a place in the budget's window."""
    spends: bool = False
    """The charge went to what may be spent in a period."""


class Names(Struct, frozen=True):
    """Prefixes of keys."""

    network: str = ""
    one_slot: bool = False
    """All keys of the network have one hash tag, so that a cluster can charge limits shared by all tenants."""

    def of(self, tenant: str) -> bytes:
        """Return the prefix of the keys of a tenant."""
        return f"{make_namespace(self.network)}{'{n}' if self.one_slot else ''}{make_hash_tag(tenant)}:".encode()

    @property
    def channel(self) -> str:
        """Return the name of the channel that announces released resources to waiting requests."""
        return f"{make_namespace(self.network)}freed"

    @property
    def shared(self) -> bytes:
        """Return the prefix of the keys that all tenants share. No tenant has the hash tag `n`."""
        return f"{make_namespace(self.network)}{{n}}:".encode()


class _Counted(Struct, frozen=True):
    """The counters that a settlement changes, as bulk strings."""

    number: int
    all_keys: bytes
    """The number of keys; then, after the record's, the counters, those of who waits, of periods, and the leases."""
    counters: bytes
    places: bytes
    """Which of them give a place back."""
    limits: bytes
    """Their tpm."""


class _End(Struct, frozen=True):
    """Encoded parts of the calls that end requests with the same budgets. `_PREFIX` is a placeholder for the tenant's prefix."""

    slots: int
    slot_keys: bytes
    """Number of keys of a renewal. The keys are the record and the leases."""
    leases: bytes
    release_keys: bytes
    """Number of keys of a release. The keys are the record, the waiting keys and the leases."""
    waits: int
    waiting: bytes
    """Keys that exist while requests wait."""
    waits_told: bytes
    """Number of waiting keys, as an argument."""
    spends: int
    spending: bytes
    """Keys of what may be spent in a period."""
    spends_told: bytes
    """Number of these keys, as an argument."""
    used: "_Counted"
    """For a settlement."""
    unused: "_Counted"
    """For one of a request that reached no node."""

    def renewal(self, request: "_Request", now: bytes, lease: bytes) -> tuple[int, bytes]:
        """Return the number of bulk strings of the renew call, and the strings."""
        leases = self.leases.replace(_PREFIX, request.prefix)
        return self.slots + 5, b"".join((self.slot_keys, request.record, leases, now, request.id, lease))

    def release(self, request: "_Request", now: bytes, channel: bytes) -> tuple[int, bytes]:
        """Return the same for the release call."""
        keys = (self.waiting + self.leases).replace(_PREFIX, request.prefix)
        arguments = (now, request.id, channel, self.waits_told)
        return self.slots + self.waits + 6, b"".join((self.release_keys, request.record, keys, *arguments))

    def settlement(self, request: "_Request", now: bytes, tokens: int | None, cost: int, channel: bytes) -> tuple[int, bytes]:
        """Return the same for the settle call. Tokens None: no node was reached."""
        counted = self.unused if tokens is None else self.used
        keys = (counted.counters + self.waiting + self.spending + self.leases).replace(_PREFIX, request.prefix)
        spent = bulk(b"%d" % cost), self.spends_told
        arguments = (now, bulk(b"%d" % (tokens or 0)), request.id, channel, self.waits_told, counted.places, *spent, counted.limits)
        count = 2 * counted.number + self.slots + self.waits + self.spends + 10
        return count, b"".join((counted.all_keys, request.record, keys, *arguments))


class _Plan(Struct, frozen=True):
    """Encoded parts of the reserve call of requests with the same budgets. `_PREFIX` is a placeholder for the tenant's prefix."""

    count: int
    """Number of bulk strings of the call."""
    start: bytes
    """Number of keys of the call."""
    keys: bytes
    """Keys of the counters and leases."""
    limits: bytes
    """Number of budgets, the rpm, tpm and max_streams of each, the enforced ones, and the charges for the record."""
    periods: bytes
    """Times and limits of what may be spent in periods."""
    scopes: tuple[str, ...]
    end: _End


class _Request(Struct, frozen=True, gc=False):
    """Keys and id of one request."""

    prefix: bytes
    """Prefix of the keys of its tenant."""
    record: bytes
    """Key of its record as a bulk string."""
    id: bytes
    """Its id as a bulk string."""

    @classmethod
    def of(cls, prefix: bytes, request_id: str) -> "_Request":
        name = request_id.encode()
        return cls(prefix, bulk(b"%brequest:%b" % (prefix, name)), bulk(name))


_PREFIX: Final = b"\0"
_PLAIN: Final = Names()
WAITING: Final = b"waiting"
"""Suffix of the key that exists while requests wait."""
_NOTE: Final = msgspec.msgpack.Decoder(tuple[Charge, ...])
_NOTE_BYTE: Final = 128
"""No note begins with a smaller byte."""
_NOTE_AT: Final = 73
"""Offset of the charges in a record."""
_OLD_NOTE_AT: Final = 65
"""The same without the time of admission, as records were before: no time begins with a byte over 127, every note does."""
_SPENT_NOTE_AT: Final = 81
"""The same with the cost, which no record without a charge to a period has: no cost begins with a byte over 127."""


def make_namespace(network: str) -> str:
    """Return the prefix of all keys of a network. Names of networks contain no brace, so keys without a network are distinct."""
    return f"din:{network}:" if network else "din:"


def make_hash_tag(tenant: str) -> str:
    """Return the hash tag of a tenant: the percent-encoded name, or a hash of a long name. It is unique per tenant."""
    plain = quote(tenant, safe="", errors="surrogatepass")
    if len(plain) <= _LONGEST_PLAIN_TENANT:
        return "{t=" + plain + "}"
    return "{h=" + hashlib.sha256(plain.encode()).hexdigest() + "}"


def _make_keys(prefix_length: int, shared: bytes, kind: bytes, charges: Sequence[Charge]) -> bytes:
    """Encode keys as bulk strings with a placeholder for the tenant's prefix."""
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
    spending = [charge for charge in charges if charge.spends]
    slots = [charge for charge in charges if charge.max_streams]
    waiting = [b"$%d\r\n%b%b\r\n" % (prefix_length + len(WAITING), _PREFIX, WAITING)]
    if any(charge.shared for charge in charges):
        waiting.append(bulk(shared + WAITING))

    def counted(chosen: list[Charge], places: str) -> _Counted:
        return _Counted(
            number=len(chosen),
            all_keys=bulks(1 + len(chosen) + len(waiting) + len(spending) + len(slots))[1],
            counters=_make_keys(prefix_length, shared, b"count", chosen),
            places=bulks(places)[1],
            limits=bulks(*(charge.tpm for charge in chosen))[1] if chosen else b"",
        )

    both = [charge for charge in charges if charge.tpm or charge.counted]
    return _End(
        slots=len(slots),
        slot_keys=bulks(1 + len(slots))[1],
        leases=_make_keys(prefix_length, shared, b"lease", slots),
        release_keys=bulks(1 + len(waiting) + len(slots))[1],
        waits=len(waiting),
        waiting=b"".join(waiting),
        waits_told=bulks(len(waiting))[1],
        spends=len(spending),
        spending=_make_keys(prefix_length, shared, b"spend", spending),
        spends_told=bulks(len(spending))[1],
        used=counted([charge for charge in charges if charge.tpm], ""),
        unused=counted(both, "".join(str(int(charge.counted)) for charge in both)),
    )


def _make_charge(budget: Budget) -> Charge:
    limits = budget.limits
    return Charge(budget.scope, limits.tpm or 0, limits.max_streams or 0, shared=budget.shared, counted=limits.rpm is not None)


@lru_cache(maxsize=16_384)
def _plan(prefix_length: int, shared: bytes, budgets: tuple[Budget, ...], spending: tuple[SpendingWindow, ...]) -> _Plan:
    counted = [budget for budget in budgets if any(budget.limits.as_tuple)]
    charges = tuple(_make_charge(budget) for budget in counted)
    spends = tuple(Charge(window.scope, 0, 0, shared=window.shared, spends=True) for window in spending)
    numbers = [number or 0 for budget in counted for number in budget.limits.as_tuple]
    enforcement = [budget.enforced for budget in counted] + [window.enforced for window in spending]
    enforced = "" if all(enforcement) else "".join(str(int(each)) for each in enforcement)
    count, packed = bulks(len(counted), *numbers, enforced, msgspec.msgpack.encode((*charges, *spends)))
    periods = [number for window in spending for number in (*window.starts, window.tokens, window.cost)]
    parts = (b"count", charges), (b"spend", spends), (b"lease", charges)
    return _Plan(
        count=6 + 2 * len(charges) + len(spends) + count + 2 * bool(spends),
        start=bulks(1 + 2 * len(charges) + len(spends))[1],
        keys=b"".join(_make_keys(prefix_length, shared, kind, each) for kind, each in parts),
        limits=packed,
        periods=bulk(struct.pack(f">{len(periods)}d", *periods)),
        scopes=tuple(charge.scope for charge in (*charges, *spends)),
        end=_end(prefix_length, shared, (*charges, *spends)),
    )


class RedisLedger:
    """A `Ledger` shared by all replicas.

    Args:
        runner: The started client.
        now: Tests only: the time in ms that replaces Redis TIME in the scripts; "" in production.
        names: Prefixes of its keys.
    """

    def __init__(self, runner: Runner, now: Argument = "", names: Names = _PLAIN) -> None:
        self._runner = runner
        self._prefix_of = lru_cache(maxsize=262_144)(names.of)
        self._shared = names.shared
        self._channel = bulk(names.channel.encode())
        self._held: dict[tuple[str, str], tuple[_Request, _End]] = {}
        """Calls of the latest requests, by tenant and request id."""
        self.read_clock(now)

    def read_clock(self, now: Argument) -> None:
        """Set the time in ms; tests only."""
        self._now = bulks(now)[1]

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget. If the caller is cancelled before the reply, the charge is undone."""
        request = _Request.of(self._prefix_of(claim.tenant), claim.request_id)
        plan = _plan(len(request.prefix), self._shared, claim.budgets, claim.spending)
        if not plan.scopes:
            return _UNLIMITED
        keys = plan.keys.replace(_PREFIX, request.prefix)
        numbers = bulk(b"%d" % claim.tokens) + bulk(b"%d" % claim.lease_ms)
        if claim.spending:
            numbers = b"".join((numbers, bulk(b"%d" % claim.cost), plan.periods))
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
            return _read_denial(plan, reply)
        if reply[0] != 1 or not reply[1]:
            if len(self._held) >= _REMEMBERED:
                del self._held[next(iter(self._held))]
            self._held[claim.tenant, claim.request_id] = request, plan.end
        if reply[0] == 1:
            return Granted(_read_status(reply), roomy=reply[2] == 1)
        denied = _read_denial(plan, reply)
        if reply[2] >= _TOKEN_BUDGET:
            denied = msgspec.structs.replace(denied, status=msgspec.structs.replace(denied.status, exceeded=denied.scope))
        return Granted(denied.status, denied)

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Extend the lease of a running request. Return False if it is unknown or has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is None:
            return False
        request, end = held
        return bool(await self._runner.run(RENEW, *end.renewal(request, self._now, bulk(b"%d" % lease_ms))))

    async def release(self, tenant: str, request_id: str) -> None:
        """Release the slots of a request that has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is not None:
            request, end = held
            await self._runner.run(RELEASE, *end.release(request, self._now, self._channel))

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens and cost with the actual ones, once, and release its slots. Return False if unknown or settled.

        Tokens None: no node was reached, so the request's places in the windows come back as well.
        """
        held = self._held.pop((tenant, request_id), None) or await self._look_up(tenant, request_id)
        if held is None:
            return False
        request, end = held
        return bool(await self._runner.run(SETTLE, *end.settlement(request, self._now, tokens, cost, self._channel)))

    async def _look_up(self, tenant: str, request_id: str) -> tuple[_Request, _End] | None:
        """Build the calls of a request that is not remembered from its record."""
        request = _Request.of(self._prefix_of(tenant), request_id)
        found = await self._runner.call("GET", request.record[request.record.index(b"\n") + 1 : -2])
        if not found:
            return None
        at = next(at for at in (_OLD_NOTE_AT, _NOTE_AT, _SPENT_NOTE_AT) if found[at] >= _NOTE_BYTE)
        return request, _end(len(request.prefix), self._shared, _NOTE.decode(found[at:]))

    def _undo(self, end: _End, request: _Request) -> None:
        """Undo a reservation whose caller was cancelled. Redis runs this after the reservation on the same connection."""
        with contextlib.suppress(LimitsUnavailable):
            self._runner.run(SETTLE, *end.settlement(request, self._now, None, 0, self._channel)).add_done_callback(ignore_result)


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _read_denial(plan: _Plan, reply: list[int]) -> Denied:
    return Denied(plan.scopes[reply[1] - 1], _DIMENSIONS[reply[2]], reply[3], reply[4], _read_status(reply))


def _read_status(reply: list[int]) -> RateLimitStatus:
    limit_requests, remaining_requests, reset_requests, limit_tokens, remaining_tokens, reset_tokens = reply[5:]
    return RateLimitStatus(
        limit_requests=limit_requests if limit_requests >= 0 else None,
        remaining_requests=remaining_requests if limit_requests >= 0 else None,
        reset_requests_ms=reset_requests if limit_requests >= 0 else None,
        limit_tokens=limit_tokens if limit_tokens >= 0 else None,
        remaining_tokens=remaining_tokens if limit_tokens >= 0 else None,
        reset_tokens_ms=reset_tokens if limit_tokens >= 0 else None,
    )

"""The calls of the ledger's scripts as encoded bulk strings, with everything that requests of the same budgets share made once.

Invariant: all keys of a tenant have one hash tag that no tenant name can forge, and every key that a script accesses is declared.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from din_extproc.domain.spending import SpendingWindow
from din_extproc.domain.tenant import Budget
from din_extproc.edge.redis.connection import bulk, bulks

_LONGEST_PLAIN_TENANT: Final = 64


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


class _CountedKeys(Struct, frozen=True):
    """The counters that a settlement changes, as bulk strings."""

    number: int
    """Of keys that all requests share."""
    keys: bytes
    """The counters, those of who waits and of periods. `PREFIX` is a placeholder for the tenant's prefix."""
    arguments: bytes
    """The number of each kind, which counters give a place back, and their tpm."""
    count: int
    """Number of arguments that all requests share, with the time and the channel."""


class EndCalls(Struct, frozen=True):
    """Encoded parts of the calls that end requests with the same budgets. `PREFIX` is a placeholder for the tenant's prefix."""

    slots: int
    slot_keys: bytes
    """Number of keys of a renewal. The keys are the record and the leases."""
    leases: bytes
    release_keys: bytes
    """Number of keys of a release. The keys are the record, the waiting keys and the leases."""
    waits: int
    waiting: bytes
    """Keys that exist while requests wait."""
    waiting_count: bytes
    """Number of waiting keys, as an argument."""
    used: "_CountedKeys"
    """For a settlement."""
    unused: "_CountedKeys"
    """For one of a request that reached no node."""

    def renewal(self, request: "RequestKeys", now: bytes, lease: bytes) -> tuple[int, bytes]:
        """Return the number of bulk strings of the renew call, and the strings."""
        leases = self.leases.replace(PREFIX, request.prefix)
        return self.slots + 5, b"".join((self.slot_keys, request.record, leases, now, request.id, lease))

    def release(self, request: "RequestKeys", now: bytes, channel: bytes) -> tuple[int, bytes]:
        """Return the same for the release call."""
        keys = (self.waiting + self.leases).replace(PREFIX, request.prefix)
        arguments = (now, request.id, channel, self.waiting_count)
        return self.slots + self.waits + 6, b"".join((self.release_keys, request.record, keys, *arguments))

    def settlement(self, prefix: bytes, ended: Sequence["EndedRequest"], now: bytes, channel: bytes) -> tuple[int, bytes]:
        """Return the same for the settle call. Either all requests have reached a node or none."""
        counted = self.unused if ended[0].tokens is None else self.used
        keys = (counted.keys + self.leases).replace(PREFIX, prefix)
        number = len(ended) + counted.number + self.slots
        parts = [bulk(b"%d" % number), *(each.request.record for each in ended), keys, now, channel, counted.arguments]
        for each in ended:
            parts += each.request.id, bulk(b"%d" % (each.tokens or 0)), bulk(b"%d" % each.cost)
        return 1 + number + counted.count + 3 * len(ended), b"".join(parts)


class ReserveCall(Struct, frozen=True):
    """Encoded parts of the reserve call of requests with the same budgets. `PREFIX` is a placeholder for the tenant's prefix."""

    count: int
    """Number of bulk strings of the call."""
    start: bytes
    """Number of keys of the call."""
    keys: bytes
    """Keys of the counters and leases."""
    limits: bytes
    """The rpm, tpm and max_streams of each budget, the enforced ones, and the charges for the record."""
    periods: bytes
    """Times and limits of what may be spent in periods; empty if there is none."""
    scopes: tuple[str, ...]
    end: EndCalls


class RequestKeys(Struct, frozen=True, gc=False):
    """Keys and id of one request."""

    prefix: bytes
    """Prefix of the keys of its tenant."""
    record: bytes
    """Key of its record as a bulk string."""
    id: bytes
    """Its id as a bulk string."""

    @classmethod
    def of(cls, prefix: bytes, request_id: str) -> "RequestKeys":
        """Encode the key and id of a request. `prefix` is that of its tenant's keys."""
        name = request_id.encode()
        return cls(prefix, bulk(b"%brequest:%b" % (prefix, name)), bulk(name))


class EndedRequest(Struct, frozen=True, gc=False):
    """One request with its actual tokens, None if it reached no node, and its actual cost."""

    request: RequestKeys
    tokens: int | None
    cost: int


PREFIX: Final = b"\0"
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
            keys.append(b"$%d\r\n%b%b\r\n" % (prefix_length + len(name), PREFIX, name))
    return b"".join(keys)


@lru_cache(maxsize=16_384)
def make_end_calls(prefix_length: int, shared: bytes, charges: tuple[Charge, ...]) -> EndCalls:
    """Encode what the calls that end requests with these charges share. `shared` is the prefix of the keys that all tenants share."""
    spending = [charge for charge in charges if charge.spends]
    slots = [charge for charge in charges if charge.max_streams]
    waiting = [b"$%d\r\n%b%b\r\n" % (prefix_length + len(WAITING), PREFIX, WAITING)]
    if any(charge.shared for charge in charges):
        waiting.append(bulk(shared + WAITING))

    def counted(chosen: list[Charge], places: str) -> _CountedKeys:
        sizes = bytes((len(chosen), len(waiting), len(spending)))
        count, arguments = bulks(sizes, places, *(charge.tpm for charge in chosen))
        counters, periods = (_make_keys(prefix_length, shared, kind, each) for kind, each in ((b"count", chosen), (b"spend", spending)))
        return _CountedKeys(sum(sizes), b"".join((counters, *waiting, periods)), arguments, 2 + count)

    both = [charge for charge in charges if charge.tpm or charge.counted]
    return EndCalls(
        slots=len(slots),
        slot_keys=bulks(1 + len(slots))[1],
        leases=_make_keys(prefix_length, shared, b"lease", slots),
        release_keys=bulks(1 + len(waiting) + len(slots))[1],
        waits=len(waiting),
        waiting=b"".join(waiting),
        waiting_count=bulks(len(waiting))[1],
        used=counted([charge for charge in charges if charge.tpm], ""),
        unused=counted(both, "".join(str(int(charge.counted)) for charge in both)),
    )


def _make_charge(budget: Budget) -> Charge:
    limits = budget.limits
    return Charge(budget.scope, limits.tpm or 0, limits.max_streams or 0, shared=budget.shared, counted=limits.rpm is not None)


def _pack_doubles(numbers: Sequence[float]) -> bytes:
    return struct.pack(f">{len(numbers)}d", *numbers)


@lru_cache(maxsize=16_384)
def make_reserve_call(prefix_length: int, shared: bytes, budgets: tuple[Budget, ...], spending: tuple[SpendingWindow, ...]) -> ReserveCall:
    """Encode what the reserve calls of requests with these budgets share. `shared` is the prefix of the keys that all tenants share."""
    counted = [budget for budget in budgets if any(budget.limits.as_tuple)]
    charges = tuple(_make_charge(budget) for budget in counted)
    spends = tuple(Charge(window.scope, 0, 0, shared=window.shared, spends=True) for window in spending)
    numbers = [number or 0 for budget in counted for number in budget.limits.as_tuple]
    enforcement = [budget.enforced for budget in counted] + [window.enforced for window in spending]
    enforced = "" if all(enforcement) else "".join(str(int(each)) for each in enforcement)
    count, packed = bulks(_pack_doubles(numbers), enforced, msgspec.msgpack.encode((*charges, *spends)))
    periods = [number for window in spending for number in (*window.starts, window.tokens, window.cost)]
    parts = (b"count", charges), (b"spend", spends), (b"lease", charges)
    return ReserveCall(
        count=5 + 2 * len(charges) + len(spends) + count + bool(spends),
        start=bulks(1 + 2 * len(charges) + len(spends))[1],
        keys=b"".join(_make_keys(prefix_length, shared, kind, each) for kind, each in parts),
        limits=packed,
        periods=bulk(_pack_doubles(periods)) if spends else b"",
        scopes=tuple(charge.scope for charge in (*charges, *spends)),
        end=make_end_calls(prefix_length, shared, (*charges, *spends)),
    )


def read_charges(record: bytes) -> tuple[Charge, ...]:
    """Return the charges that the record of a request holds."""
    at = next(at for at in (_OLD_NOTE_AT, _NOTE_AT, _SPENT_NOTE_AT) if record[at] >= _NOTE_BYTE)
    return _NOTE.decode(record[at:])

"""Usage by day in Redis, summed over all replicas, for billing.

Invariant: a portion is added once, even if its reply is lost. Durability depends on the persistence settings of Redis.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load_script
from din_extproc.observe.usage_book import UsageKey, UsageTotals

USAGE: Final = load_script("usage")
KEPT_DAYS: Final = 400
"""Retention: one year plus one month for billing."""
_KEPT_S: Final = KEPT_DAYS * 86_400
_LINES: Final = 200
"""Maximum rows of one portion."""
_PAGE: Final = 2000
_FIELDS: Final = UsageTotals.__struct_fields__


class UsagePortion(Struct, frozen=True):
    """Usage that one replica counted on one day, with a sequence number that prevents double counting."""

    day: str
    number: int
    amounts: tuple[tuple[str, int], ...]


def split_by_day(used: Mapping[UsageKey, UsageTotals], first: int) -> Iterator[UsagePortion]:
    """Split usage into portions; `first` is the number of the first portion."""
    by_day: dict[str, list[tuple[str, int]]] = {}
    for line, sums in used.items():
        parts = [part.replace("\t", " ") for part in (line.tenant, line.model, line.key_id, line.rule)]
        while len(parts) > 2 and not parts[-1]:  # noqa: PLR2004 - as fields were named before there were keys and rules
            parts.pop()
        name = "\t".join((*parts, ""))
        by_day.setdefault(line.day, []).extend([(name + field, getattr(sums, field)) for field in _FIELDS if getattr(sums, field)])
    number = first
    for day, amounts in by_day.items():
        for start in range(0, len(amounts), _LINES):
            yield UsagePortion(day, number, tuple(amounts[start : start + _LINES]))
            number += 1


class UsageStore:
    """Store of the usage of one network. Every method may raise `LimitsUnavailable`.

    Args:
        runner: The started client.
        network: Name of the network.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._prefix = f"{make_namespace(network)}{{usage}}:"

    async def add(self, replica: str, portion: UsagePortion) -> None:
        """Add a portion unless it was added before."""
        key = f"{self._prefix}{portion.day}"
        flat = [part for amount in portion.amounts for part in amount]
        await self._runner.run(USAGE, *bulks(2, key, f"{key}:portions", replica, portion.number, _KEPT_S, *flat))

    async def read_day(self, day: str) -> dict[UsageKey, UsageTotals]:
        """Return the usage of one day, read page by page."""
        found: dict[UsageKey, UsageTotals] = {}
        async for name, amount in self._read_fields(day):
            tenant, model, *rest, field = name.decode().split("\t")
            if field in _FIELDS:
                used = found.setdefault(UsageKey(day, tenant, model, *rest), UsageTotals())
                setattr(used, field, int(amount))
        return found

    async def _read_fields(self, day: str) -> AsyncIterator[tuple[bytes, bytes]]:
        seen: dict[bytes, bytes] = {}
        cursor: Any = 0
        while True:
            cursor, page = await self._runner.call("HSCAN", f"{self._prefix}{day}", cursor, "COUNT", _PAGE)
            seen |= dict(zip(page[::2], page[1::2], strict=True))  # HSCAN may return a field twice
            if int(cursor) == 0:
                break
        for name, amount in seen.items():
            yield name, amount

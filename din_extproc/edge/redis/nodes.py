"""The node table in Redis, which every replica of a network shares: rows by compare and set, changes by a channel and by revision.

Rule: a change may be heard or missed, the table is what counts: whoever is unsure asks for what has changed since the last revision
that is certain.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load, namespace
from din_extproc.registry.row import NodeRecord

PUT: Final = load("node_put")
SWEEP: Final = load("node_sweep")
CHANGES: Final = load("node_changes")
NODE_SCRIPTS: Final = (PUT, SWEEP, CHANGES)

_PAGE: Final = 500
"""Nodes per question: a reply of this size does not keep Redis from others for long."""
_KEYS: Final = ("rows", "living", "changes", "table", "places", "graves")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(NodeRecord)


class NodeChange(Struct, frozen=True):
    """What has become of one node."""

    node_id: str
    revision: int
    alive: bool
    packed: bytes

    @property
    def row(self) -> NodeRecord | None:
        """Its row, None: it is no more. Read only when somebody asks: most of what a writer hears is its own."""
        return _row(self.packed, self.revision)


class RowWritten(Struct, frozen=True):
    """The row is in the table now."""

    revision: int


class RowConflict(Struct, frozen=True):
    """Another row is there than the writer had seen. None: none at all."""

    row: NodeRecord | None
    alive: bool


class PlaceTaken(Struct, frozen=True):
    """The place belongs to another living node."""

    owner: str


class Changes(Struct, frozen=True):
    """A page of changes, oldest first."""

    now: float
    """Seconds since the epoch, by the clock of Redis."""
    era: int
    """Changes when Redis has lost the table; 0: there is none."""
    revision: int
    """The newest of the whole table."""
    found: tuple[NodeChange, ...]
    last: bool
    """There are no more."""


class NodeStore:
    """The shared table of one network.

    Args:
        runner: The started link.
        network: Networks of different names never see each other.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        prefix = f"{namespace(network)}{{nodes}}"
        self.channel = f"{prefix}:said"
        self._count, self._keys = bulks(len(_KEYS), *(f"{prefix}:{name}" for name in _KEYS))

    async def put(self, row: NodeRecord, lasts_ms: int = 0) -> RowWritten | RowConflict | PlaceTaken:
        """Replace the row that has `row.revision`; 0: there is none.

        Args:
            row: As it should be.
            lasts_ms: How long the node lives without another word; 0: as long as it does already.

        Raises:
            LimitsUnavailable: Redis can't be asked.
        """
        packed = row.address_and_model.encode() + b"\n" + _ENCODER.encode(replace(row, revision=0))
        return await self._put(row.id, row.revision, packed, lasts_ms)

    async def remove(self, row: NodeRecord) -> RowWritten | RowConflict | PlaceTaken:
        """Take the row out of the table. Raises as `put` does."""
        return await self._put(row.id, row.revision, b"", 0)

    async def sweep(self, forget_ms: int) -> None:
        """Give up who was not heard of in time, forget who is dead for so long. Raises as `put` does."""
        count, tail = bulks(self.channel, forget_ms, _PAGE)
        await self._runner.run(SWEEP, self._count + count, self._keys + tail)

    async def changes(self, since: int) -> Changes:
        """What has happened after a revision; after 0 it is the whole table. Raises as `put` does."""
        count, tail = bulks(since, _PAGE)
        now, era, revision, flat = await self._runner.run(CHANGES, self._count + count, self._keys + tail)
        found = tuple(_changes(flat))
        return Changes(now=now / 1000, era=int(era), revision=int(revision), found=found, last=len(found) < _PAGE)

    async def _put(self, node_id: str, seen: int, packed: bytes, lasts_ms: int) -> RowWritten | RowConflict | PlaceTaken:
        count, tail = bulks(self.channel, node_id, seen, packed, lasts_ms)
        verdict, revision, _, *rest = await self._runner.run(PUT, self._count + count, self._keys + tail)
        if verdict == 1:
            return RowWritten(int(revision))
        if verdict == 0:
            return RowConflict(_row(rest[0], int(revision)), bool(rest[1]))
        return PlaceTaken(rest[0].decode())


def heard(message: bytes) -> NodeChange:
    """A message of the channel.

    Raises:
        ValueError: it is none.
    """
    head, _, packed = message.partition(b"\n")
    revision, alive, node_id = head.split(b" ", 2)
    return NodeChange(node_id.decode(), int(revision), alive == b"1", packed)


def _changes(flat: list[Any]) -> Iterator[NodeChange]:
    fields = iter(flat)
    for node_id, revision, alive, packed in zip(fields, fields, fields, fields, strict=True):
        yield NodeChange(node_id.decode(), int(revision), bool(alive), packed)


def _row(packed: bytes, revision: int) -> NodeRecord | None:
    return replace(_DECODER.decode(packed.partition(b"\n")[2]), revision=revision) if packed else None

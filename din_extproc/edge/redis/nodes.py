"""Node table in Redis, shared by all replicas of a network: rows by compare-and-set, changes by channel and by revision.

Invariant: the table is authoritative. A reader that may have missed messages reads the changes since its last known revision.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.connection import bulks
from din_extproc.edge.redis.ledger import Runner, load_script
from din_extproc.registry.row import NodeRecord

PUT: Final = load_script("node_put")
SWEEP: Final = load_script("node_sweep")
CHANGES: Final = load_script("node_changes")
NODE_SCRIPTS: Final = (PUT, SWEEP, CHANGES)

_PAGE: Final = 500
"""Nodes per page: a reply of this size does not block Redis for long."""
_KEYS: Final = ("rows", "living", "changes", "table", "places", "graves")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(NodeRecord)


class NodeChange(Struct, frozen=True):
    """A change of one node."""

    node_id: str
    revision: int
    alive: bool
    packed: bytes

    @property
    def decode_row(self) -> NodeRecord | None:
        """Return the row, None if the node was removed. It is decoded on demand: most messages are the reader's own."""
        return _parse_row(self.packed, self.revision)


class RowWritten(Struct, frozen=True):
    """The row was written."""

    revision: int


class RowConflict(Struct, frozen=True):
    """The table holds another row than the writer had read; None: no row."""

    row: NodeRecord | None
    alive: bool


class PlaceTaken(Struct, frozen=True):
    """Another living node has the address."""

    owner: str


class Changes(Struct, frozen=True):
    """A page of changes, oldest first."""

    now: float
    """Seconds since the epoch, by the clock of Redis."""
    era: int
    """Era of the table; it changes when Redis loses the table. 0: there is no table."""
    revision: int
    """Newest revision of the table."""
    found: tuple[NodeChange, ...]
    last: bool
    """This is the last page."""


class NodeStore:
    """Store of the node table of one network.

    Args:
        runner: The started client.
        network: Name of the network; networks share no data.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        prefix = f"{make_namespace(network)}{{nodes}}"
        self.channel = f"{prefix}:said"
        self._count, self._keys = bulks(len(_KEYS), *(f"{prefix}:{name}" for name in _KEYS))

    async def put(self, row: NodeRecord, lasts_ms: int = 0) -> RowWritten | RowConflict | PlaceTaken:
        """Write the row if the table still holds `row.revision`; 0: no row.

        Args:
            row: The new row.
            lasts_ms: Time until the node is dead without a heartbeat; 0: keep the current time.

        Raises:
            LimitsUnavailable: Redis is unreachable.
        """
        packed = row.address_and_model.encode() + b"\n" + _ENCODER.encode(replace(row, revision=0))
        return await self._put_row(row.id, row.revision, packed, lasts_ms)

    async def remove(self, row: NodeRecord) -> RowWritten | RowConflict | PlaceTaken:
        """Remove the row. Raise as `put` does."""
        return await self._put_row(row.id, row.revision, b"", 0)

    async def sweep(self, forget_ms: int) -> None:
        """Mark silent nodes dead and remove nodes that died `forget_ms` ago. Raise as `put` does."""
        count, tail = bulks(self.channel, forget_ms, _PAGE)
        await self._runner.run(SWEEP, self._count + count, self._keys + tail)

    async def fetch_changes(self, since: int) -> Changes:
        """Return the changes after a revision; after 0 the whole table. Raise as `put` does."""
        count, tail = bulks(since, _PAGE)
        now, era, revision, flat = await self._runner.run(CHANGES, self._count + count, self._keys + tail)
        found = tuple(_parse_changes(flat))
        return Changes(now=now / 1000, era=int(era), revision=int(revision), found=found, last=len(found) < _PAGE)

    async def _put_row(self, node_id: str, seen: int, packed: bytes, lasts_ms: int) -> RowWritten | RowConflict | PlaceTaken:
        count, tail = bulks(self.channel, node_id, seen, packed, lasts_ms)
        verdict, revision, _, *rest = await self._runner.run(PUT, self._count + count, self._keys + tail)
        if verdict == 1:
            return RowWritten(int(revision))
        if verdict == 0:
            return RowConflict(_parse_row(rest[0], int(revision)), bool(rest[1]))
        return PlaceTaken(rest[0].decode())


def parse_change(message: bytes) -> NodeChange:
    """Parse a message of the channel.

    Raises:
        ValueError: The message is malformed.
    """
    head, _, packed = message.partition(b"\n")
    revision, alive, node_id = head.split(b" ", 2)
    return NodeChange(node_id.decode(), int(revision), alive == b"1", packed)


def _parse_changes(flat: list[Any]) -> Iterator[NodeChange]:
    fields = iter(flat)
    for node_id, revision, alive, packed in zip(fields, fields, fields, fields, strict=True):
        yield NodeChange(node_id.decode(), int(revision), bool(alive), packed)


def _parse_row(packed: bytes, revision: int) -> NodeRecord | None:
    return replace(_DECODER.decode(packed.partition(b"\n")[2]), revision=revision) if packed else None

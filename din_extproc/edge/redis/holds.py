"""Operators' orders for nodes in Redis: one hash by node id, and a channel that notifies every replica."""

from collections.abc import Iterable
from typing import Final

import msgspec

from din_extproc.domain.health import NodeHold
from din_extproc.edge.redis.calls import make_namespace
from din_extproc.edge.redis.ledger import Runner

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(NodeHold)


class HoldStore:
    """Store of the orders of one network. Every method may raise `LimitsUnavailable`.

    Args:
        runner: The started client.
        network: Name of the network; networks share no data.
    """

    def __init__(self, runner: Runner, network: str) -> None:
        self._runner = runner
        self._key = f"{make_namespace(network)}{{holds}}"
        self.channel = f"{self._key}:said"

    async def put(self, orders: Iterable[NodeHold]) -> None:
        """Write the orders and notify every replica."""
        for order in orders:
            packed = _ENCODER.encode(order)
            await self._runner.call("HSET", self._key, order.node_id, packed)
            await self._runner.call("PUBLISH", self.channel, packed)

    async def remove(self, node_ids: Iterable[str]) -> None:
        """Remove the orders for these nodes."""
        for node_id in node_ids:
            await self._runner.call("HDEL", self._key, node_id)

    async def load(self) -> dict[str, NodeHold]:
        """Return every order, by node id. Unreadable orders are omitted."""
        orders = (parse_order(packed) for packed in await self._runner.call("HVALS", self._key))
        return {order.node_id: order for order in orders if order is not None}


def parse_order(packed: bytes) -> NodeHold | None:
    """Parse a message of the channel. Return None if it holds no order."""
    try:
        return _DECODER.decode(packed)
    except msgspec.DecodeError:
        return None

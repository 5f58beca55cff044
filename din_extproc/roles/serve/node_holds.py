"""Operators' orders for nodes as a part of the accounting process: shared by all replicas, and applied as soon as they are known.

Rule: a replica keeps every order that it has received, and writes it again into a Redis that has lost it.
"""

import contextlib
import logging
from collections.abc import Callable

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.health import HoldKind, NodeHold
from din_extproc.edge.background import Background
from din_extproc.edge.clock import SystemClock
from din_extproc.edge.redis.holds import HoldStore, parse_order
from din_extproc.edge.redis.ledger import Runner
from din_extproc.edge.redis.subscription import ChannelSubscription
from din_extproc.edge.redis.topology import make_locator
from din_extproc.health.holds import NodeHolds
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)

_SYNC_S = 1.0
_STEP_S = 1e-3
"""By so much an order is later than the one before, whatever the clocks of two replicas say."""


class OperatorHolds:
    """The orders for this network's nodes.

    Args:
        settings: A sound configuration.
        runner: The link to Redis.
        holds: The orders that are known.
        changed: Called with the nodes for which something else holds now.
    """

    def __init__(self, settings: Settings, runner: Runner, holds: NodeHolds, changed: Callable[[tuple[str, ...]], None]) -> None:
        self._holds = holds
        self._changed = changed
        self._store = HoldStore(runner, settings.network)
        self._subscription = ChannelSubscription(
            make_locator(settings.store.url.get_secret_value()), self._store.channel, self._on_message, lambda: None
        )

    async def start(self, background: Background) -> None:
        """Read the operators' orders and subscribe to new ones."""
        await self._sync()
        background.run("listening for orders of operators", self._subscription.run())
        background.every(_SYNC_S, "comparing the orders of operators", self._sync)

    async def order(self, node_id: str, kind: HoldKind, operator: str, reason: str) -> str:
        """Give an order. Return why other replicas do not know it yet, "" when they do."""
        before = self._holds.newest(node_id)
        at = max(SystemClock.wall(), 0.0 if before is None else before.at + _STEP_S)
        order = NodeHold(node_id=node_id, kind=kind, operator=operator, at=at, reason=reason)
        self._apply(order)
        try:
            await self._store.put((order,))
        except LimitsUnavailable as error:
            return f"redis: {error}; the other replicas follow when Redis is back"
        return ""

    async def _sync(self) -> None:
        with contextlib.suppress(LimitsUnavailable):
            shared = await self._store.load()
            self._apply(*shared.values())
            await self._store.put(self._holds.missing_from(shared))
            await self._store.remove(self._holds.expire(SystemClock.wall()))

    def _on_message(self, message: bytes) -> None:
        order = parse_order(message)
        if order is not None:
            self._apply(order)

    def _apply(self, *orders: NodeHold) -> None:
        newer = self._holds.merge(orders)
        for order in newer:
            _log.warning("node %s %s", order.node_id, order.text)
        if newer:
            self._changed(tuple(order.node_id for order in newer))

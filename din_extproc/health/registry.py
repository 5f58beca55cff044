"""All circuit breakers of one replica, of nodes and pools.

Invariant: a breaker is created by its first event, and `take_changes` returns each change once, newest state only.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from din_extproc.domain.health import EXCLUDED, BreakerSnapshot, BreakerSnapshots, BreakerState, tenant_of
from din_extproc.domain.usage import ExchangeRecord, Outcome
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.exchanges import ExchangeEvents
from din_extproc.health.policy import BreakerPolicy

_REMEMBERED = 1000
_OUT = EXCLUDED | {BreakerState.HALF_OPEN}
_OPENING = frozenset({BreakerEventKind.FAILED, BreakerEventKind.PROBE_FAILED, BreakerEventKind.REMOTE_OPEN})


class BreakerSet:
    """Circuit breakers by name. Events for names without a policy are ignored.

    Args:
        policies: Breaker policies by name.
    """

    __slots__ = ("_breakers", "_changed", "_not_closed", "_policies")

    def __init__(self, policies: Mapping[str, BreakerPolicy]) -> None:
        self._policies = dict(policies)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._not_closed: set[str] = set()
        """Names of the breakers that are not closed."""
        self._changed: set[str] = set()

    def reload(self, policies: Mapping[str, BreakerPolicy]) -> None:
        """Replace the policies. Breakers keep their state; those without a policy are dropped."""
        self._policies = dict(policies)
        for name in self._breakers.keys() - policies.keys():
            self._forget(name)
        for name, breaker in self._breakers.items():
            breaker.policy = policies[name]

    def reset_caused_by(self, causes: frozenset[BreakerEventKind], now: float) -> None:
        """Reset the breakers that are closed or whose state was caused by one of these kinds of events."""
        for name, breaker in self._breakers.items():
            if name in self._not_closed and breaker.cause not in causes:
                continue
            self._breakers[name] = CircuitBreaker(name, self._policies[name], now)
            if name in self._not_closed:
                self._not_closed.discard(name)
                self._changed.add(name)

    def add_policy(self, name: str, policy: BreakerPolicy) -> None:
        """Add or replace one policy."""
        self._policies[name] = policy
        if name in self._breakers:
            self._breakers[name].policy = policy

    def on_event(self, name: str, event: BreakerEvent, *, scarce: bool = False) -> bool:
        """Apply an event to one breaker. Return whether its snapshot changed. `scarce`: see `CircuitBreaker.on_event`."""
        breaker = self._breakers.get(name)
        if breaker is None:
            policy = self._policies.get(name)
            if policy is None:
                return False
            breaker = self._breakers[name] = CircuitBreaker(name, policy, event.now)
        if not breaker.on_event(event, scarce=scarce):
            return False
        self._changed.add(name)
        if breaker.snapshot.state is BreakerState.CLOSED:
            self._not_closed.discard(name)
        else:
            self._not_closed.add(name)
        return True

    def on_tick(self, now: float) -> None:
        """Let open times, cool-downs and ramps end."""
        for name in list(self._not_closed):
            self.on_event(name, BreakerEvent(BreakerEventKind.TICK, now))

    def get_snapshot(self, name: str) -> BreakerSnapshot | None:
        """Return the snapshot of one breaker; None if it has had no event."""
        breaker = self._breakers.get(name)
        return None if breaker is None else breaker.snapshot

    def get_consecutive_failures(self, name: str) -> int:
        """Return the number of failures since the last success."""
        breaker = self._breakers.get(name)
        return 0 if breaker is None else breaker.consecutive_failures

    def get_opened_for(self, name: str) -> str:
        """Return the tenant whose requests alone opened the breaker, "" when there is none."""
        breaker = self._breakers.get(name)
        return "" if breaker is None else breaker.opened_for

    def count_out(self, names: AbstractSet[str], *, but: str) -> int:
        """Return how many of these breakers, but one, let no request pass, or only trials."""
        return sum(name in names and name != but and self._breakers[name].snapshot.state in _OUT for name in self._not_closed)

    def snapshot_not_closed(self) -> dict[str, BreakerSnapshot]:
        """Names of the breakers that are not closed."""
        return {name: self._breakers[name].snapshot for name in sorted(self._not_closed)}

    def take_changes(self) -> dict[str, BreakerSnapshot]:
        """Return the snapshots that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {name: self._breakers[name].snapshot for name in changed if name in self._breakers}

    def _forget(self, name: str) -> None:
        if self._breakers.pop(name).snapshot.state is not BreakerState.CLOSED:
            self._not_closed.discard(name)
            self._changed.discard(name)


class BreakerRegistry:
    """The circuit breakers of all nodes and pools.

    What fails for one tenant alone is left to the others: its failures open at most half of a pool's nodes, and no pool. Where only one
    tenant is configured, there is no other to be spared.
    """

    __slots__ = ("_failed", "members", "nodes", "pools", "shared")

    def __init__(self) -> None:
        self.nodes = BreakerSet({})
        self.pools = BreakerSet({})
        self.members: Mapping[str, AbstractSet[str]] = {}
        """The ids of the nodes of each pool that may take requests at all."""
        self.shared = True
        """Several tenants use the network."""
        self._failed: dict[str, bool] = {}
        """Origins of requests that failed at a node, oldest first, and whether a node has answered an equal one since."""

    def reset_caused_by(self, causes: frozenset[BreakerEventKind], now: float) -> None:
        """Reset the breakers that are closed or whose state was caused by one of these kinds of events."""
        self.nodes.reset_caused_by(causes, now)
        self.pools.reset_caused_by(causes, now)

    def on_tick(self, now: float) -> None:
        """Let open times, cool-downs and ramps end."""
        self.nodes.on_tick(now)
        self.pools.on_tick(now)

    def on_exchange(self, record: ExchangeRecord, events: ExchangeEvents) -> bool:
        """Feed the breakers that a finished exchange concerns. Return whether any of them changed."""
        changed = False
        if record.outcome is Outcome.COMPLETED and record.origin in self._failed:
            self._failed[record.origin] = True
        if events.moved_from is not None:
            changed = self.pools.on_event(record.moved_from, events.moved_from, scarce=self.shared)
        if events.node is not None:
            changed |= self.on_node_event(record.node_id, events.node)
        if events.pool is not None:
            changed |= self.pools.on_event(record.pool, events.pool, scarce=self.shared)
        return changed

    def on_node_event(self, node_id: str, event: BreakerEvent) -> bool:
        """Apply an event to a node's breaker. Return whether its snapshot changed."""
        if event.origin and event.kind is BreakerEventKind.FAILED:
            event = self._attribute(event)
        return self.nodes.on_event(node_id, event, scarce=event.kind in _OPENING and self.shared and self._is_scarce(node_id))

    def _attribute(self, event: BreakerEvent) -> BreakerEvent:
        """Return the failure, which counts by itself if a node has answered an equal request: then the request is not why nodes fail."""
        if self._failed.get(event.origin):
            return replace(event, origin=f"{tenant_of(event.origin)}{event.now}")
        self._failed.setdefault(event.origin, False)
        if len(self._failed) > _REMEMBERED:
            del self._failed[next(iter(self._failed))]
        return event

    def _is_scarce(self, node_id: str) -> bool:
        """Return whether less than half of a pool's nodes would be left without the node."""
        return any(node_id in ids and 2 * (self.nodes.count_out(ids, but=node_id) + 1) > len(ids) for ids in self.members.values())

    def take_changes(self) -> BreakerSnapshots:
        """Return the snapshots that changed since the last call."""
        return BreakerSnapshots(self.nodes.take_changes(), self.pools.take_changes())

    def snapshot_not_closed(self) -> BreakerSnapshots:
        """Return the snapshots of the breakers that are not closed."""
        return BreakerSnapshots(self.nodes.snapshot_not_closed(), self.pools.snapshot_not_closed())


def select_strictest(policies: Iterable[BreakerPolicy]) -> BreakerPolicy:
    """Return the policy that opens first, for a node in several pools."""
    return min(policies, key=lambda policy: float("inf") if policy.consecutive_failures is None else policy.consecutive_failures)

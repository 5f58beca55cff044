"""All breakers of one replica: of every node and every pool that something happened to.

Rule: what was never heard of is closed and costs nothing; what has changed since it was last asked comes out once, newest state only.
"""

from collections.abc import Iterable, Mapping

from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind, CircuitBreaker
from din_extproc.health.policy import BreakerPolicy


class BreakerSet:
    """Breakers by name. Names that have no policy are not kept.

    Args:
        policies: By name.
    """

    __slots__ = ("_awake", "_breakers", "_changed", "_policies")

    def __init__(self, policies: Mapping[str, BreakerPolicy]) -> None:
        self._policies = dict(policies)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._awake: set[str] = set()
        """Those that are not closed."""
        self._changed: set[str] = set()

    def use(self, policies: Mapping[str, BreakerPolicy]) -> None:
        """Other policies; what is open stays so, and who has none any more is forgotten."""
        self._policies = dict(policies)
        for name in self._breakers.keys() - policies.keys():
            self._forget(name)
        for name, breaker in self._breakers.items():
            breaker.policy = policies[name]

    def release(self, causes: frozenset[BreakerEventKind], now: float) -> None:
        """Such events speak for nothing any more: whoever stands as it does for one of them, and whoever is closed, begins anew."""
        for name, breaker in self._breakers.items():
            if name in self._awake and breaker.cause not in causes:
                continue
            self._breakers[name] = CircuitBreaker(name, self._policies[name], now)
            if name in self._awake:
                self._awake.discard(name)
                self._changed.add(name)

    def add(self, name: str, policy: BreakerPolicy) -> None:
        """One more."""
        self._policies[name] = policy
        if name in self._breakers:
            self._breakers[name].policy = policy

    def hear(self, name: str, heard: BreakerEvent) -> bool:
        """Something happened to one of them. True: it stands otherwise now."""
        breaker = self._breakers.get(name)
        if breaker is None:
            policy = self._policies.get(name)
            if policy is None:
                return False
            breaker = self._breakers[name] = CircuitBreaker(name, policy, heard.now)
        if not breaker.hear(heard):
            return False
        self._changed.add(name)
        if breaker.standing.state is BreakerState.CLOSED:
            self._awake.discard(name)
        else:
            self._awake.add(name)
        return True

    def pass_time(self, now: float) -> None:
        """Look whether pauses and ramps have ended."""
        for name in list(self._awake):
            self.hear(name, BreakerEvent(BreakerEventKind.TIME, now))

    def standing(self, name: str) -> BreakerSnapshot | None:
        """How one stands; None: nothing was ever heard of it."""
        breaker = self._breakers.get(name)
        return None if breaker is None else breaker.standing

    def row(self, name: str) -> int:
        """Failures since its last success."""
        breaker = self._breakers.get(name)
        return 0 if breaker is None else breaker.row

    def all(self) -> dict[str, BreakerSnapshot]:
        """Those that are not closed."""
        return {name: self._breakers[name].standing for name in sorted(self._awake)}

    def changed(self) -> dict[str, BreakerSnapshot]:
        """How those stand that changed since this was last asked."""
        changed, self._changed = self._changed, set()
        return {name: self._breakers[name].standing for name in changed if name in self._breakers}

    def _forget(self, name: str) -> None:
        if self._breakers.pop(name).standing.state is not BreakerState.CLOSED:
            self._awake.discard(name)
            self._changed.discard(name)


class BreakerRegistry:
    """The breakers of nodes and pools, and what every outcome means to them."""

    __slots__ = ("nodes", "pools")

    def __init__(self) -> None:
        self.nodes = BreakerSet({})
        self.pools = BreakerSet({})

    def release(self, causes: frozenset[BreakerEventKind], now: float) -> None:
        """Such events speak for nothing any more, and what they have caused ends."""
        self.nodes.release(causes, now)
        self.pools.release(causes, now)

    def pass_time(self, now: float) -> None:
        """Look whether pauses and ramps have ended."""
        self.nodes.pass_time(now)
        self.pools.pass_time(now)

    def changed(self) -> BreakerSnapshots:
        """What stands otherwise since this was last asked."""
        return BreakerSnapshots(self.nodes.changed(), self.pools.changed())

    def all(self) -> BreakerSnapshots:
        """Everything that is not closed."""
        return BreakerSnapshots(self.nodes.all(), self.pools.all())


def strictest(policies: Iterable[BreakerPolicy]) -> BreakerPolicy:
    """Of a node that stands in several pools: the policy that opens first."""
    return min(policies, key=lambda policy: float("inf") if policy.row is None else policy.row)

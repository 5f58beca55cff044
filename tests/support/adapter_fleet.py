"""Nodes with adapters (LoRA) in virtual time: engines that keep the adapters used last, requests by Zipf's law, and heartbeats."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from random import Random

from msgspec import Struct

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Adapters, Endpoint, Node, Pool
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.node_selector import NodeSelector, PlacementTarget, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.route.table import Routed
from din_extproc.route.versions import ANY
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest

_SIZE = RequestSize(200, 200, 200)
_TRIES = 2
"""Attempts of one request: Envoy retries once."""


class FleetSpec(Struct, frozen=True, kw_only=True):
    """The fleet and its traffic. Times in seconds."""

    nodes: int = 8
    adapters: int = 64
    slots: int = 4
    zipf: float = 1.2
    requests: int = 20_000
    per_s: float = 20.0
    serving_s: float = 1.0
    loading_s: float = 0.5
    """What a request takes longer whose adapter is not loaded."""
    heartbeat_s: float = 1.0
    changes_per_s: float = 0.0
    """How often an operator takes an adapter off one node, or gives it back: each adapter stays at half of the nodes at least."""
    seed: int = 1


class FleetResult(Struct, frozen=True):
    """What the requests met."""

    loaded: float
    """The share of requests whose adapter was loaded where they went."""
    failed: int
    """Requests for which no attempt found the adapter."""
    retried: int
    mean_s: float


class _Engine:
    """One engine: it answers for the adapters in `served` and keeps `slots` of them loaded, those used last."""

    def __init__(self, node: Node, slots: int, names: tuple[str, ...]) -> None:
        self.node = node
        self.slots = slots
        self.served = set(names)
        self.loaded: dict[str, None] = {}
        self.running: list[str] = []

    def take(self, adapter: str) -> bool:
        """Load the adapter for a request; return whether it was loaded already."""
        hit = adapter in self.loaded
        self.loaded.pop(adapter, None)
        self.loaded[adapter] = None
        if len(self.loaded) > self.slots:
            idle = [each for each in self.loaded if each not in self.running and each != adapter]
            del self.loaded[(idle or list(self.loaded))[0]]
        self.running.append(adapter)
        return hit

    def beat(self, sequence: int) -> Heartbeat:
        return Heartbeat(
            state=NodeState.READY,
            sequence=sequence,
            running=len(self.running),
            waiting=0,
            adapters=tuple(sorted(self.served)),
            active_adapters=tuple(dict.fromkeys(self.running)),
            adapter_slots=self.slots,
        )


def play(spec: FleetSpec, choose: Callable[[str, float], tuple[str, ...]] | None = None) -> FleetResult:
    """Send the traffic to the fleet and return what it met.

    Args:
        spec: The fleet.
        choose: Names the nodes for an adapter's request, best first; None: as the gateway does.
    """
    random, names = Random(spec.seed), tuple(f"adapter-{number}" for number in range(spec.adapters))
    nodes = tuple(_node(number) for number in range(spec.nodes))
    engines = {node.id: _Engine(node, spec.slots, names) for node in nodes}
    pool = Pool(name="p", model="m", served_model="m", engine="vllm", scheduler="token_available", nodes=nodes, adapters=Adapters(names))
    selector = NodeSelector(LoadModel(), PoolMembership.from_pools((pool,)))
    views = {name: pool.for_adapter(name) for name in names}
    popular = names[:]
    weights = list(accumulate((number + 1) ** -spec.zipf for number in range(spec.adapters)))
    at, hits, failed, retried, seconds = 0.0, 0, 0, 0, 0.0
    ends: list[tuple[float, int, Callable[[], None]]] = []
    beat_at = change_at = 0.0
    for number in range(spec.requests):
        at += random.expovariate(spec.per_s)
        while ends and ends[0][0] <= at:
            heappop(ends)[2]()
        if at >= beat_at:
            beat_at = at + spec.heartbeat_s
            for node_id, engine in engines.items():
                selector.load.on_reading(node_id, HeartbeatReading(engine.beat(number + 1), at))
        if spec.changes_per_s and at >= change_at:
            change_at = at + random.expovariate(spec.changes_per_s)
            _change(random, names, list(engines.values()))
        adapter = random.choices(popular, cum_weights=weights)[0]
        release: Callable[[], None] | None = None
        if choose is not None:
            chosen = choose(adapter, at)
        else:
            chosen, release = _select(selector, views[adapter], at, random.getrandbits(32))
        for attempt, node_id in enumerate(chosen[:_TRIES]):
            engine = engines[node_id]
            if adapter not in engine.served:
                selector.load.adapters.on_missing(node_id, adapter, at)
                retried += attempt == 0
                continue
            hit = engine.take(adapter)
            hits += hit
            took = spec.serving_s + (0.0 if hit else spec.loading_s)
            seconds += took
            heappush(ends, (at + took, 2 * number, lambda engine=engine, adapter=adapter: engine.running.remove(adapter)))
            if release is not None:
                heappush(ends, (at + took, 2 * number + 1, release))
            break
        else:
            failed += 1
            if release is not None:
                release()
    return FleetResult(hits / spec.requests, failed, retried, seconds / spec.requests)


def round_robin(spec: FleetSpec) -> Callable[[str, float], tuple[str, ...]]:
    """Choose nodes in turn, whatever the adapter."""
    picks = 0

    def choose(_adapter: str, _now: float) -> tuple[str, ...]:
        nonlocal picks
        picks += 1
        return tuple(f"gpu-{(picks + step) % spec.nodes}" for step in range(_TRIES))

    return choose


def _select(selector: NodeSelector, view: Pool, now: float, chance: int) -> tuple[tuple[str, ...], Callable[[], None] | None]:
    target = selector.select_target(Routed("", view.model, view.model, view, ANY, None, ANY), _SIZE, now)
    if isinstance(target, Refusal):
        return (), None
    assert isinstance(target, PlacementTarget)
    selection = selector.select_nodes(target, PlacementRequest(100, 100, now, chance))
    assert not isinstance(selection, Refusal)
    return tuple(node.id for node in selection.nodes), lambda: selector.release(selection.lease)


def _change(random: Random, names: tuple[str, ...], engines: list[_Engine]) -> None:
    adapter, engine = random.choice(names), random.choice(engines)
    if adapter not in engine.served:
        engine.served.add(adapter)
    elif sum(adapter in each.served for each in engines) > len(engines) // 2:
        engine.served.remove(adapter)
        engine.loaded.pop(adapter, None)


def _node(number: int) -> Node:
    return Node(f"gpu-{number}", Endpoint("10.0.0.1", 1 + number), "m", "2025.3.1", "bf16", "", 1, 8192, 64)

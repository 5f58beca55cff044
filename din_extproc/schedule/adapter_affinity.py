"""Placement by adapter (LoRA): a request goes to a node that has its adapter loaded, else to one with room for it.

Of nodes without room, the one is chosen whose displaced adapter is asked for least; nodes that do not serve the adapter never are.

Invariant: the work per request grows neither with the nodes nor with the adapters.
"""

from zlib import crc32

from din_extproc.domain.node import Node
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.schedule.adapter_table import LOADED, ROOM
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.placement_request import PlacementRequest
from din_extproc.schedule.sample import SAMPLE_SIZE, sample

_Rank = tuple[bool, int, int, float, float, int]
"""(full, steps of load above the least loaded candidate, place, demand for what is displaced, load, order)."""


class AdapterAffinity:
    """Selects nodes for the requests of one adapter.

    Args:
        nodes: The nodes that can take the request otherwise.
        load: Load and adapters of the nodes.
        adapter: The adapter.
        slots: Adapters that a node can have loaded, unless it reports its own number.
        spread: The part of its slots by which a node that has the adapter may be busier than another one before the other one loads it.
    """

    __slots__ = ("_able", "_adapter", "_chance", "_load", "_nodes", "_places", "_refusal", "_revision", "_slots", "_spread")

    def __init__(self, nodes: tuple[Node, ...], load: LoadModel, adapter: str, slots: int, spread: float) -> None:
        self._nodes = nodes
        self._load = load
        self._adapter = adapter
        self._slots = slots
        self._spread = spread
        self._chance = crc32(adapter.encode())
        """The same in every worker and gateway, so that they choose among the same nodes."""
        self._revision = -1
        self._refusal = Refusal(RefusalCode.NO_HEALTHY_NODE, f"No node in service has the adapter {adapter!r}.")
        self._able: tuple[Node, ...] = ()
        self._places: dict[str, int] = {}

    def refuse(self, now: float) -> Refusal | None:
        """Return why none of the nodes can take a request; None: one can."""
        return None if self._find_able(now) else self._refusal

    def pick(self, count: int, request: PlacementRequest) -> tuple[Node, ...] | Refusal:
        """Return the best nodes first: at most `count`, all different."""
        able, places = self._find_able(request.now), self._places
        if not able:
            return self._refusal
        holders = [places[node_id] for node_id in self._load.adapters.find_holders(self._adapter) if node_id in places]
        if len(holders) > SAMPLE_SIZE:
            holders = [holders[at] for at in sample(len(holders), SAMPLE_SIZE, request.chance)]
        ranks = self._rank(list(dict.fromkeys([*holders, *sample(len(able), SAMPLE_SIZE, self._chance)])), request)
        return tuple([able[rank[-1]] for rank in ranks[:count]])

    def score(self, node: Node, request: PlacementRequest) -> tuple[float, str]:
        """Return the share of the node's slots in use, with an explanation that says what the node has of the adapter."""
        load = self._load.node_load(node.id)
        used = load.requests_in_use / node.max_concurrency
        if not self._serves(node):
            return used, f"it does not serve the adapter {self._adapter}"
        place, _ = self._load.adapters.get_place(node.id, self._adapter, self._slots, request.now)
        words = {LOADED: "has the adapter loaded", ROOM: "has room for the adapter"}
        return used, f"{words.get(place, 'would displace another adapter')}; {load.requests_in_use} of {node.max_concurrency} slots in use"

    def _find_able(self, now: float) -> tuple[Node, ...]:
        """Return the nodes that serve the adapter. They are found anew only when some node's adapters have changed."""
        table = self._load.adapters
        if now >= table.expires_at:
            table.expire(now)
        if self._revision != table.revision:
            self._revision = table.revision
            self._able = tuple(node for node in self._nodes if self._serves(node))
            self._places = {node.id: index for index, node in enumerate(self._able)}
        return self._able

    def _serves(self, node: Node) -> bool:
        return (node.adapters is None or self._adapter in node.adapters) and self._load.adapters.serves(node.id, self._adapter)

    def _rank(self, indexes: list[int], request: PlacementRequest) -> list[_Rank]:
        loads = [self._load.node_load(self._able[index].id) for index in indexes]
        used = [load.requests_in_use / self._able[index].max_concurrency for index, load in zip(indexes, loads, strict=True)]
        least = min(used)
        ranks = []
        for index, load, share in zip(indexes, loads, used, strict=True):
            node = self._able[index]
            place, demand = self._load.adapters.get_place(node.id, self._adapter, self._slots, request.now)
            full = load.is_full(node) or node.id in request.full
            ranks.append((full, int((share - least) / self._spread), place, demand, share, index))
        ranks.sort()
        return ranks

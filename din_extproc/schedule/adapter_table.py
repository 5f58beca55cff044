"""Which adapters (LoRA) each node serves and has loaded, as known to one worker.

Invariant: a node has no more adapters loaded than it has slots. What an engine has loaded is derived from its reports and from this
worker's requests: engines keep the adapters that were used last.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from math import inf

from din_extproc.domain.membership import Heartbeat

_MISSING_S = 10.0
"""How long a node counts as not serving an adapter after its 404, unless a later report says otherwise."""
_STALE_S = 2.0
"""A report within this time after a 404 may be older than the 404."""
_HALF_LIFE_S = 60.0
"""The age at which a request for an adapter has half its weight in the adapter's demand."""
_MOST_HOLDERS = 64
"""The largest number of nodes that one request looks at because they have its adapter."""
LOADED, ROOM, FULL = 0, 1, 2
"""An adapter's place at a node: it is loaded, there is room for it, or it would displace another."""


class _NodeAdapters:
    """The adapters of one node."""

    __slots__ = ("loaded", "missing", "served", "slots")

    def __init__(self) -> None:
        self.served: frozenset[str] | None = None
        """The adapters that the engine lists; None: it has not listed any."""
        self.slots: int | None = None
        """Adapters that it can have loaded at once, by its own report."""
        self.loaded: dict[str, float] = {}
        """When each loaded adapter was last used, least recently used first."""
        self.missing: dict[str, float] = {}
        """When the node last answered 404 for an adapter."""


class AdapterTable:
    """The adapters of every node. Times are seconds of the machine's monotonic clock."""

    __slots__ = ("_demand", "_holders", "_nodes", "expires_at", "revision")

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeAdapters] = {}
        self._holders: dict[str, dict[str, None]] = {}
        """Ids of the nodes that have an adapter loaded, by adapter."""
        self._demand: dict[str, tuple[float, float]] = {}
        """The decayed number of requests for each adapter, and when the last one came."""
        self.revision = 0
        """Grows when it changes which nodes serve which adapters."""
        self.expires_at = inf
        """When `expire` has something to do."""

    def apply_heartbeat(self, node_id: str, beat: Heartbeat, at: float) -> None:
        """Apply a node's report. What it does not say stays as it was."""
        if beat.adapters is None and beat.adapter_slots is None and not beat.active_adapters:
            return
        node = self._nodes.setdefault(node_id, _NodeAdapters())
        if beat.adapters is not None:
            self._apply_list(node_id, node, frozenset(beat.adapters), at)
        if beat.adapter_slots is not None:
            node.slots = beat.adapter_slots
        for adapter in beat.active_adapters:
            if adapter not in node.loaded:
                self._load(node_id, adapter, at, 1)

    def use(self, node_id: str, adapter: str, now: float, slots: int = 1) -> None:
        """A request for the adapter goes to the node, which loads it. `slots`: the assumption for a node that reports none."""
        number, at = self._demand.get(adapter, (0.0, now))
        self._demand[adapter] = (number * 0.5 ** ((now - at) / _HALF_LIFE_S) + 1.0, now)
        self._load(node_id, adapter, now, slots)

    def _load(self, node_id: str, adapter: str, now: float, slots: int) -> None:
        node = self._nodes.setdefault(node_id, _NodeAdapters())
        node.loaded.pop(adapter, None)
        node.loaded[adapter] = now
        self._holders.setdefault(adapter, {})[node_id] = None
        while len(node.loaded) > max(1, slots if node.slots is None else node.slots):
            self._unload(node_id, node, next(iter(node.loaded)))

    def on_missing(self, node_id: str, adapter: str, now: float) -> None:
        """The node answered that it has no such adapter."""
        node = self._nodes.setdefault(node_id, _NodeAdapters())
        node.missing[adapter] = now
        self._unload(node_id, node, adapter)
        self.expires_at = min(self.expires_at, now + _MISSING_S)
        self.revision += 1

    def expire(self, now: float) -> None:
        """Try nodes again that answered 404 some time ago and have not listed their adapters since."""
        self.expires_at = inf
        for node in self._nodes.values():
            for adapter, since in list(node.missing.items()):
                if now >= since + _MISSING_S:
                    del node.missing[adapter]
                    self.revision += 1
                else:
                    self.expires_at = min(self.expires_at, since + _MISSING_S)

    def serves(self, node_id: str, adapter: str) -> bool:
        """Return whether the node can serve the adapter: it lists it, or lists nothing, and has not answered 404 since."""
        node = self._nodes.get(node_id)
        return node is None or ((node.served is None or adapter in node.served) and adapter not in node.missing)

    def find_holders(self, adapter: str) -> Iterable[str]:
        """Return the ids of nodes that have the adapter loaded, 64 at most."""
        return islice(self._holders.get(adapter, ()), _MOST_HOLDERS)

    def get_place(self, node_id: str, adapter: str, slots: int, now: float) -> tuple[int, float]:
        """Return the adapter's place at the node, and the demand for the adapter that it would displace; 0: it displaces none."""
        node = self._nodes.get(node_id)
        if node is None:
            return ROOM, 0.0
        if adapter in node.loaded:
            return LOADED, 0.0
        if len(node.loaded) < (slots if node.slots is None else node.slots):
            return ROOM, 0.0
        number, at = self._demand.get(next(iter(node.loaded), ""), (0.0, now))
        return FULL, number * 0.5 ** ((now - at) / _HALF_LIFE_S)

    def retain(self, node_ids: Collection[str]) -> None:
        """Drop every other node."""
        for node_id in self._nodes.keys() - set(node_ids):
            node = self._nodes.pop(node_id)
            for adapter in list(node.loaded):
                self._unload(node_id, node, adapter)
            self.revision += 1

    def _apply_list(self, node_id: str, node: _NodeAdapters, served: frozenset[str], at: float) -> None:
        changed = served != node.served
        node.served = served
        for adapter, since in list(node.missing.items()):
            if at > since + _STALE_S:
                del node.missing[adapter]
                changed = True
        for adapter in [each for each in node.loaded if each not in served]:
            self._unload(node_id, node, adapter)
        self.revision += changed

    def _unload(self, node_id: str, node: _NodeAdapters, adapter: str) -> None:
        node.loaded.pop(adapter, None)
        holders = self._holders.get(adapter)
        if holders is not None:
            holders.pop(node_id, None)
            if not holders:
                del self._holders[adapter]

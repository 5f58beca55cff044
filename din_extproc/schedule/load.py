"""Load and speed of each node as known to this worker: from its own requests, heartbeats and finished exchanges.

Every lease that is taken is given back once. Between heartbeats a node's load is its last report, corrected by the leases taken and given
back since. Falling loads and newly learned speeds are logged, so that rankings follow without scanning all nodes.
"""

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.node import Node
from din_extproc.domain.usage import NodePace
from din_extproc.schedule.adapter_table import AdapterTable

DEFAULT_PREFILL_RATE = 4000.0
"""Assumed prompt tokens per second of a node without measurements."""
_MIN_KV_USAGE = 0.05
"""KV-cache usage below which the cache's size can't be derived from it."""


class NodeLease(Struct, frozen=True, gc=False):
    """The load of one request on a node until it ends."""

    node_id: str
    prompt_tokens: int
    output_tokens: int
    long: bool = False
    """The request belongs to the long tail."""


class NodeLoad:
    """The load of one node. Values are 0 or None until they are known."""

    __slots__ = (
        "_backlog",
        "_backlog_at",
        "_prefill_learned",
        "_stream_learned",
        "cached_share",
        "id",
        "kv_tokens",
        "long_requests",
        "mean_seconds",
        "p99_at",
        "p99_ms",
        "prefill_rate",
        "remote_requests",
        "remote_tokens",
        "requests",
        "stream_rate",
        "streams",
        "tokens",
        "trust",
    )

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.tokens = 0
        """Prompt and expected output tokens of this worker's requests at the node."""
        self.requests = 0
        self.long_requests = 0
        """The number of this worker's long-tail requests."""
        self.remote_tokens = 0
        """Tokens in the node's last heartbeat beyond this worker's own: of other workers and gateways."""
        self.remote_requests = 0
        self.kv_tokens: float | None = None
        """Size of the KV cache in tokens."""
        self.cached_share: float | None = None
        """The share of its recent prompt tokens that came from its prefix cache."""
        self.prefill_rate: float | None = None
        """Prompt tokens per second."""
        self.stream_rate: float | None = None
        """Output tokens per second of one request while `streams` requests run."""
        self.streams = 1.0
        self.mean_seconds: float | None = None
        """Mean duration of its exchanges."""
        self.p99_ms: float | None = None
        self.p99_at = 0.0
        self.trust = 1.0
        self._prefill_learned = False
        self._stream_learned = False
        self._backlog = 0.0
        self._backlog_at = 0.0

    @property
    def tokens_in_use(self) -> int:
        """Tokens of all clients at the node."""
        return self.tokens + self.remote_tokens

    @property
    def requests_in_use(self) -> int:
        """Requests of all clients at the node, queued ones included."""
        return self.requests + self.remote_requests

    def is_full(self, node: Node) -> bool:
        """Return whether one more request would queue at the node. A lower trust reduces the limit."""
        return self.requests + self.remote_requests >= max(1.0, node.max_concurrency * self.trust)

    def backlog(self, now: float, prefill_rate: float) -> float:
        """Return the prompt tokens of this worker that the node has not processed by `now` at that rate."""
        return max(0.0, self._backlog - (now - self._backlog_at) * prefill_rate)

    def add_prompt(self, tokens: int, now: float) -> None:
        """Add a dispatched prompt to the backlog."""
        self._backlog = self.backlog(now, self.prefill_rate or DEFAULT_PREFILL_RATE) + tokens
        self._backlog_at = now

    def apply_heartbeat(self, reading: HeartbeatReading) -> None:
        """Apply a heartbeat. Values that it does not report stay unchanged."""
        beat = reading.beat
        self.trust = reading.trust
        if beat.tokens_in_use is not None:
            self.remote_tokens = max(0, beat.tokens_in_use - self.tokens)
            if beat.kv_cache_usage is not None and beat.kv_cache_usage >= _MIN_KV_USAGE:
                self.kv_tokens = beat.tokens_in_use / beat.kv_cache_usage
        if beat.cached_share is not None:
            self.cached_share = beat.cached_share
        if beat.running is not None:
            self.remote_requests = max(0, beat.running + (beat.waiting or 0) - self.requests)
        if beat.prefill_rate and not self._prefill_learned:
            self.prefill_rate = beat.prefill_rate
        if beat.decode_rate and beat.running and not self._stream_learned:
            self.stream_rate = beat.decode_rate / beat.running
            self.streams = float(beat.running)

    def apply_pace(self, pace: NodePace) -> None:
        """Apply rates learned from finished exchanges. They take precedence over the node's own reports: they are what clients saw."""
        self.p99_ms, self.p99_at = pace.p99_ms, pace.at
        self.mean_seconds = pace.seconds
        if pace.prefill_rate:
            self.prefill_rate = pace.prefill_rate
            self._prefill_learned = True
        if pace.stream_rate:
            self.stream_rate = pace.stream_rate
            self.streams = max(1.0, float(self.requests_in_use))
            self._stream_learned = True


class LoadModel:
    """The load of every node that this worker knows of."""

    __slots__ = ("_nodes", "adapters", "load_drops", "rate_changes")

    _LOG_LIMIT = 65536

    def __init__(self) -> None:
        self._nodes: dict[str, NodeLoad] = {}
        self.load_drops = ChangeLog(limit=self._LOG_LIMIT)
        """Nodes whose load may have fallen."""
        self.rate_changes = ChangeLog(limit=self._LOG_LIMIT)
        """Nodes with newly learned speed."""
        self.adapters = AdapterTable()

    def node_load(self, node_id: str) -> NodeLoad:
        """Return a node's load, the same object for as long as the node is kept."""
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = NodeLoad(node_id)
        return found

    def add_lease(self, taken: NodeLease, now: float) -> None:
        """Add a lease to the node's load. `now`: seconds of the machine's monotonic clock."""
        load = self.node_load(taken.node_id)
        load.tokens += taken.prompt_tokens + taken.output_tokens
        load.requests += 1
        load.long_requests += taken.long
        load.add_prompt(taken.prompt_tokens, now)

    def remove_lease(self, taken: NodeLease) -> None:
        """Remove a lease from the node's load."""
        load = self.node_load(taken.node_id)
        load.tokens -= taken.prompt_tokens + taken.output_tokens
        load.requests -= 1
        load.long_requests -= taken.long
        self.load_drops.append(taken.node_id)

    def on_reading(self, node_id: str, reading: HeartbeatReading) -> None:
        """Apply a heartbeat to its node."""
        self.node_load(node_id).apply_heartbeat(reading)
        self.adapters.apply_heartbeat(node_id, reading.beat, reading.at)
        self.load_drops.append(node_id)
        self.rate_changes.append(node_id)

    def on_readings(self, readings: Mapping[str, HeartbeatReading]) -> None:
        """Apply the latest heartbeats, by node id."""
        for node_id, reading in readings.items():
            self.on_reading(node_id, reading)

    def on_paces(self, paces: Iterable[NodePace]) -> None:
        """Apply rates learned from finished exchanges."""
        for pace in paces:
            self.node_load(pace.node_id).apply_pace(pace)
            self.rate_changes.append(pace.node_id)

    def retain(self, node_ids: Collection[str]) -> None:
        """Drop every other node, except those with requests in flight."""
        self._nodes = {node_id: load for node_id, load in self._nodes.items() if load.requests or node_id in node_ids}
        self.adapters.retain(node_ids)

    def tokens_in_flight(self) -> dict[str, int]:
        """Return this worker's tokens in flight by node id, for nodes with requests."""
        return {node_id: load.tokens for node_id, load in self._nodes.items() if load.requests}


class ChangeLog:
    """A bounded log of node ids with ever-increasing sequence numbers. Readers that fall too far behind are detected."""

    __slots__ = ("_ids", "_limit", "_start")

    def __init__(self, limit: int) -> None:
        self._ids: list[str] = []
        self._start = 0
        self._limit = limit

    def append(self, node_id: str) -> None:
        """Append a node id."""
        if len(self._ids) >= self._limit:
            drop = self._limit // 2
            del self._ids[:drop]
            self._start += drop
        self._ids.append(node_id)

    @property
    def end(self) -> int:
        """The sequence number of the next entry."""
        return self._start + len(self._ids)

    def read_from(self, number: int) -> list[str] | None:
        """Return the node ids from that sequence number on. None: they were dropped, rescan all nodes."""
        if number < self._start:
            return None
        return self._ids[number - self._start :]

"""How busy and how quick each node is, as far as this worker knows: its own requests, the nodes' heartbeats, and finished exchanges.

Rule: whoever takes gives the same back, once. Between heartbeats a node's load is what it last said, corrected by what this worker
has taken and given since. What fell, and whose pace became known, is noted, so that rankings can follow without a scan.
"""

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from din_extproc.domain.membership import HeartbeatReading
from din_extproc.domain.node import Node
from din_extproc.domain.usage import NodePace

PREFILL_RATE = 4000.0
"""Prompt tokens per second of a node that has told nothing."""
_LEAST_USAGE = 0.05
"""Share of the key-value memory below which its size can't be told from how full it is."""


class NodeLease(Struct, frozen=True, gc=False):
    """What one request takes of a node until it ends."""

    node_id: str
    prompt_tokens: int
    output_tokens: int
    long: bool = False
    """It belongs to the long tail."""


class NodeLoad:
    """One node. Everything is 0 or None until something is known."""

    __slots__ = (
        "_backlog",
        "_backlog_at",
        "_taught_prefill",
        "_taught_stream",
        "elsewhere_requests",
        "elsewhere_tokens",
        "id",
        "kv_tokens",
        "long",
        "p99_at",
        "p99_ms",
        "prefill_rate",
        "requests",
        "seconds",
        "stream_rate",
        "streams",
        "tokens",
        "trust",
    )

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.tokens = 0
        """Prompt and expected output of this worker's requests at the node."""
        self.requests = 0
        self.long = 0
        """Those of them that belong to the long tail."""
        self.elsewhere_tokens = 0
        """What the node's last heartbeat told beyond this worker's own: other workers', other gateways'."""
        self.elsewhere_requests = 0
        self.kv_tokens: float | None = None
        """Size of its key-value memory, in tokens."""
        self.prefill_rate: float | None = None
        """Prompt tokens per second."""
        self.stream_rate: float | None = None
        """Output tokens per second of one request, while `streams` run."""
        self.streams = 1.0
        self.seconds: float | None = None
        """How long its exchanges take on average."""
        self.p99_ms: float | None = None
        self.p99_at = 0.0
        self.trust = 1.0
        self._taught_prefill = False
        self._taught_stream = False
        self._backlog = 0.0
        self._backlog_at = 0.0

    @property
    def tokens_in_use(self) -> int:
        """Everybody's tokens at the node."""
        return self.tokens + self.elsewhere_tokens

    @property
    def requests_in_use(self) -> int:
        """Everybody's requests at the node, those that wait there too."""
        return self.requests + self.elsewhere_requests

    def is_full(self, node: Node) -> bool:
        """As many requests as it runs at once: one more would wait. A node that is trusted less is full sooner."""
        return self.requests + self.elsewhere_requests >= max(1.0, node.max_concurrency * self.trust)

    def backlog(self, now: float, prefill_rate: float) -> float:
        """Prompt tokens that this worker sent and that the node, at that rate, has not read by now."""
        return max(0.0, self._backlog - (now - self._backlog_at) * prefill_rate)

    def add_prompt(self, tokens: int, now: float) -> None:
        """A prompt is on its way."""
        self._backlog = self.backlog(now, self.prefill_rate or PREFILL_RATE) + tokens
        self._backlog_at = now

    def hear(self, reading: HeartbeatReading) -> None:
        """Take over what the node says of itself. What it does not say stays as it was."""
        beat = reading.beat
        self.trust = reading.trust
        if beat.tokens_in_use is not None:
            self.elsewhere_tokens = max(0, beat.tokens_in_use - self.tokens)
            if beat.kv_cache_usage is not None and beat.kv_cache_usage >= _LEAST_USAGE:
                self.kv_tokens = beat.tokens_in_use / beat.kv_cache_usage
        if beat.running is not None:
            self.elsewhere_requests = max(0, beat.running + (beat.waiting or 0) - self.requests)
        if beat.prefill_rate and not self._taught_prefill:
            self.prefill_rate = beat.prefill_rate
        if beat.decode_rate and beat.running and not self._taught_stream:
            self.stream_rate = beat.decode_rate / beat.running
            self.streams = float(beat.running)

    def learn(self, pace: NodePace) -> None:
        """Take over what finished exchanges taught. It counts more than the node's own rates: it is what clients saw, over a while."""
        self.p99_ms, self.p99_at = pace.p99_ms, pace.at
        self.seconds = pace.seconds
        if pace.prefill_rate:
            self.prefill_rate = pace.prefill_rate
            self._taught_prefill = True
        if pace.stream_rate:
            self.stream_rate = pace.stream_rate
            self.streams = max(1.0, float(self.requests_in_use))
            self._taught_stream = True


class LoadModel:
    """Every node that this worker has heard of or sent to."""

    __slots__ = ("_nodes", "fallen", "told")

    _REMEMBERED = 65536

    def __init__(self) -> None:
        self._nodes: dict[str, NodeLoad] = {}
        self.fallen = ChangeLog(limit=self._REMEMBERED)
        """Nodes whose load may have become less."""
        self.told = ChangeLog(limit=self._REMEMBERED)
        """Nodes of whose pace something new is known."""

    def of(self, node_id: str) -> NodeLoad:
        """One node's load; the same object for as long as the node is kept."""
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = NodeLoad(node_id)
        return found

    def take(self, taken: NodeLease, now: float) -> None:
        """A request goes to the node. `now`: seconds, the machine's monotonic clock."""
        load = self.of(taken.node_id)
        load.tokens += taken.prompt_tokens + taken.output_tokens
        load.requests += 1
        load.long += taken.long
        load.add_prompt(taken.prompt_tokens, now)

    def give(self, taken: NodeLease) -> None:
        """That request has ended."""
        load = self.of(taken.node_id)
        load.tokens -= taken.prompt_tokens + taken.output_tokens
        load.requests -= 1
        load.long -= taken.long
        self.fallen.append(taken.node_id)

    def hear(self, node_id: str, reading: HeartbeatReading) -> None:
        """A heartbeat has come."""
        self.of(node_id).hear(reading)
        self.fallen.append(node_id)
        self.told.append(node_id)

    def on_readings(self, readings: Mapping[str, HeartbeatReading]) -> None:
        """Take over the latest heartbeats of nodes, by node id."""
        for node_id, reading in readings.items():
            self.hear(node_id, reading)

    def learn(self, paces: Iterable[NodePace]) -> None:
        """Finished exchanges have taught something."""
        for pace in paces:
            self.of(pace.node_id).learn(pace)
            self.told.append(pace.node_id)

    def keep(self, node_ids: Collection[str]) -> None:
        """Forget every other node, but for what is still under way at it."""
        self._nodes = {node_id: load for node_id, load in self._nodes.items() if load.requests or node_id in node_ids}

    def in_use(self) -> dict[str, int]:
        """This worker's own tokens in flight by node id, of nodes that have any."""
        return {node_id: load.tokens for node_id, load in self._nodes.items() if load.requests}


class ChangeLog:
    """The last node ids something happened to, numbered for ever: a reader that was away too long is told so."""

    __slots__ = ("_ids", "_limit", "_start")

    def __init__(self, limit: int) -> None:
        self._ids: list[str] = []
        self._start = 0
        self._limit = limit

    def append(self, node_id: str) -> None:
        """Note one."""
        if len(self._ids) >= self._limit:
            drop = self._limit // 2
            del self._ids[:drop]
            self._start += drop
        self._ids.append(node_id)

    @property
    def end(self) -> int:
        """The number that the next one will have."""
        return self._start + len(self._ids)

    def since(self, number: int) -> list[str] | None:
        """The nodes noted at or after that number. None: they are no longer known, look at all nodes again."""
        if number < self._start:
            return None
        return self._ids[number - self._start :]

"""One modelled node: its engine, the beginnings of prompts that its memory keeps, and what is wrong with it.

Rule: while it stalls its own clock stands still: afterwards it goes on where it was.
"""

from collections import OrderedDict

from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, NodeState
from din_extproc.domain.node import Node
from din_extproc.tools.engine_model.engine import EngineSpec, SimulatedEngine, SimulatedSequence
from din_extproc.tools.simulate.plan import NodeIncident, NodeProfile, PlannedFailure


class SimulatedNode:
    """A node that computes. Times are those of the simulation, in seconds.

    Args:
        node: Who it is.
        kind: How large and how quick it is.
    """

    def __init__(self, node: Node, kind: NodeProfile) -> None:
        self.node = node
        self.kind = kind
        self.engine = SimulatedEngine(kind.spec, every_token=False)
        self.wakes_at: float | None = None
        """When the simulation will step it."""
        self.hits = 0
        """Requests whose beginning was in its memory."""
        self.trouble: PlannedFailure | None = None
        self.requests = 0
        self.busy_s = 0.0
        """Seconds in which it computed."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._lost = 0.0
        """Seconds that it stood still."""
        self._since = 0.0
        """When it was last looked at, by its own clock."""
        self._last_counts: tuple[int, float] = (0, 0.0)
        """Output tokens and busy seconds at its last beat."""
        self._looked_up, self._cached = 0, 0
        """Prompt tokens, and those of them that were cached, since its last beat."""
        self._cached_share: float | None = None
        self._was_idle = False

    @property
    def stalled(self) -> bool:
        """Whether it stands still."""
        return self.trouble is not None and self.trouble.kind is NodeIncident.STALL

    @property
    def down(self) -> bool:
        """Whether it is gone."""
        return self.trouble is not None and self.trouble.kind is NodeIncident.DOWN

    @property
    def next_at(self) -> float | None:
        """When it has something to tell; None: not before something comes."""
        at = self.engine.next_at
        return None if at is None or self.stalled else at + self._lost

    def take(self, prompt_tokens: int, output_tokens: int, prefix: int, prefix_tokens: int, now: float) -> SimulatedSequence:
        """Begin a request; a beginning that was here lately costs nothing."""
        own = self._find_own_spec(now)
        cached = min(self._count_cached(prefix, prefix_tokens), prompt_tokens - 1)
        self._looked_up += prompt_tokens
        self._cached += cached
        sequence = SimulatedSequence(prompt_tokens, output_tokens, cached=cached)
        self._apply_spec(own)
        self.requests += 1
        self.engine.submit(sequence, own)
        sequence.arrived = now
        return sequence

    def step(self, now: float) -> list[SimulatedSequence]:
        """Move to `now`. Returns the sequences that ended; their first tokens are timed by the simulation's clock."""
        own, lost, due = self._find_own_spec(now), self._lost, self.engine.next_at
        if lost and due is not None and due + lost <= now:
            own = max(own, due)  # a sum and its difference are not quite the same
        self._apply_spec(own)
        ended = []
        for emission in self.engine.step(own):
            if lost and emission.gap is None:
                emission.sequence.first_token = emission.at + lost
            if emission.is_last:
                ended.append(emission.sequence)
        return ended

    def drop(self, sequence: SimulatedSequence, now: float) -> None:
        """Its client is gone."""
        own = self._find_own_spec(now)
        self._apply_spec(own)
        self.engine.abort(sequence, own)

    def begin(self, trouble: PlannedFailure, now: float) -> None:
        """Something goes wrong."""
        self._apply_spec(self._find_own_spec(now))
        self.end(now)
        if trouble.kind is NodeIncident.SLOW:
            self.engine.change_spec(_slow_down(self.kind.spec, trouble.factor), self._find_own_spec(now))
        elif trouble.kind is NodeIncident.DOWN:
            self.engine = SimulatedEngine(self.kind.spec, every_token=False)
            self._kept.clear()
            self._last_counts = (0, self.busy_s)
        elif trouble.kind is NodeIncident.STALL:
            self.engine.catch_up(self._find_own_spec(now))
        self.trouble = trouble

    def end(self, now: float) -> None:
        """It is well again."""
        if self.trouble is None:
            return
        if self.stalled:
            self._lost += now - self.trouble.at_s
        was, self.trouble = self.trouble, None
        if was.kind is NodeIncident.SLOW:
            self.engine.change_spec(self.kind.spec, self._find_own_spec(now))

    def beat(self, sequence: int, now: float) -> Heartbeat | None:
        """Return the agent's heartbeat; None: the node is still idle, or has no agent."""
        engine, idle = self.engine, self.engine.next_at is None
        if (idle and self._was_idle) or self.down or self.stalled:
            return None
        own = self._find_own_spec(now)
        self._was_idle = idle
        self._apply_spec(own)
        engine.catch_up(own)
        decoded, busy = engine.tokens - self._last_counts[0], self.busy_s - self._last_counts[1]
        self._last_counts = (engine.tokens, self.busy_s)
        usage = engine.kv_usage
        if self._looked_up:
            share, known = self._cached / self._looked_up, self._cached_share
            self._cached_share = share if known is None else 0.9 * known + 0.1 * share
            self._looked_up = self._cached = 0
        return Heartbeat(
            state=NodeState.READY,
            sequence=sequence,
            waiting=len(engine.waiting),
            running=len(engine.running),
            kv_cache_usage=usage,
            tokens_in_use=int(usage * self.kind.spec.kv_tokens),
            prefill_rate=engine.spec.prefill_rate,
            decode_rate=decoded / busy if busy > 1.0 else None,
            cached_share=self._cached_share,
        )

    def close(self, now: float) -> None:
        """The simulation is over."""
        self._apply_spec(self._find_own_spec(now))

    def _find_own_spec(self, now: float) -> float:
        """The time by its own clock."""
        return (self.trouble.at_s if self.trouble is not None and self.stalled else now) - self._lost

    def _apply_spec(self, own: float) -> None:
        if self.engine.next_at is not None:
            self.busy_s += own - self._since
        self._since = own

    def _count_cached(self, prefix: int, prefix_tokens: int) -> int:
        if not prefix or not self.kind.prefixes:
            return 0
        found = prefix in self._kept
        self.hits += found
        self._kept[prefix] = None
        self._kept.move_to_end(prefix)
        if len(self._kept) > self.kind.prefixes:
            self._kept.popitem(last=False)
        return prefix_tokens if found else 0


def _slow_down(spec: EngineSpec, factor: float) -> EngineSpec:
    return replace(spec, prefill_rate=spec.prefill_rate / factor, decode_rate=spec.decode_rate / factor)

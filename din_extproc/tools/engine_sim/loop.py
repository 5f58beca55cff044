"""Drives a modelled engine in real time: one timer for the whole engine, none per sequence or token.

Rule: the engine's clock stops while this process is stopped. After a pause (a stopped process, a blocked loop) it goes on where
it was, as a real engine would, instead of catching up in one burst.
"""

import asyncio
from collections.abc import Callable

from din_extproc.tools.engine_model.engine import Emission, EngineSpec, SimulatedEngine, SimulatedSequence
from din_extproc.tools.engine_model.metrics import EngineMetrics

_LATE_S = 0.25
Sink = Callable[[Emission], None]


class EngineLoop:
    """An engine on the running event loop. Sinks are called from the loop, in order, once per token."""

    def __init__(self, spec: EngineSpec, metrics: EngineMetrics) -> None:
        self.engine = SimulatedEngine(spec)
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[SimulatedSequence, Sink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._lost = 0.0
        """Seconds for which the process was stopped, excluded from the engine's time."""

    def submit(self, sequence: SimulatedSequence, sink: Sink) -> None:
        """Start a sequence.

        Raises:
            ValueError: it is longer than the context.
        """
        self._sinks[sequence] = sink
        was_idle = self.engine.next_at is None
        self.engine.submit(sequence, self._get_now())
        if was_idle:
            self._arm()

    def abort(self, sequence: SimulatedSequence) -> bool:
        """End a sequence and free its slot and memory at once. False: it had ended."""
        self._sinks.pop(sequence, None)
        aborted = self.engine.abort(sequence, self._get_now())
        if aborted:
            self.metrics.on_end(sequence, "abort")
        return aborted

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def _get_now(self) -> float:
        return self._loop.time() - self._lost

    def _arm(self) -> None:
        if self.engine.next_at is not None:
            self.metrics.on_iteration(self.engine.iteration_tokens)
            self._timer = self._loop.call_at(self.engine.next_at + self._lost, self._tick)

    def _tick(self) -> None:
        due = self.engine.next_at
        if due is None:
            return
        late = self._get_now() - due
        if late > _LATE_S:
            self._lost += late
        emissions = self.engine.step(self._get_now())
        self.metrics.on_tokens(emissions)
        for emission in emissions:
            sink = self._sinks.get(emission.sequence)
            if emission.is_last:
                self._sinks.pop(emission.sequence, None)
            if sink is not None:
                sink(emission)
        self._arm()

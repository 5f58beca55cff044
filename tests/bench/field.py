"""The shared parts of benchmarks: load generator, nodes, running contenders and durations.

Rule: a contender is started when it is first asked for, warmed up once, and ended with the field.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from tests.bench.contenders import OTHERS, OURS, Contender, Missing, chat_body, nodes
from tests.bench.harness import Load, Spent, spend
from tests.bench.load import http_request
from tests.bench.peers.go_gateways import GO_PEERS

BODY_BYTES = 1300
_WARM_S = 0.5


class Effort(Struct, frozen=True):
    """The extent of measurements."""

    rounds: int = 5
    seconds: float = 1.5
    """Seconds per contender and round."""
    many_nodes: int = 10_000
    many_tenants: int = 100_000
    many_rules: int = 1_000
    many_streams: int = 10_000
    virtual_seconds: float = 240.0
    """Virtual seconds of a simulation."""
    simulated_s: float = 3600.0
    """Virtual seconds of a simulation of a thousand nodes."""
    thresholds: tuple[int, ...] = (1, 2, 3, 5)
    """Consecutive failures after which a stalled node is ejected."""
    stall_s: float = 30.0
    others: bool = True
    """Whether other gateways are compared."""
    limit_seconds: float = 30.0
    """Seconds of load over the limits."""
    tokenizers: tuple[str, ...] = ()
    """Tokenizers that the estimate is compared with; empty: all."""
    calibration_s: float = 60.0
    """Seconds of each real run that the simulation is compared with."""
    calibration_loads: int = 3
    """Whether all loads are calibrated, with a real model too."""


SMOKE = Effort(
    1,
    0.3,
    300,
    300,
    100,
    300,
    20.0,
    simulated_s=20.0,
    thresholds=(2, 5),
    stall_s=3.0,
    others=False,
    limit_seconds=3.0,
    tokenizers=("minilm",),
    calibration_s=5.0,
    calibration_loads=1,
)

Figures = dict[str, float]


class Field:
    """All running parts. A context manager."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.missing: dict[str, str] = {}
        """Contenders that can't run, with the reason."""
        self._exits = ExitStack()
        self._starts = OURS | (OTHERS | GO_PEERS if effort.others else {})
        self._running: dict[str, Contender] = {}

    def contender(self, name: str) -> Contender | None:
        """Return the running, warmed-up contender; None: it is missing, or others are not compared."""
        if name in self._running or name in self.missing or name not in self._starts:
            return self._running.get(name)
        try:
            started = self._starts[name](self._exits, self._nodes, self.folder)
            self._running[name] = started
            self.load.run(started.port, self.request(started), min(_WARM_S, self.effort.seconds))
        except Missing as why:
            self.missing[name] = str(why)
        return self._running.get(name)

    def others(self) -> list[str]:
        """Return the names of other gateways."""
        return [*OTHERS, *GO_PEERS] if self.effort.others else []

    def request(self, contender: Contender, *, size: int = BODY_BYTES, stream: bool = False) -> str:
        """Return a chat request as its clients send it."""
        accept = {"accept": "text/event-stream"} if stream else {}
        body = chat_body(size, stream=stream)
        return http_request(body, {**contender.headers, **accept})

    def spend(self, contender: Contender, request: str, **options: float) -> Spent:
        """Run the load on a contender once. Options as of `Load.run`."""
        seconds = options.pop("seconds", self.effort.seconds)
        return spend(contender.parts, lambda: self.load.run(contender.port, request, seconds, **options))

    def __enter__(self) -> Self:
        self.folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="din-bench-")))
        self.load = self._exits.enter_context(Load())
        self._nodes = nodes(self._exits)
        return self

    @property
    def node_ports(self) -> tuple[int, int]:
        return self._nodes

    @property
    def exits(self) -> ExitStack:
        """Context managers that are left with the field."""
        return self._exits

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exits.close()

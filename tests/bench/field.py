"""What the benchmarks share: the load generator, the nodes, the contenders that run, and how long to measure.

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

BODY_BYTES = 1300
_WARM_S = 0.5


class Effort(Struct, frozen=True):
    """How much is measured."""

    rounds: int = 5
    seconds: float = 1.5
    """Of one contender in one round."""
    many_nodes: int = 10_000
    many_tenants: int = 100_000
    many_rules: int = 1_000
    many_streams: int = 10_000
    virtual_seconds: float = 240.0
    """Of a simulation, which takes a fraction of it."""
    simulated_s: float = 3600.0
    """Likewise, of a thousand nodes."""
    thresholds: tuple[int, ...] = (1, 2, 3, 5)
    """Failures in a row after which a node that stalls is left out."""
    stall_s: float = 30.0
    others: bool = True
    """Whether gateways of others take part."""
    limit_seconds: float = 30.0
    """Of tenants that ask for more than they may."""
    tokenizers: tuple[str, ...] = ()
    """Those that the estimate is compared with; empty: all."""
    calibration_s: float = 60.0
    """Of each real run that the simulation is compared with."""
    calibration_loads: int = 3
    """All of them: a real model is measured, too."""


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
    """Everything that runs. A context manager."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.missing: dict[str, str] = {}
        """Contenders that can't run, and why."""
        self._exits = ExitStack()
        self._starts = OURS | (OTHERS if effort.others else {})
        self._running: dict[str, Contender] = {}

    def contender(self, name: str) -> Contender | None:
        """The contender, running and warm; None: it is missing."""
        if name in self._running or name in self.missing:
            return self._running.get(name)
        try:
            started = self._starts[name](self._exits, self._nodes, self.folder)
            self._running[name] = started
            self.load.run(started.port, self.request(started), min(_WARM_S, self.effort.seconds))
        except Missing as why:
            self.missing[name] = str(why)
        return self._running.get(name)

    def others(self) -> list[str]:
        """Names of what is not ours."""
        return list(OTHERS) if self.effort.others else []

    def request(self, contender: Contender, *, size: int = BODY_BYTES, stream: bool = False) -> str:
        """A chat request as its clients send it."""
        accept = {"accept": "text/event-stream"} if stream else {}
        body = chat_body(size, stream=stream)
        return http_request(body, {**contender.headers, **accept})

    def spend(self, contender: Contender, request: str, **options: float) -> Spent:
        """One run of the load on it. Options as of `Load.run`."""
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
        """What is entered here ends with the field."""
        return self._exits

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exits.close()

"""Injected faults, how often and for which requests. Draws are seeded: equal requests in equal order meet equal faults.

A fault is written `KIND` or `KIND:name=value,name=value`, several are separated by `;`: `reset:after=3,count=2; latency:ms=200`.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

Kind = Literal[
    "unavailable",
    "oom",
    "throttle",
    "reply",
    "latency",
    "stall",
    "reset",
    "exit",
    "error_event",
    "insert",
    "truncate",
    "drip",
    "usage",
    "no_usage",
    "clock",
    "health",
]


KINDS: tuple[str, ...] = get_args(Kind)
"""The values of `--faults`."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of fault.

    `unavailable` 503 · `oom` 500, CUDA out of memory · `throttle` 429 with Retry-After · `reply` any status, headers and body ·
    `latency` waits `ms` first · `stall` accepts and never answers, or goes silent after `after` tokens · `reset` closes the connection
    hard, before the first byte or after `after` tokens · `exit` ends the engine's process ·
    `error_event` an error inside the stream after `after` tokens (`text`: a bare
    string), then the end marker · `insert` puts `body` into the stream after `after` tokens · `truncate` ends the stream after `after`
    tokens without the end marker · `drip` sends `bytes` bytes every `ms` · `usage` reports usage times `factor` · `no_usage` reports none ·
    `clock` sets the engine's clock `ms` ahead in what it writes (`created`) ·
    `health` makes /health answer `status` whatever the engine does.
    """

    kind: Kind
    count: int | None = None
    """Number of requests that it affects; None: all."""
    probability: float = 1.0
    path: str = ""
    """The path whose requests it affects; "": all."""
    containing: str = ""
    """Text in the body of the requests that it affects; "": all."""
    after: int | None = None
    """Tokens sent before it occurs; None: before the first byte of the answer (of an `error_event`, `insert`, `truncate`: 0)."""
    ms: int = 100
    bytes: int = 7
    factor: float = 10.0
    status: int = 503
    headers: dict[str, str] = {}
    body: str = ""
    retry_after_s: int = 1
    message: str = ""
    text: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError("probability is between 0 and 1")
        if self.bytes < 1 or self.ms < 0 or (self.count is not None and self.count < 0) or (self.after is not None and self.after < 0):
            raise ValueError("bytes is at least 1; ms, count and after are not negative")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults from text.

    Raises:
        ValueError: an unknown kind or name, or an impossible value; the message names the fault.
    """
    return tuple(_parse(part.strip()) for part in text.split(";") if part.strip())


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind.strip() not in get_args(Kind):
        raise ValueError(f"fault {text!r}: {kind.strip()!r} is unknown; known kinds: {', '.join(get_args(Kind))}")
    fields: dict[str, Any] = {"kind": kind.strip()}
    for pair in filter(None, (pair.strip() for pair in rest.split(","))):
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"fault {text!r}: {pair!r} is not name=value")
        fields[name.strip()] = value.strip()
    try:
        return msgspec.convert(fields, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"fault {text!r}: {error}") from error


class FaultBoard:
    """The active faults, and how often each may still occur."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self.replace(faults, seed)

    def replace(self, faults: Sequence[Fault], seed: int = 0) -> None:
        """Replace the faults, with new counts and draws."""
        self._faults = list(faults)
        self._left = [fault.count for fault in faults]
        self._state = seed

    @property
    def left(self) -> list[tuple[Fault, int | None]]:
        """Return each fault with its remaining count."""
        return list(zip(self._faults, self._left, strict=True))

    def draw(self, path: str, body: bytes = b"") -> dict[str, Fault]:
        """Draw the faults of this request by kind; of one kind the first that occurs. `health` is drawn by /health alone."""
        struck: dict[str, Fault] = {}
        for index, fault in enumerate(self._faults):
            if (fault.kind == "health") != (path == "/health") or fault.kind in struck or fault.path not in ("", path):
                continue
            if fault.containing.encode() not in body:
                continue
            left = self._left[index]
            if left == 0 or not self._draw_chance(fault.probability):
                continue
            if left is not None:
                self._left[index] = left - 1
            struck[fault.kind] = fault
        return struck

    def _draw_chance(self, probability: float) -> bool:
        if probability >= 1:
            return True
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (self._state >> 33) / 2**31 < probability

"""CPU of screening for sensitive data: a clean prompt of 1 kB and of 1 MB, and the costliest known megabyte."""

import random
import time

from din_extproc.screen.find import Screen
from din_extproc.screen.kinds import BUILT_IN, custom
from tests.bench.field import Field, Figures
from tests.bench.harness import median

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "42", "lazy", "dogs", "in", "Paris", "on", "2025-03-01,", "version", "10.2;")
_UNITS = (b"41111111 ", b"4111 1111 1111 1112 ", b"a", b"-----BEGIN RSA PRIVATE KEY-----\n", b"a.a@")
"""What patterns might go back and try again at."""
_DEAREST = b"a@b.co 4111111111111112 13800138000 078-05-1120 12345678A 529.982.247-26 4111-1111-1111-1112 "


def screening(field: Field) -> Figures:
    """CPU of one look, for a tenant whose policy is not `off`."""
    screen = Screen(BUILT_IN.values())
    chosen = random.Random(1)
    clean = " ".join(chosen.choice(_WORDS) for _ in range(240_000)).encode()
    dearest = _DEAREST * (1_000_000 // len(_DEAREST))
    rounds = max(3, field.effort.rounds * 3)
    return {
        "screen_1kb_us": _us(screen, clean[:1_000], rounds, 200),
        "screen_1mb_ms": _us(screen, clean[:1_000_000], rounds, 1) / 1e3,
        "screen_1mb_dearest_ms": _us(screen, dearest, rounds, 1) / 1e3,
        "screen_1mb_vs_128kb": max(_growth(unit, rounds) for unit in (*_UNITS, _DEAREST)),
    }


def _growth(unit: bytes, rounds: int) -> float:
    """The time of a megabyte against that of an eighth of it: 8 where time is linear."""
    screen = Screen([*BUILT_IN.values(), custom("nested", "(a+)+b"), custom("either", "(a|aa)+c")])
    short, long = ((unit * (size // len(unit) + 1))[:size] for size in (125_000, 1_000_000))
    return _us(screen, long, rounds, 1) / _us(screen, short, rounds, 1)


def _us(screen: Screen, text: bytes, rounds: int, looks: int) -> float:
    spent = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(looks):
            screen.find([text])
        spent.append((time.process_time() - began) / looks * 1e6)
    return median(spent)

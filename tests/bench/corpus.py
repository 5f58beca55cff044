"""Texts that measure the token estimate: English, Chinese, code, JSON and mixtures, 0.1 to 32 thousand tokens.

Deterministic for one set of installed packages. The two halves share no source, so one can be learned from and the other predicted.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from zlib import crc32

from msgspec import Struct

KINDS = ("english", "chinese", "code", "json", "mixed")
SIZES = (128, 512, 2048, 8192, 32768)
"""Tokens aimed at; the real length lies within a factor of 0.7 to 1.3."""
EVEN = (10, 10, 10, 10, 10)
"""Texts of each size, to measure on."""
MOSTLY_SHORT = (40, 40, 20, 6, 3)
"""Texts of each size as a day's traffic has them, to learn from."""
_CHARACTERS_PER_TOKEN = {"english": 4.3, "chinese": 1.5, "code": 3.9, "json": 2.5, "mixed": 2.4}
_STDLIB = Path(sysconfig.get_path("stdlib"))
_WORDS = (
    *("user", "order", "price", "total", "status", "active", "name", "email", "address", "city", "items", "quantity", "sku"),
    *("created_at", "updated_at", "id", "type", "description", "enabled", "score", "tags", "region", "latency", "retries"),
    *("owner", "label", "currency", "discount", "version", "parent", "children", "metadata"),
)


class Text(Struct, frozen=True):
    """One text, of a kind and about a size in tokens."""

    kind: str
    size: int
    text: str


@cache
def texts(half: int, counts: tuple[int, ...]) -> list[Text]:
    """Texts of every kind, so many of each size, from one half (0 or 1) of the sources."""
    found = []
    for kind in KINDS:
        chance = random.Random(f"{kind} {half}")
        source = _SOURCES[kind](half, chance)
        for size, count in zip(SIZES, counts, strict=True):
            for _ in range(count):
                length = int(size * _CHARACTERS_PER_TOKEN[kind] * chance.uniform(0.75, 1.25))
                start = chance.randrange(len(source) - length)
                found.append(Text(kind, size, source[start : start + length]))
    return found


def _sources(half: int) -> list[Path]:
    folders = (_STDLIB, _STDLIB / "asyncio", _STDLIB / "email", _STDLIB / "http", _STDLIB / "logging")
    return sorted(path for folder in folders for path in folder.glob("*.py"))[half::4]


@cache
def _docstrings(half: int) -> list[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _sources(half)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [ast.get_docstring(node) or "" for node in nodes]


def _english(half: int, chance: random.Random) -> str:
    """Docstrings of the standard library, and readmes of what is installed."""
    pieces = _docstrings(half)[:]
    named = {found.metadata["Name"].lower(): found for found in distributions()}
    named.pop("din-extproc", None)  # its readme changes with each measurement
    ours = [name for name in sorted(named) if crc32(name.encode()) % 2 == half]  # by name: another package installed moves no readme
    pieces += [str(named[name].metadata.get_payload()) for name in ours]
    return _shuffled([piece for piece in pieces if len(piece) > 200 and piece.isascii()], "\n\n", chance)


def _code(half: int, chance: random.Random) -> str:
    return _shuffled([path.read_text(encoding="utf-8") for path in _sources(half)], "\n", chance)


def _chinese(half: int, chance: random.Random) -> str:
    sentences = (Path(__file__).parent / "chinese.txt").read_text(encoding="utf-8").split("\n")[half::2]
    return "".join("".join(chance.choices(sentences, k=chance.randint(1, 6))) + "\n" * chance.randint(0, 2) for _ in range(1200))


def _json(_half: int, chance: random.Random) -> str:
    return "\n".join(json.dumps(_value(chance), indent=chance.choice((None, None, 2)), ensure_ascii=False) for _ in range(400))


def _value(chance: random.Random, depth: int = 0) -> object:
    kind = chance.random()
    if depth == 0 or (depth < 4 and kind < 0.4):
        return {chance.choice(_WORDS): _value(chance, depth + 1) for _ in range(chance.randint(2, 7))}
    if depth < 4 and kind < 0.5:
        return [_value(chance, depth + 1) for _ in range(chance.randint(1, 5))]
    return chance.choice(
        (
            chance.randrange(10 ** chance.randint(1, 9)),
            round(chance.random() * 1000, chance.randint(1, 5)),
            chance.choice((True, False, None)),
            " ".join(chance.choices(_WORDS, k=chance.randint(1, 6))),
            f"{chance.getrandbits(32):08x}-{chance.getrandbits(16):04x}",
            f"2026-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}T{chance.randrange(24):02}:{chance.randrange(60):02}:00Z",
            f"{chance.choice(_WORDS)}{chance.randrange(1000)}@example.com",
        )
    )


def _mixed(half: int, chance: random.Random) -> str:
    """Chinese and English sentences by turns, a little code between them."""
    chinese = _chinese(half, chance).split("\n")
    english = _english(half, chance).split(". ")
    code = _code(half, chance).split("\n\n")
    pieces = []
    for _ in range(1500):
        pieces.append(chance.choice(chinese) + " " + chance.choice(english))
        if chance.random() < 0.15:
            pieces.append(chance.choice(code))
    return "\n".join(pieces)


def _shuffled(pieces: list[str], separator: str, chance: random.Random) -> str:
    pieces = sorted(pieces)
    chance.shuffle(pieces)
    return separator.join(pieces)


_SOURCES: dict[str, Callable[[int, random.Random], str]] = {
    "english": _english,
    "chinese": _chinese,
    "code": _code,
    "json": _json,
    "mixed": _mixed,
}

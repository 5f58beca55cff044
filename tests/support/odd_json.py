"""JSON in unusual but valid forms: white space anywhere, escapes, extreme numbers, objects in any order.

Rule: the same seed gives the same JSON.
"""

import json
import random

KEYS = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "tools",
    "input",
    "prompt",
    "query",
    "documents",
)
GAPS = ("", "", "", " ", "\t", "\r\n", "  ")
NUMBERS = ("0", "-0", "7", "1.50", "1E5", "2e-7", "9007199254740993", "1e999", "-1.0e+400", "3.0", "12345678901234567890123")
PIECES = (
    "a",
    "model",
    "stream",
    "{",
    "]",
    ",",
    ":",
    "中",
    "é",
    "😀",
    "\x7f",
    "\\n",
    '\\"',
    "\\\\",
    "\\/",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\u0065",
)
LONE = ("\\ud83d", "\\ude00", "\\ud83d\\ud83d")


class Speller:
    """Writes JSON in unusual but valid forms. Lone surrogates and duplicate keys only on request."""

    def __init__(self, seed, *, lone=False, twice=False):
        self.random = random.Random(seed)
        self.twice = twice
        self.pieces = PIECES + LONE if lone else PIECES

    def gap(self):
        return self.random.choice(GAPS)

    def string(self):
        return f'"{"".join(self.random.choices(self.pieces, k=self.random.randrange(6)))}"'

    def key(self):
        return f'"{self.random.choice(KEYS)}"' if self.random.random() < 0.7 else self.string()

    def value(self, depth=0):
        kind = self.random.randrange(7 if depth < 4 else 4)
        if kind < 2:
            return self.string()
        if kind < 4:
            return self.random.choice((*NUMBERS, "null", "true", "false"))
        if kind == 4:
            items = [self.value(depth + 1) for _ in range(self.random.randrange(4))]
            return f"[{self.gap()}{f'{self.gap()},{self.gap()}'.join(items)}{self.gap()}]"
        return self.object(depth + 1)

    def object(self, depth=0):
        members = {}
        for _ in range(self.random.randrange(6)):
            key = self.key()
            members[len(members) if self.twice else json.loads(key)] = self.member(key, self.value(depth))
        return self.joined(members.values())

    def member(self, key, value):
        return f"{key}{self.gap()}:{self.gap()}{value}"

    def joined(self, members):
        return f"{{{self.gap()}{f'{self.gap()},{self.gap()}'.join(members)}{self.gap()}}}"

    def chat(self):
        return f'{{"model":{self.string()},{self.gap()}"messages":[{self.object()}],"x":{self.object()}}}'

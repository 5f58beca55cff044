r"""JSON strings as texts and back: decoded to look at, edited at byte offsets.

Rule: an edit replaces what stands between two offsets of the string as it was sent; every other byte and escape stays.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

Edit = tuple[int, int, bytes]
"""Of a decoded text: from where, to where, and what stands there instead (JSON needs no escape for it)."""

_literal = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")')
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_escape = re.compile(rb"(%b%b|\\u[0-9a-fA-F]{4}|\\.)" % (_HIGH, _LOW))
_decode = msgspec.json.Decoder(list[str]).decode
_decode_one = msgspec.json.Decoder(str).decode
_NO_CHARACTER = "\ufffd".encode()


def literals(json: bytes) -> list[bytes]:
    """The strings in some valid JSON, quotes and escapes as sent."""
    return _literal.findall(json)


def decoded(strings: bytes) -> list[bytes]:
    """JSON strings joined by commas, as UTF-8 texts."""
    return [text.encode() for text in _decode(b"[%b]" % strings)] if strings else []


def edited(json: bytes, readable: bytes, edits: Mapping[bytes, Sequence[Edit]]) -> bytes:
    """Some JSON with its strings edited.

    Args:
        json: As sent.
        readable: The same with the same offsets, in the form in which its strings were decoded.
        edits: By string, as `readable` has it. Each string's are in order and do not overlap.
    """
    parts, shown = _literal.split(json), _literal.split(readable)
    return b"".join([part if seen not in edits else _spliced(part, seen, edits[seen]) for part, seen in zip(parts, shown, strict=True)])


def _spliced(literal: bytes, readable: bytes, edits: Iterable[Edit]) -> bytes:
    offset = _offsets(readable)
    parts: list[bytes] = []
    at = 0
    for start, end, instead in edits:
        parts += (literal[at : offset(start)], instead)
        at = offset(end)
    parts.append(literal[at:])
    return b"".join(parts)


def _offsets(literal: bytes) -> Callable[[int], int]:
    """From offsets of the decoded text to offsets of the literal."""
    if b"\\" not in literal:
        return lambda at: at + 1
    pieces = _escape.split(literal[1:-1])
    plain = [len(piece) if not at % 2 else len(_meaning(piece)) for at, piece in enumerate(pieces)]
    before = list(accumulate(plain, initial=0))
    sent = list(accumulate(map(len, pieces), initial=1))

    def offset(at: int) -> int:
        piece = min(bisect_right(before, at) - 1, len(pieces))
        return sent[piece] + at - before[piece]

    return offset


def _meaning(escape: bytes) -> bytes:
    try:
        return _decode_one(b'"%b"' % escape).encode()
    except msgspec.DecodeError:  # half a surrogate pair
        return _NO_CHARACTER

"""Where the top-level values of a JSON object lie, as byte offsets: what is read from and what is spliced into.

Rule: an outline is exact or there is none. The C decoder says what the values are, in the order of their keys; one walk over
the keys finds each of them again at the place where it must be. Where the walk and the decoder disagree, a key occurs twice.
"""

import re
from array import array
from itertools import accumulate

import msgspec
from msgspec import Raw, Struct

from din_extproc.domain.verdict import Refusal, RefusalCode

MAX_KEYS = 1024
"""Keys of one object that is outlined."""
MAX_DEPTH = 512
"""Arrays and objects around one value."""

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode
_next_key = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t\r\n]*:[ \t\r\n]*').match
_end = re.compile(rb"[ \t\r\n]*\}").match
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_lone = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|[c-fC-F][0-9a-fA-F]{2}(?<!%b%b))" % (_LOW, _HIGH, _LOW)).sub
_BACKSLASH, _NO_BYTE = rb"\\", b"\0\0"

_COLON = b'":'
_SUSPICIOUS = 16 * MAX_KEYS
"""Keys in the whole body, at any depth, from which on it is first looked whether the object itself has too many: the decoder would make
an object of each before anybody could count them."""
_MOST_TEXTS = 1 << 19
"""Keys and texts of a whole body, at any depth."""
_MOST_LISTS = 1 << 18
"""Arrays and objects, likewise."""
_MOST_HALVES = 1 << 16
"""Halves of surrogate pairs that are replaced; a body with more of them is what the decoder says it is."""
_ENOUGH = MAX_DEPTH + 1
_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_ALL_BUT_OPENING = bytes(byte for byte in range(256) if byte not in b'[{"')
_ALL_BUT_COMMAS = bytes(byte for byte in range(256) if byte not in b',"')

TOO_DEEP = Refusal(RefusalCode.INVALID_REQUEST, f"The JSON is nested more than {MAX_DEPTH} levels deep")
_NOT_UTF8 = Refusal(RefusalCode.INVALID_REQUEST, "The body is not UTF-8")
_BOM = Refusal(RefusalCode.INVALID_REQUEST, "The body begins with a byte order mark; JSON is sent as UTF-8 without one")
_NOT_AN_OBJECT = Refusal(RefusalCode.INVALID_REQUEST, "The body is not a JSON object")
_TOO_MANY_VALUES = Refusal(
    RefusalCode.INVALID_REQUEST, f"The JSON holds more than {_MOST_TEXTS} keys and texts, or {_MOST_LISTS} arrays and objects"
)
_TOO_MANY_KEYS = Refusal(RefusalCode.INVALID_REQUEST, f"The JSON object has more than {MAX_KEYS} keys")


class Outline(Struct, frozen=True, gc=False):
    """Offsets into a JSON object. A span begins at a value's first byte and ends after its last."""

    start: int
    """After the opening brace: where a new key goes."""
    spans: dict[str, tuple[int, int]]

    def value(self, body: bytes, key: str) -> bytes:
        """The value's bytes, b"" when the key is not there."""
        span = self.spans.get(key)
        return body[span[0] : span[1]] if span else b""

    def view(self, body: bytes, key: str) -> memoryview:
        """The value's bytes, not copied."""
        span = self.spans.get(key, (0, 0))
        return memoryview(body)[span[0] : span[1]]


def outline(body: bytes) -> Outline | Refusal:
    """Find the top-level values of the JSON object that is the whole of `body`.

    Returns:
        The outline, or a refusal with status 400: no JSON, no object, not UTF-8, a key twice, or too many keys. Nesting is
        only bounded by the decoder; see `too_deep`.
    """
    try:
        if not body.isascii():
            body.decode()
        if len(body) > 2 * _MOST_TEXTS and _is_sprawling(body):
            return _TOO_MANY_VALUES
        if body.count(_COLON) > _SUSPICIOUS and _is_crowded(body):
            return _TOO_MANY_KEYS
        fields = _decode(body)
    except msgspec.ValidationError:
        return _NOT_AN_OBJECT
    except msgspec.DecodeError as error:
        return _BOM if body.startswith(b"\xef\xbb\xbf") else Refusal(RefusalCode.INVALID_REQUEST, f"The body is not valid JSON: {error}")
    except UnicodeDecodeError:
        return _NOT_UTF8
    except RecursionError:
        return TOO_DEEP
    if len(fields) > MAX_KEYS:
        return _TOO_MANY_KEYS
    return _walk(body, fields)


def _is_sprawling(body: bytes) -> bool:
    """Whether the body holds so many small values that looking at each would hold up everybody else.

    Inside of a text a quote follows a backslash, so that a long prompt, of JSON or code too, counts as the one text it is.
    """
    if body.count(b'"') > _MOST_TEXTS:
        dense = body.translate(None, b" \t\r\n")
        if dense.count(b',"') + dense.count(b'{"') + dense.count(b'["') > _MOST_TEXTS:
            return True
    return body.count(b"[") + body.count(b"{") > _MOST_LISTS and len(_outside_strings(body, _ALL_BUT_OPENING)) > _MOST_LISTS


class _Key(str):
    """A key that is counted."""

    __slots__ = ()


class _Crowded(Exception):  # noqa: N818 - no error, but the way out of the decoder
    pass


def _is_crowded(body: bytes) -> bool:
    """Whether the object has more than `MAX_KEYS` keys: the decoder is left at the first one too many."""
    keys = iter(range(MAX_KEYS))

    def counted(_: type, key: str) -> _Key:
        if next(keys, None) is None:
            raise _Crowded
        return _Key(key)

    try:
        msgspec.json.decode(body, type=dict[_Key, Raw], dec_hook=counted)
    except _Crowded:
        return True
    return False


def _walk(body: bytes, fields: dict[str, Raw]) -> Outline | Refusal:
    spans: dict[str, tuple[int, int]] = {}
    view = memoryview
    whole = view(body)
    at = 0
    for key, raw in fields.items():
        found = _next_key(body, at)
        if found is None:
            return _twice(key)
        name = found[1]
        if name != key.encode() and (b"\\" not in name or _decode_key(b'"%b"' % name) != key):
            return _twice(name.decode())
        start = found.end()
        at = start + len(view(raw))
        if Raw(whole[start:at]) != raw:
            return _twice(key)
        spans[key] = (start, at)
    if fields and _end(body, at) is None:
        surplus = _next_key(body, at)
        return _twice(surplus[1].decode() if surplus else key)
    return Outline(body.index(b"{") + 1, spans)


def _twice(key: str) -> Refusal:
    return Refusal(
        RefusalCode.INVALID_REQUEST, "A key occurs more than once in the JSON object", param=key[:64] if key.isprintable() else None
    )


def too_deep(body: bytes, strings: bytes = b"") -> bool:
    """Whether arrays and objects of the valid JSON `body` are nested more than `MAX_DEPTH` levels.

    Args:
        body: Valid JSON.
        strings: Strings of `body`, joined by commas: their brackets nest nothing, which mostly spares the exact count.
    """
    if len(body) - len(strings) <= 2 * MAX_DEPTH:
        return False
    if len(body.split(b"[", _ENOUGH)) + len(body.split(b"{", _ENOUGH)) - 2 <= MAX_DEPTH:
        return False
    if body.count(b"[") + body.count(b"{") - strings.count(b"[") - strings.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _outside_strings(body, _ALL_BUT_BRACKETS).translate(_STEPS)
    return max(accumulate(array("b", brackets)), default=0) > MAX_DEPTH


def holds_more(body: bytes, most: int) -> bool:
    """Whether the valid JSON `body` holds more than `most` values in its arrays and objects, at any depth, without looking at each."""
    return body.count(b",") > most and len(_outside_strings(body, _ALL_BUT_COMMAS)) > most


def _outside_strings(body: bytes, dropped: bytes) -> bytes:
    """What stands outside of the strings of `body`, but for the bytes in `dropped`. All of it is done in C."""
    if _BACKSLASH[:1] in body:
        body = body.replace(_BACKSLASH, b"").replace(rb"\"", b"")
    return b"".join(body.translate(None, dropped).replace(b'""', b"").split(b'"')[::2])


def without_lone_surrogates(body: bytes) -> bytes:
    r"""`body` with each escape of half a surrogate pair (`\\ud83d` alone) replaced by `\\ufffd`. Offsets stay the same.

    Such an escape is legal JSON, but nothing that can be written as UTF-8, so decoders refuse it. Escaped backslashes, which could hide
    what is an escape and what isn't, are meanwhile a byte that no JSON holds.
    """
    if (rb"\ud" not in body and rb"\uD" not in body) or b"\0" in body:
        return body
    return _lone(rb"\\ufffd", body.replace(_BACKSLASH, _NO_BYTE), _MOST_HALVES).replace(_NO_BYTE, _BACKSLASH)

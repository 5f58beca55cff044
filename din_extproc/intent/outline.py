"""Byte offsets of the top-level values of a JSON object, for reading and splicing.

An outline is exact or there is none. The C decoder yields the values in the order of their keys; one scan over the keys finds each value
again at its expected offset. A mismatch between scan and decoder means a duplicate key.
"""

import re
from array import array
from itertools import accumulate

import msgspec
from msgspec import Raw, Struct

from din_extproc.domain.verdict import Refusal, RefusalCode

MAX_KEYS = 1024
"""The largest number of keys of an outlined object."""
MAX_DEPTH = 512
"""The largest nesting depth."""

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode
_next_key = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t\r\n]*:[ \t\r\n]*').match
_end = re.compile(rb"[ \t\r\n]*\}").match
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_lone = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|[c-fC-F][0-9a-fA-F]{2}(?<!%b%b))" % (_LOW, _HIGH, _LOW)).sub
_BACKSLASH, _NO_BYTE = rb"\\", b"\0\0"

_COLON = b'":'
_COUNT_KEYS_FROM = 16 * MAX_KEYS
"""Number of keys in the whole body, at any depth, above which the object's own keys are counted before the decoder builds them all."""
_MAX_STRINGS = 1 << 19
"""The largest number of keys and strings of a body, at any depth."""
_MAX_CONTAINERS = 1 << 18
"""The largest number of arrays and objects of a body, at any depth."""
_MAX_SURROGATES = 1 << 16
"""The largest number of lone surrogates that are replaced; a body with more is refused."""
_DEPTH_EXCEEDED = MAX_DEPTH + 1
_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
_NON_BRACKETS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_NON_OPENING = bytes(byte for byte in range(256) if byte not in b'[{"')
_NON_COMMAS = bytes(byte for byte in range(256) if byte not in b',"')

TOO_DEEP = Refusal(RefusalCode.INVALID_REQUEST, f"The JSON is nested more than {MAX_DEPTH} levels deep")
_NOT_UTF8 = Refusal(RefusalCode.INVALID_REQUEST, "The body is not UTF-8")
_BOM = Refusal(RefusalCode.INVALID_REQUEST, "The body begins with a byte order mark; JSON is sent as UTF-8 without one")
_NOT_AN_OBJECT = Refusal(RefusalCode.INVALID_REQUEST, "The body is not a JSON object")
_TOO_MANY_VALUES = Refusal(
    RefusalCode.INVALID_REQUEST, f"The JSON holds more than {_MAX_STRINGS} keys and texts, or {_MAX_CONTAINERS} arrays and objects"
)
_TOO_MANY_KEYS = Refusal(RefusalCode.INVALID_REQUEST, f"The JSON object has more than {MAX_KEYS} keys")


class Outline(Struct, frozen=True, gc=False):
    """Offsets into a JSON object. A span starts at a value's first byte and ends after its last."""

    start: int
    """The offset after the opening brace, where new keys are inserted."""
    spans: dict[str, tuple[int, int]]

    def value(self, body: bytes, key: str) -> bytes:
        """Return the value's bytes, b"" when the key is missing."""
        span = self.spans.get(key)
        return body[span[0] : span[1]] if span else b""

    def view(self, body: bytes, key: str) -> memoryview:
        """Return the value's bytes without copying."""
        span = self.spans.get(key, (0, 0))
        return memoryview(body)[span[0] : span[1]]


def build_outline(body: bytes) -> Outline | Refusal:
    """Find the top-level values of the JSON object that is the whole of `body`.

    Returns:
        The outline, or a refusal with status 400: no JSON, no object, not UTF-8, a duplicate key, or too many keys. Nesting is
        only bounded by the decoder; see `too_deep`.
    """
    try:
        if not body.isascii():
            body.decode()
        if len(body) > 2 * _MAX_STRINGS and _has_too_many_values(body):
            return _TOO_MANY_VALUES
        if body.count(_COLON) > _COUNT_KEYS_FROM and _has_too_many_keys(body):
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
    return _locate_values(body, fields)


def _has_too_many_values(body: bytes) -> bool:
    """Return whether the body holds so many small values that decoding would delay other requests.

    Inside a string a quote follows a backslash, so a long prompt, even of JSON or code, counts as one string.
    """
    if body.count(b'"') > _MAX_STRINGS:
        dense = body.translate(None, b" \t\r\n")
        if dense.count(b',"') + dense.count(b'{"') + dense.count(b'["') > _MAX_STRINGS:
            return True
    return body.count(b"[") + body.count(b"{") > _MAX_CONTAINERS and len(_drop_strings(body, _NON_OPENING)) > _MAX_CONTAINERS


class _CountedKey(str):
    """A counted key."""

    __slots__ = ()


class _TooManyKeys(Exception):  # noqa: N818 - no error, but the way out of the decoder
    pass


def _has_too_many_keys(body: bytes) -> bool:
    """Return whether the object has more than `MAX_KEYS` keys. Decoding stops at the first excess key."""
    keys = iter(range(MAX_KEYS))

    def counted(_: type, key: str) -> _CountedKey:
        if next(keys, None) is None:
            raise _TooManyKeys
        return _CountedKey(key)

    try:
        msgspec.json.decode(body, type=dict[_CountedKey, Raw], dec_hook=counted)
    except _TooManyKeys:
        return True
    return False


def _locate_values(body: bytes, fields: dict[str, Raw]) -> Outline | Refusal:
    spans: dict[str, tuple[int, int]] = {}
    view = memoryview
    whole = view(body)
    at = 0
    for key, raw in fields.items():
        found = _next_key(body, at)
        if found is None:
            return _refuse_duplicate(key)
        name = found[1]
        if name != key.encode() and (b"\\" not in name or _decode_key(b'"%b"' % name) != key):
            return _refuse_duplicate(name.decode())
        start = found.end()
        at = start + len(view(raw))
        if Raw(whole[start:at]) != raw:
            return _refuse_duplicate(key)
        spans[key] = (start, at)
    if fields and _end(body, at) is None:
        surplus = _next_key(body, at)
        return _refuse_duplicate(surplus[1].decode() if surplus else key)
    return Outline(body.index(b"{") + 1, spans)


def _refuse_duplicate(key: str) -> Refusal:
    return Refusal(
        RefusalCode.INVALID_REQUEST, "A key occurs more than once in the JSON object", param=key[:64] if key.isprintable() else None
    )


def is_too_deep(body: bytes, strings: bytes = b"") -> bool:
    """Return whether arrays and objects of the valid JSON `body` are nested more than `MAX_DEPTH` levels.

    Args:
        body: Valid JSON.
        strings: Strings of `body`, joined by commas: excluding their brackets mostly avoids the exact count.
    """
    if len(body) - len(strings) <= 2 * MAX_DEPTH:
        return False
    if len(body.split(b"[", _DEPTH_EXCEEDED)) + len(body.split(b"{", _DEPTH_EXCEEDED)) - 2 <= MAX_DEPTH:
        return False
    if body.count(b"[") + body.count(b"{") - strings.count(b"[") - strings.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _drop_strings(body, _NON_BRACKETS).translate(_STEPS)
    return max(accumulate(array("b", brackets)), default=0) > MAX_DEPTH


def has_more_values(body: bytes, most: int) -> bool:
    """Return whether the arrays and objects of the valid JSON `body` hold more than `most` values at any depth. Runs in C."""
    return body.count(b",") > most and len(_drop_strings(body, _NON_COMMAS)) > most


def _drop_strings(body: bytes, dropped: bytes) -> bytes:
    """Return the bytes outside of the strings of `body`, except those in `dropped`. Runs in C."""
    if _BACKSLASH[:1] in body:
        body = body.replace(_BACKSLASH, b"").replace(rb"\"", b"")
    return b"".join(body.translate(None, dropped).replace(b'""', b"").split(b'"')[::2])


def replace_lone_surrogates(body: bytes) -> bytes:
    r"""Return `body` with each lone surrogate escape (`\\ud83d` alone) replaced by `\\ufffd`. Offsets stay the same.

    Such an escape is legal JSON, but it has no UTF-8 form, so decoders reject it. Escaped backslashes are temporarily replaced by a byte
    that
    JSON never contains, so that they can't be mistaken for the start of an escape.
    """
    if (rb"\ud" not in body and rb"\uD" not in body) or b"\0" in body:
        return body
    return _lone(rb"\\ufffd", body.replace(_BACKSLASH, _NO_BYTE), _MAX_SURROGATES).replace(_NO_BYTE, _BACKSLASH)

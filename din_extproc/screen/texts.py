r"""JSON strings as texts and back: decoded to look at, edited at byte offsets.

Rule: what isn't known to be no text is text: no field is overlooked because it is new. An edit replaces what stands between two offsets of
the string as it was sent; every other byte and escape stays.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

Edit = tuple[int, int, bytes]
"""Of a decoded text: from where, to where, and its replacement (JSON needs no escape for it)."""

_GAP = rb"[ \t\r\n]*+"
_IS = rb'"%b:%b' % (_GAP, _GAP)
_FIELDS = b"|".join(
    b"role type content text name function arguments input output messages documents tools tool_calls tool_call_id function_call index id"
    b" call_id reasoning_content reasoning refusal parameters properties required description json_schema schema strict format image_url"
    b" url detail source input_audio file data".split()
)
_BASE64 = rb"(?:[\w+/=-]|\\/)"
_ADDRESS = rb'"https?:(?:[!#-\[\]-~]|\\/)*+"'
_PART = rb'\{%b(?:"(?:detail|type|media_type)%b"[\w/+.-]*+"%b,%b)*+"url%b' % (_GAP, _IS, _GAP, _GAP, _IS)
_KEYED = b"|".join(
    (
        rb'(?:role|type)%b"[a-z_]{0,32}"' % _IS,
        rb'(?:id|call_id|tool_call_id|tool_use_id|item_id|file_id)%b"[\w.:|+/=-]{0,256}"' % _IS,
        rb'(?:data|file_data|image|audio|video|bytes|b64_json)%b"%b{256,}+"' % (_IS, _BASE64),
        rb"(?:image_url|video_url|audio_url|file_url|image|audio|video|source)%b(?:%b)?%b" % (_IS, _PART, _ADDRESS),
        rb'(?:%b)"%b:' % (_FIELDS, _GAP),
    )
)
_MEDIA = rb'data:(?:[\w+.;=/-]|\\/){0,128};base64,%b*+"' % _BASE64
_OVERLOOKED = rb'(?=[a-z_0-9]{1,20}+"%b:)(?:%b)|%b' % (_GAP, _KEYED, _MEDIA)
"""Strings that hold no text, from after the opening quote."""
_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'
_looked_at = re.compile(rb'"(?:%b|(%b))' % (_OVERLOOKED, _STRING)).findall
_split = re.compile(rb'("(?:%b|%b))' % (_OVERLOOKED, _STRING)).split
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_escape = re.compile(rb"(%b%b|\\u[0-9a-fA-F]{4}|\\.)" % (_HIGH, _LOW))
_decode = msgspec.json.Decoder(list[str]).decode
_decode_one = msgspec.json.Decoder(str).decode
_NO_CHARACTER = "\ufffd".encode()


def literals(json: bytes) -> list[bytes]:
    """The strings in some valid JSON that may be words, quotes and escapes as sent.

    That is all of them, keys too, but for the interface's own keys, roles and types, ids (of characters that ids are made of), media in
    base64 and the addresses of media.
    """
    return [b'"' + rest for rest in _looked_at(json) if rest]


def decoded(json: bytes) -> list[str]:
    """Return the texts of the `literals` of some valid JSON without halves of surrogate pairs."""
    found = list(filter(None, _looked_at(json)))
    return _decode(b'["%b]' % b',"'.join(found)) if found else []


def edited(json: bytes, readable: bytes, edits: Mapping[bytes, Sequence[Edit]]) -> bytes:
    """Some JSON with its strings edited.

    Args:
        json: As sent.
        readable: The same with the same offsets, in the form in which its strings were decoded.
        edits: By string, as `readable` has it. Each string's are in order and do not overlap.
    """
    parts, readable_parts = _split(json), _split(readable)
    return b"".join(
        [part if seen not in edits else _splice_literal(part, seen, edits[seen]) for part, seen in zip(parts, readable_parts, strict=True)]
    )


def _splice_literal(literal: bytes, readable: bytes, edits: Iterable[Edit]) -> bytes:
    offset = _make_offsets(readable)
    parts: list[bytes] = []
    at = 0
    for start, end, instead in edits:
        parts += (literal[at : offset(start)], instead)
        at = offset(end)
    parts.append(literal[at:])
    return b"".join(parts)


def _make_offsets(literal: bytes) -> Callable[[int], int]:
    """From offsets of the decoded text to offsets of the literal."""
    if b"\\" not in literal:
        return lambda at: at + 1
    pieces = _escape.split(literal[1:-1])
    plain = [len(piece) if not at % 2 else len(_decode_escape(piece)) for at, piece in enumerate(pieces)]
    before = list(accumulate(plain, initial=0))
    sent = list(accumulate(map(len, pieces), initial=1))

    def offset(at: int) -> int:
        piece = min(bisect_right(before, at) - 1, len(pieces))
        return sent[piece] + at - before[piece]

    return offset


def _decode_escape(escape: bytes) -> bytes:
    try:
        return _decode_one(b'"%b"' % escape).encode()
    except msgspec.DecodeError:  # half a surrogate pair
        return _NO_CHARACTER

"""Decodes the body to plain bytes according to content-type and content-encoding.

The size limit applies while decoding.
"""

import zlib
from collections.abc import Mapping

from din_extproc.domain.request import BodyKind
from din_extproc.domain.verdict import Refusal, RefusalCode

_GZIP = 16 + zlib.MAX_WBITS
_MAX_MEMBERS = 16
"""The largest number of gzip members in one body. Each costs a copy of the rest of the body."""

_EMPTY = {
    BodyKind.JSON: Refusal(RefusalCode.INVALID_REQUEST, "The request has no body; a JSON object is expected"),
    BodyKind.MULTIPART: Refusal(RefusalCode.INVALID_REQUEST, "The request has no body; a form is expected"),
}
_NOT_JSON = Refusal(RefusalCode.INVALID_REQUEST, "The content-type is not application/json", param="content-type")
_NOT_A_FORM = Refusal(RefusalCode.INVALID_REQUEST, "The content-type is not multipart/form-data", param="content-type")
_CORRUPT = Refusal(RefusalCode.INVALID_REQUEST, "The body is not what its content-encoding gzip promises", param="content-encoding")
_UNSUPPORTED = Refusal(RefusalCode.UNSUPPORTED_MEDIA, "Only gzip and identity are supported as content-encoding", param="content-encoding")


def is_json(content_type: str) -> bool:
    """Return whether a content-type, with or without parameters, is JSON. A missing content-type counts as JSON.

    A header that came twice with one value counts once.
    """
    medias = {value.strip().lower() for value in content_type.partition(";")[0].split(",")}
    media = medias.pop()
    return not medias and (not media or media == "application/json" or (media.startswith("application/") and media.endswith("+json")))


def is_form(content_type: str) -> bool:
    """Return whether a content-type is that of a form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def decode_body(headers: Mapping[str, str], kind: BodyKind, body: bytes, limit: int) -> tuple[bytes, bool] | Refusal:
    """Remove the body's content-encoding.

    Args:
        headers: The request's headers, names in lower case.
        kind: What the body has to be.
        body: The body as sent.
        limit: The largest plain body, in bytes.

    Returns:
        The plain bytes and whether they differ from the body, or a refusal with status 400, 413 or 415.
    """
    content_type = headers.get("content-type", "")
    if kind is BodyKind.MULTIPART:
        if not is_form(content_type):
            return _NOT_A_FORM
    elif content_type != "application/json" and not is_json(content_type):
        return _NOT_JSON
    coding = headers.get("content-encoding", "").strip().lower()
    decoded = coding in ("gzip", "x-gzip")
    if not decoded and coding not in ("", "identity"):
        return _UNSUPPORTED
    if decoded:
        inflated = _decompress(body, limit)
        if isinstance(inflated, Refusal):
            return inflated
        body = inflated
    if len(body) > limit:
        return _refuse_too_large(limit)
    return (body, decoded) if body else _EMPTY[kind]


def _decompress(body: bytes, limit: int) -> bytes | Refusal:
    parts: list[bytes] = []
    room = limit + 1
    for _ in range(_MAX_MEMBERS):
        member = zlib.decompressobj(wbits=_GZIP)
        try:
            part = member.decompress(body, room)
        except zlib.error:
            return _CORRUPT
        parts.append(part)
        room -= len(part)
        if room <= 0:
            return _refuse_too_large(limit)
        if not member.eof:
            return _CORRUPT
        body = member.unused_data
        if not body:
            return b"".join(parts)
    return _CORRUPT


def _refuse_too_large(limit: int) -> Refusal:
    return Refusal(RefusalCode.REQUEST_TOO_LARGE, f"The body is larger than {limit} bytes")

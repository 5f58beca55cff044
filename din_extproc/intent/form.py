"""Finds the parts of a form (`multipart/form-data`, RFC 7578) by their offsets, so that one can be replaced.

Total and strict: what engines read in different ways (a part twice, a boundary inside a part, two names of one part) is refused. Each
boundary is found by one search in C, so the cost is linear in the body.
"""

import re

from msgspec import Struct

from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.intent.outline import Outline

MAX_PARTS = 128
_MAX_HEADERS = 4096
"""The longest headers of a part, in bytes."""
_BOUNDARY = re.compile(r';[ \t]*boundary=(?:"([^"\\]{1,70})"|([^\s;,"]{1,70}))[ \t]*(?=;|$)', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:[ \t]*form-data[ \t]*((?:;[^\r\n]*)?)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb';[ \t]*([\w*-]+)=("(?:[^"\\]|\\.)*"|[^\s;"]+)[ \t]*')
_REPEATED = "[]"
"""The end of the names that may occur more than once."""

_BYTES_PER_SECOND = 16_000
"""Of audio that is compressed, 128 kbit/s: an estimate for files that do not say."""
_WAVE_RATES = 4_000, 192_000
"""The slowest and the fastest bytes per second that the header of a WAVE file is believed."""
_RATE_AT = 16
"""The offset of the bytes per second in the `fmt ` chunk."""
_WAVE_HEADER, _WAVE_HEADERS = 44, 512
"""Bytes before the sound at least, and those among which its rate is looked for."""

_NOT_A_FORM = Refusal(RefusalCode.INVALID_REQUEST, "The content-type names no boundary of the form", param="content-type")


class Form(Struct, frozen=True, gc=False):
    """The parts of a form."""

    outline: Outline
    """Texts by name. The further ones of a name that ends in `[]` have their number behind it."""
    file: tuple[int, int] = (0, 0)
    """The offsets of the first file."""


def outline_form(body: bytes, content_type: str) -> Form | Refusal:
    """Find the parts of the form that is the whole of `body`.

    Args:
        body: The form.
        content_type: Of the request: it names the boundary.

    Returns:
        The parts, or a refusal with status 400 that says what is malformed.
    """
    boundaries = _BOUNDARY.findall(content_type)
    if len(boundaries) != 1 or content_type.lower().count("boundary=") != 1:
        return _NOT_A_FORM
    delimiter = b"--" + "".join(boundaries[0]).encode("latin-1", "replace")
    if not body.startswith(delimiter):
        return _malformed("it does not begin with the boundary that the content-type names")
    spans: dict[str, tuple[int, int]] = {}
    file = (0, 0)
    at, closing = len(delimiter), b"\r\n" + delimiter
    for number in range(1, MAX_PARTS + 1):
        if body.startswith(b"--", at):
            return Form(Outline(0, spans), file)
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEADERS)
        if head_end < 0 or not body.startswith(b"\r\n", at):
            return _malformed(f"part {number} has no headers that end within {_MAX_HEADERS} bytes, or the boundary goes on")
        parameters = _read_disposition(body[at + 2 : head_end])
        if parameters is None:
            return _malformed(f"part {number} has no content-disposition with one name")
        start = head_end + 4
        end = body.find(closing, start)
        if end < 0:
            return _malformed(f"part {number} is not closed by the boundary")
        if b"filename" in parameters or b"filename*" in parameters:
            file = file if file[1] else (start, end)
        else:
            name = parameters[b"name"].decode(errors="replace")
            if name in spans and not name.endswith(_REPEATED):
                return _malformed(f"part {number} has the name of an earlier one")
            spans[f"{name}{number}" if name in spans else name] = start, end
        at = end + len(closing)
    return _malformed(f"it has more than {MAX_PARTS} parts, or no boundary that ends with --")


def estimate_seconds(body: bytes, file: tuple[int, int]) -> int:
    """Estimate how long the audio in a file is, in whole seconds, rounded up: by the header of a WAVE file, else by its size."""
    start, end = file
    rate = _BYTES_PER_SECOND
    if body.startswith(b"RIFF", start) and body.startswith(b"WAVE", start + 8):
        chunk = body.find(b"fmt ", start, min(end, start + _WAVE_HEADERS))
        if chunk >= 0:
            slowest, fastest = _WAVE_RATES
            rate = min(fastest, max(slowest, int.from_bytes(body[chunk + _RATE_AT : chunk + _RATE_AT + 4], "little")))
            start = min(end, start + _WAVE_HEADER)
    return -(-(end - start) // rate)


def _read_disposition(headers: bytes) -> dict[bytes, bytes] | None:
    """Return the parameters of a part's `content-disposition`; None: there is not exactly one, or not exactly one name."""
    found = _DISPOSITION.findall(headers.replace(b"\r\n", b"\n"))
    if len(found) != 1 or headers.lower().count(b"content-disposition") != 1:
        return None
    pairs = _PARAMETER.findall(found[0])
    parameters = {key.lower(): value.strip(b'"') for key, value in pairs}
    if len(parameters) != len(pairs) or _PARAMETER.sub(b"", found[0]) or b"name" not in parameters:
        return None
    return parameters


def _malformed(why: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"The form is malformed: {why}")

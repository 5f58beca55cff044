"""Byte-exact edits of a JSON object: values are replaced or keys inserted, every other byte stays as sent.

Nothing is serialised again. Big integers, number spellings, white space and unknown fields survive.
"""

from collections.abc import Collection, Mapping

from din_extproc.domain.verdict import Refusal
from din_extproc.intent.outline import Outline, build_outline, replace_lone_surrogates

_USAGE_ONLY = b'{"include_usage":true}'


def splice_values(body: bytes, at: Outline, values: Mapping[str, bytes], removed: Collection[str] = ()) -> bytes:
    """Return the object with these values: in place of the old value, or before all keys if the key is new.

    Args:
        body: A JSON object.
        at: Its outline.
        values: JSON by top-level key. Keys are plain names that JSON writes without escapes.
        removed: Keys to remove with their values and one comma. None of them may be in `values`.
    """
    if removed:
        return _splice_and_remove(body, at, values, removed)
    edits = sorted((at.spans[key], value) for key, value in values.items() if key in at.spans)
    inserted = [b'"%b":%b' % (key.encode(), value) for key, value in values.items() if key not in at.spans]
    parts = [body[: at.start], b",".join(inserted)]
    if inserted and at.spans:
        parts.append(b",")
    position = at.start
    for (start, end), value in edits:
        parts += (body[position:start], value)
        position = end
    parts.append(body[position:])
    return b"".join(parts)


def offset_after_splice(at: Outline, values: Mapping[str, bytes], key: str) -> int:
    """Return the offset of an existing value in the result of `splice_values`, when nothing is removed."""
    inserted = [len(name) + 3 + len(value) for name, value in values.items() if name not in at.spans]
    start = at.spans[key][0]
    shift = sum(inserted) + len(inserted)
    for name, value in values.items():
        span = at.spans.get(name)
        if span is not None and span[0] < start:
            shift += len(value) - (span[1] - span[0])
    return start + shift


def _splice_and_remove(body: bytes, at: Outline, values: Mapping[str, bytes], removed: Collection[str]) -> bytes:
    """Return the object as `splice_values` does, copying member by member: from its comma to the end of its value."""
    parts = [body[: at.start], b",".join([b'"%b":%b' % (key.encode(), value) for key, value in values.items() if key not in at.spans])]
    follows, position = bool(parts[1]), at.start
    for index, (key, (start, end)) in enumerate(at.spans.items()):
        if key not in removed:
            lead = body[position:start]
            bare = lead[lead.index(b",") + 1 :] if index else lead
            parts += (b"," if follows else b"", bare, values.get(key) or body[start:end])
            follows = True
        position = end
    parts.append(body[position:])
    return b"".join(parts)


def add_include_usage(options: bytes) -> bytes:
    """Return `stream_options` with `include_usage` set and everything else unchanged.

    Args:
        options: The value as sent, b"" when it is missing. A value that is neither an object nor null is returned unchanged.
    """
    if options in (b"", b"null"):
        return _USAGE_ONLY
    inner = build_outline(replace_lone_surrogates(options) if b"\\u" in options else options)
    if isinstance(inner, Refusal) or inner.value(options, "include_usage") == b"true":
        return options
    return splice_values(options, inner, {"include_usage": b"true"})

"""Encoding of protobuf fields around serialised messages, without parsing or copying them.

Invariant: every field is length-delimited, and the fields of a message may have any order.
"""

_LENGTH_DELIMITED = 2
_MORE = 0x80
_SEVEN_BITS = 0x7F


def encode_head(number: int, length: int) -> bytes:
    """Return the tag and length prefix of a field."""
    out = bytearray()
    for value in (number << 3 | _LENGTH_DELIMITED, length):
        left = value
        while left > _SEVEN_BITS:
            out.append(left & _SEVEN_BITS | _MORE)
            left >>= 7
        out.append(left)
    return bytes(out)


def encode_field(number: int, content: bytes) -> bytes:
    """Return the encoded field."""
    return encode_head(number, len(content)) + content

"""Protobuf fields around bytes that are a message already, so that large parts are never parsed or copied on their way.

Rule: every field here is length-delimited, and fields of one message may stand in any order, one behind the other.
"""

_LENGTH_DELIMITED = 2
_MORE = 0x80
_SEVEN_BITS = 0x7F


def head(number: int, length: int) -> bytes:
    """What stands before `length` bytes of the field with this number."""
    out = bytearray()
    for value in (number << 3 | _LENGTH_DELIMITED, length):
        left = value
        while left > _SEVEN_BITS:
            out.append(left & _SEVEN_BITS | _MORE)
            left >>= 7
        out.append(left)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    """The whole field."""
    return head(number, len(content)) + content

"""The hash chain of an audit log: each line carries a MAC over its bytes and over the MAC of the line before.

Rule: the chain proves bytes. A line is `{"seq":N,...,"mac":"HEX"}` and a line feed; the MAC covers everything before `,"mac"`. Without the
key no line can be forged, and a removed line invalidates the next one.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

MAC_BYTES = 32
SHORTEST_KEY = 16
"""Bytes."""
LOG, MANIFEST, HEAD = (hashlib.sha256(b"din audit " + what).digest() for what in (b"log", b"manifest", b"head"))
"""The value before the first line of each, so that a line of one is never valid in another."""
_TAIL = re.compile(rb',"mac":"([0-9a-f]{64})"\}\n\Z')
_TAIL_BYTES = len(b',"mac":""}\n') + 2 * MAC_BYTES


class SigningKey(Struct, frozen=True):
    """A key for MACs. `secret` never leaves the process."""

    id: str
    secret: bytes


Shape = TypeVar("Shape")
Keys = Mapping[str, bytes]
"""Secrets by id: all that lines may have been signed with."""


class Segment(Struct, frozen=True, tag_field="kind", tag="segment", kw_only=True):
    """The first line of every file."""

    at: float
    replica: str
    network: str
    segment: int
    """Counted from 1."""
    key: str
    """The id of the key that signs this file."""
    previous: str
    """The MAC before this line, in hex."""


class Sealed(Struct, frozen=True, kw_only=True):
    """A file that nothing is added to any more: one line of the manifest, signed likewise."""

    segment: int
    first: int
    last: int
    bytes: int
    sha256: str
    key: str


class LogHead(Struct, frozen=True, kw_only=True):
    """The last position of the log: one line in a file of its own, signed likewise and replaced after each flush."""

    at: float
    replica: str
    segment: int
    chain: str
    """The MAC of the record with the line's number."""
    sealed: int
    """Lines of the manifest."""
    manifest: str
    """The MAC of the manifest's last line."""
    key: str


_encode = msgspec.json.Encoder().encode


def compute_mac(secret: bytes, before: bytes, signed: bytes) -> bytes:
    """The MAC of a line's signed part behind the line with that MAC."""
    return hmac.digest(secret, before + signed, "sha256")


def sign_entry(secret: bytes, before: bytes, seq: int, entry: object) -> tuple[bytes, bytes]:
    """An entry as a line, and its MAC."""
    signed = b'{"seq":%d,' % seq + _encode(entry)[1:-1]
    mac = compute_mac(secret, before, signed)
    return b'%b,"mac":"%b"}\n' % (signed, mac.hex().encode()), mac


class ChainLine(Struct, frozen=True, gc=False):
    """A line taken apart, believed nothing yet."""

    signed: bytes
    mac: bytes


def parse_line(line: bytes) -> ChainLine | None:
    """A line with its line feed; None: it can't be one of ours."""
    found = _TAIL.search(line)
    return None if found is None else ChainLine(line[:-_TAIL_BYTES], bytes.fromhex(found[1].decode()))


def is_genuine(secret: bytes, before: bytes, line: ChainLine) -> bool:
    """Return whether the line is unchanged and follows the line with the MAC `before`."""
    return hmac.compare_digest(compute_mac(secret, before, line.signed), line.mac)


def decode_line(line: ChainLine, shape: type[Shape]) -> Shape | None:
    """Return the content of a line; None: it has another shape."""
    try:
        return msgspec.json.decode(line.signed + b"}", type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Numbered(Struct):
    seq: int


_number = msgspec.json.Decoder(_Numbered).decode


def read_number(line: ChainLine) -> int | None:
    """The number that a line gives itself; None: it gives none."""
    try:
        return _number(line.signed + b"}").seq
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def compute_checksum(data: bytes) -> str:
    """The checksum of a file, for its seal."""
    return hashlib.sha256(data).hexdigest()

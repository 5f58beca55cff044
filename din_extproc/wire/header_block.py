"""Header blocks, both ways: HPACK (RFC 7541), what a request's fields must look like (RFC 9113 section 8), and a memo of both.

Rule: once the peer has agreed to a table of size 0, a block means the same wherever it stands, so it is decoded once per process.
"""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer

from din_extproc.wire.frames import ErrorCode, GoAwayError

Fields = tuple[tuple[str, str], ...]
H = TypeVar("H")

_MEMO_ENTRIES = 1024
_MEMO_BLOCK_BYTES = 2048
_STATIC_STATUS_200 = b"\x88"
_CONNECTION_SPECIFIC = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})
_PSEUDO = frozenset({":method", ":scheme", ":authority", ":path"})
_REQUIRED = frozenset({":method", ":scheme", ":path"})
_BAD_IN_VALUE = frozenset("\0\r\n")
_BAD_IN_NAME = frozenset(map(chr, (*range(0x21), *range(0x41, 0x5B), *range(0x7F, 0x100))))


class MalformedError(Exception):
    """The block can be decoded, but no request or trailer looks like that: a stream error."""


def read_request(fields: Fields) -> int | None:
    """Check a request's fields (RFC 9113 sections 8.2 and 8.3) and return its content-length, if it has one.

    Raises:
        MalformedError: with what is wrong.
    """
    seen: set[str] = set()
    length: int | None = None
    regular = False
    for name, value in fields:
        if name[:1] == ":":
            if regular or name in seen or name not in _PSEUDO:
                raise MalformedError(f"pseudo header field {name!r} is unknown, repeated or late")
            seen.add(name)
        else:
            regular = True
            _check_regular(name, value)
            if name == "content-length":
                if not (value.isascii() and value.isdigit()) or (length is not None and int(value) != length):
                    raise MalformedError("content-length is not one number")
                length = int(value)
        _check_value(name, value)
    if not seen >= _REQUIRED:
        raise MalformedError("a pseudo header field is missing")
    if not dict(fields)[":path"]:
        raise MalformedError(":path is empty")
    return length


def check_trailers(fields: Fields) -> None:
    """Check a trailer section: no pseudo header fields.

    Raises:
        MalformedError: with what is wrong.
    """
    for name, value in fields:
        _check_regular(name, value)
        _check_value(name, value)


def _check_regular(name: str, value: str) -> None:
    if not name or name[0] == ":" or not _BAD_IN_NAME.isdisjoint(name) or ":" in name:
        raise MalformedError("a header field name is not allowed")
    if name in _CONNECTION_SPECIFIC or (name == "te" and value != "trailers"):
        raise MalformedError(f"connection-specific header field {name!r}")


def _check_value(name: str, value: str) -> None:
    if not _BAD_IN_VALUE.isdisjoint(value) or value[:1] in {" ", "\t"} or value[-1:] in {" ", "\t"}:
        raise MalformedError(f"the value of {name!r} is not allowed")


class RequestBlock(NamedTuple, Generic[H]):
    """One decoded request block: its declared length and the application's reading of its fields. Shared between calls and immutable."""

    meaning: H
    content_length: int | None


class Memo(Generic[H]):
    """Blocks that were decoded before, for all connections of a process. Forgets everything when it is full.

    Args:
        interpret: makes the application's own head from checked fields; pure, because its result is shared.
    """

    __slots__ = ("_known", "interpret")

    def __init__(self, interpret: Callable[[Fields], H]) -> None:
        self.interpret = interpret
        self._known: dict[bytes, RequestBlock[H]] = {}

    def find(self, block: bytes) -> RequestBlock[H] | None:
        """The block's request, if it was seen."""
        return self._known.get(block)

    def add(self, block: bytes, request: RequestBlock[H]) -> None:
        """Remember a well-formed block, when it is of ordinary size."""
        if len(block) > _MEMO_BLOCK_BYTES:
            return
        if len(self._known) >= _MEMO_ENTRIES:
            self._known.clear()
        self._known[block] = request


class BlockReader(Generic[H]):
    """Decodes the blocks of one connection, in the order they arrive.

    Args:
        memo: shared by every connection.
        max_list_bytes: a longer list of fields (as RFC 7541 counts it) ends the connection.
    """

    __slots__ = ("_decoder", "_memo", "_stateless")

    def __init__(self, memo: Memo[H], max_list_bytes: int) -> None:
        self._memo = memo
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self._stateless = False

    def table_size_agreed(self) -> None:
        """The peer has acknowledged our SETTINGS_HEADER_TABLE_SIZE of 0: what refers to the table from now on can't be decoded.

        A peer that does not repeat the size in its next block (RFC 7541 section 4.2) is forgiven: its blocks mean the same.
        """
        self._decoder.max_allowed_table_size = 0
        self._decoder.header_table_size = 0
        self._stateless = True

    def request(self, block: bytes) -> RequestBlock[H]:
        """Decode the block that opens a stream.

        Raises:
            MalformedError: a stream error.
            GoAwayError: the block can't be decoded (COMPRESSION_ERROR), or is a bomb (ENHANCE_YOUR_CALM).
        """
        if self._stateless:
            found = self._memo.find(block)
            if found is not None:
                return found
        fields = self.fields(block)
        length = read_request(fields)
        request = RequestBlock(self._memo.interpret(fields), length)
        if self._stateless:
            self._memo.add(block, request)
        return request

    def fields(self, block: bytes) -> Fields:
        """Decode any block.

        Raises:
            GoAwayError: as for `request`.
        """
        try:
            raw: Iterable[tuple[bytes, bytes]] = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise GoAwayError(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from error
        except (HPACKError, IndexError) as error:
            raise GoAwayError(ErrorCode.COMPRESSION_ERROR, "header block can't be decoded") from error
        return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in raw)


def literal(name: bytes, value: bytes) -> bytes:
    """One field as a literal without indexing (RFC 7541 section 6.2.2)."""
    return b"\x00" + _encode_string(name) + _encode_string(value)


def response_block(fields: Iterable[tuple[bytes, bytes]], status: int = 200) -> bytes:
    """The block that opens an answer with HTTP `status`."""
    opening = _STATIC_STATUS_200 if status == 200 else literal(b":status", b"%d" % status)  # noqa: PLR2004 - 200 has its own index
    return opening + b"".join(literal(name, value) for name, value in fields)


def _encode_string(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text

"""A verdict -> bytes of a `ProcessingResponse`.

Rule: a header that could break a header line never leaves (`ValueError`), and every header set replaces the one that is there.

The few shapes that are needed are written tag by tag, at half the cost of message objects. They are put together as text whose
characters stand for bytes (latin-1), because Python joins text faster than bytes. Before each part stand its tag (the field's number
times eight, plus 2 for bytes, text and messages, 1 for a double, 0 for a whole number) and, with type 2, its length.
"""

import re
from collections.abc import Collection, Mapping
from struct import Struct as Layout

from din_extproc._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    HeadersResponse,
    ProcessingResponse,
    TrailersResponse,
)
from din_extproc.domain.response import Replacement
from din_extproc.domain.verdict import Headers, ImmediateResponse, Send


def _mode(response_body: ProcessingMode.BodySendMode) -> ProcessingMode:
    """Which messages come from here on, see `control/filters.py` for why Envoy is not configured so.

    The response's trailers are among them because Envoy 1.37 and 1.38 otherwise end the stream at the response's headers, and its end is
    what releases a slot.
    """
    return ProcessingMode(
        response_header_mode=ProcessingMode.SEND,
        request_body_mode=ProcessingMode.BUFFERED,
        response_body_mode=response_body,
        response_trailer_mode=ProcessingMode.SEND,
    )


_ANSWER_WANTED = ProcessingResponse(mode_override=_mode(ProcessingMode.NONE)).SerializeToString()
CONTINUE_REQUEST_HEADERS = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString() + _ANSWER_WANTED
CONTINUE_REQUEST_BODY = ProcessingResponse(request_body=BodyResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()

NAMESPACE = "din"
"""Of the dynamic metadata."""

_CLEAR_ROUTE_CACHE = "\x28\x01"
_CLEAR_BODY = "\x10\x01"
_AND_REPLACE = "\x08\x01"
_NO_LENGTH = "\x12\x0econtent-length"
_NO_ENCODING = "\x12\x10content-encoding"
_PIECES_MODE, _WHOLE_MODE = (
    ProcessingResponse(mode_override=_mode(mode)).SerializeToString().decode("latin-1")
    for mode in (ProcessingMode.STREAMED, ProcessingMode.BUFFERED)
)
"""How the rest of an answer is to come."""
_OVERWRITE = "\x18\x02"
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(r":?[a-z0-9!#$%&'*+.^_`|~-]+")
_FINAL_STATUSES = range(200, 600)
_MORE = 0x80
_KEPT = 1024
_double = Layout("<d").pack


class _Lengths(dict[int, str]):
    """Numbers as protobuf writes them: seven bits in each byte, lowest first. Those below 16,384 are kept once written."""

    def __missing__(self, number: int) -> str:
        written, rest = "", number
        while rest >= _MORE:
            written += chr(rest & 0x7F | _MORE)
            rest >>= 7
        written += chr(rest)
        if number < _MORE * _MORE:
            self[number] = written
        return written


_length = _Lengths()


def _field(tag: str, content: str) -> str:
    """Text or a message, with its tag and length before it."""
    return f"{tag}{_length[len(content)]}{content}"


class _Keys(dict[str, str]):
    """Metadata names as the key of a map entry."""

    def __missing__(self, name: str) -> str:
        written = _field("\x0a", name.encode().decode("latin-1"))
        if len(self) < _KEPT:
            self[name] = written
        return written


class _Names(dict[str, str]):
    """Header names as the key of a `HeaderValue`. Asking for one that is no lower-case name raises `ValueError`."""

    def __missing__(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no header name in lower case")
        written = _field("\x0a", name)
        if len(self) < _KEPT:
            self[name] = written
        return written


class _Openings(dict[tuple[str, int], str]):
    """Encoded bytes before the value of a header to set, by its name and the value's length, with the append action."""

    def __missing__(self, name_and_size: tuple[str, int]) -> str:
        name, size = name_and_size
        before = f"{_name[name]}\x1a{_length[size]}"
        option = f"{_OVERWRITE}\x0a{_length[len(before) + size]}{before}"
        written = f"\x0a{_length[len(option) + size]}{option}"
        if len(self) < _KEPT:
            self[name_and_size] = written
        return written


_key = _Keys()
_name = _Names()
_opening = _Openings()


def send_at_headers(send: Send) -> bytes:
    """The reply to request headers that no body follows.

    Raises:
        ValueError: a header or a metadata value can't be written, or there is a new body for a request that has none.
    """
    if send.body is not None:
        raise ValueError("a request without a body can't be given one")
    common = _mutation(send) + _CLEAR_ROUTE_CACHE
    return (_metadata(send.metadata) + _field("\x0a", _field("\x0a", common))).encode("latin-1") + _ANSWER_WANTED


def send_at_body(send: Send) -> bytes:
    """The reply to the whole request body.

    Raises:
        ValueError: a header or a metadata value can't be written.
    """
    common = _CLEAR_ROUTE_CACHE + _mutation(send) if send.cluster else _mutation(send)
    body = send.body
    if body is None:
        return (_metadata(send.metadata) + _field("\x1a", _field("\x0a", common))).encode("latin-1")
    # The body stays bytes and comes last, at the end of every message it is in.
    size = len(body)
    common += _body_mutation(body)
    response = f"\x0a{_length[len(common) + size]}{common}"
    return f"{_metadata(send.metadata)}\x1a{_length[len(response) + size]}{response}".encode("latin-1") + body


def answer(given: ImmediateResponse) -> bytes:
    """The reply that ends the request here, to whatever message is open.

    Raises:
        ValueError: a header or a metadata value can't be written, or the status is none that ends an exchange.
    """
    if given.status not in _FINAL_STATUSES:
        raise ValueError(f"{given.status} is no final HTTP status")
    headers = _field("\x12", _set(given.headers))
    immediate = f"\x0a\x03\x08{_length[given.status]}{headers}\x1a{_length[len(given.body)]}"
    before = f"{_metadata(given.metadata)}\x3a{_length[len(immediate) + len(given.body)]}{immediate}"
    return before.encode("latin-1") + given.body


def response_headers(headers: Headers) -> bytes:
    """The reply to response headers: these are set.

    Raises:
        ValueError: a header can't be written.
    """
    return _field("\x12", _field("\x0a", _field("\x12", _set(headers)))).encode("latin-1")


def response_headers_of_pieces(headers: Headers) -> bytes:
    """The reply to response headers whose body is to come piece by piece.

    Raises:
        ValueError: a header can't be written.
    """
    return (_field("\x12", _field("\x0a", _field("\x12", _set(headers) + _NO_LENGTH))) + _PIECES_MODE).encode("latin-1")


def response_headers_of_whole(headers: Headers) -> bytes:
    """The reply to response headers that wait until their body is complete.

    Raises:
        ValueError: a header can't be written.
    """
    return (_field("\x12", _field("\x0a", _field("\x12", _set(headers)))) + _WHOLE_MODE).encode("latin-1")


def response_piece(body: bytes) -> bytes:
    """The reply to a piece of an answer's body: this replaces it."""
    mutation = f"\x0a{_length[len(body)]}" if body else _CLEAR_BODY
    common = f"\x1a{_length[len(mutation) + len(body)]}{mutation}"
    response = f"\x0a{_length[len(common) + len(body)]}{common}"
    return f"\x22{_length[len(response) + len(body)]}{response}".encode("latin-1") + body


def replacement(given: Replacement) -> bytes:
    """The reply to the whole body of an answer: all of it is another.

    Raises:
        ValueError: a header can't be written, or the status is none that ends an exchange.
    """
    mutation = _replaced(given) + _body_mutation(given.body)
    response = f"\x0a{_length[len(mutation) + len(given.body)]}{mutation}"
    return f"\x22{_length[len(response) + len(given.body)]}{response}".encode("latin-1") + given.body


def replacement_at_headers(given: Replacement) -> bytes:
    """The reply to response headers that no body follows: the answer is another, which may have a body.

    Raises:
        ValueError: a header can't be written, or the status is none that ends an exchange.
    """
    mutation = _AND_REPLACE + _replaced(given) + _body_mutation(given.body)
    response = f"\x0a{_length[len(mutation) + len(given.body)]}{mutation}"
    return f"\x12{_length[len(response) + len(given.body)]}{response}".encode("latin-1") + given.body


def _replaced(given: Replacement) -> str:
    if given.status not in _FINAL_STATUSES:
        raise ValueError(f"{given.status} is no final HTTP status")
    headers = ((":status", str(given.status)), *given.headers, ("content-length", str(len(given.body))))
    return _field("\x12", _set(headers) + _NO_ENCODING)


def _body_mutation(body: bytes) -> str:
    """All of a body mutation but the body, which stays bytes and follows it."""
    size = _length[len(body)]
    return f"\x1a{_length[1 + len(size) + len(body)]}\x0a{size}"


def _mutation(send: Send) -> str:
    """The header mutation of a request that goes on."""
    chosen = (("x-din-cluster", send.cluster), ("x-din-endpoint", ",".join(send.endpoints))) if send.cluster else ()
    headers = [*chosen, *send.request_headers]
    if send.body is not None:
        headers.append(("content-length", str(len(send.body))))
    if send.path is not None:
        headers.append((":path", send.path))
    removed = "".join([f"\x12{_name[name][1:]}" for name in send.remove_headers])
    return _field("\x12", _set(headers) + removed)


def _set(headers: Collection[tuple[str, str]]) -> str:
    """`set_headers`: for each one its `HeaderValue` and the action."""
    texts = "".join([value for _, value in headers])
    if not (texts.isascii() and texts.isprintable()):
        headers = [(name, _written(name, value)) for name, value in headers]
    return "".join([_opening[name, len(value)] + value for name, value in headers])


def _written(name: str, value: str) -> str:
    """The bytes of a value: latin-1, as headers are read; UTF-8 for what latin-1 has no byte for."""
    if _CONTROL.search(value):
        raise ValueError(f"the value of {name} holds a control character")
    return value if max(value, default="") <= "\xff" else value.encode().decode("latin-1")


def _metadata(values: Mapping[str, str | float | bool]) -> str:
    """Dynamic metadata: a `Struct` with one entry, the namespace, that holds a `Struct` of the values. "" when there are none."""
    if not values:
        return ""
    parts = []
    for name, value in values.items():
        if isinstance(value, str):
            text = value if value.isascii() else value.encode().decode("latin-1")
            content = f"\x1a{_length[len(text)]}{text}"
        elif isinstance(value, bool):
            content = "\x20\x01" if value else "\x20\x00"
        else:
            content = f"\x11{_double(value).decode('latin-1')}"
        entry = f"{_key[name]}\x12{_length[len(content)]}{content}"
        parts.append(f"\x0a{_length[len(entry)]}{entry}")
    whole = _field("\x2a", "".join(parts))
    return _field("\x42", _field("\x0a", _key[NAMESPACE] + _field("\x12", whole)))

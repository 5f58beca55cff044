"""Bytes of a `ProcessingRequest` -> an event.

Rule: whatever bytes come in, an event or a `ProtocolError` comes out. No loop over text: one step per header.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from din_extproc._proto.din.wire.v1.lean_pb2 import Attributes, Body, Headers, Request
from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValue, Metadata
from din_extproc.domain.identity import DNS_SAN, JWT_AUTHN, SOURCE, URI_SAN
from din_extproc.domain.request import NO_PEER, PeerConnection, RequestHead
from din_extproc.domain.response import ResponseHead
from din_extproc.wire.events import (
    Event,
    ProtocolError,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)

_SEEN_MAX = 2048
_SEEN_BYTES = 256
_SEEN_STRUCTS, _SEEN_STRUCT_BYTES = 1024, 4096
_NOT_KEPT = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie", "x-request-id", "x-din-trace-id", "traceparent"})
"""Secrets, which must not outlive their request, and values that never come again."""


class _Seen(dict[bytes, tuple[str, str]]):
    """Header messages that come again and again, read already; the others are read when they are asked for."""

    def __missing__(self, entry: bytes) -> tuple[str, str]:
        header = HeaderValue.FromString(entry)
        raw = header.raw_value or header.value.encode()  # an Envoy with that setting puts text into `value`
        name, value = header.key.lower(), raw.decode("latin-1")
        if len(entry) <= _SEEN_BYTES and name not in _NOT_KEPT:
            if len(self) >= _SEEN_MAX:
                self.clear()
            self[entry] = name, value
        return name, value


_seen = _Seen()
_pair = _seen.__getitem__


def decode(data: bytes) -> Event:
    """Read one message.

    Raises:
        ProtocolError: no protobuf, none of the six kinds, or a head without `:method`, `:path` or `:status`.
    """
    try:
        request = Request.FromString(data)
        kind = request.WhichOneof("request")
        if kind is None:
            raise ProtocolError("a message that holds no part of an exchange")
        if kind == "request_headers":
            return _read_request_headers(request)
        return _READERS[kind](getattr(request, kind))
    except (DecodeError, ValueError) as error:
        raise ProtocolError("bytes that are no ProcessingRequest") from error


def response_head(event: ResponseHeaders) -> ResponseHead:
    """All headers of an answer.

    Raises:
        ProtocolError: one of them is no header.
    """
    try:
        return ResponseHead(event.status, _collect(list(event.entries)))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError("bytes that are no header") from error


def _read_request_headers(request: Request) -> Event:
    part = request.request_headers
    headers = _collect(part.headers.headers[:])
    metadata, attributes = request.metadata_context, request.attributes
    claims = _claims(metadata) if metadata else None
    try:
        head = RequestHead(headers[":method"], headers[":path"], headers, claims, _peer(attributes) if attributes else NO_PEER)
    except KeyError as missing:
        raise ProtocolError(f"a request without {missing.args[0]}") from None
    return RequestHeaders(head, part.end_of_stream)


class _SeenStructs(dict[bytes, Any]):
    """Metadata and attributes that were read already: a token or a connection has many requests, and reading takes tens of microseconds.

    Args:
        read: Reads one; it must depend on nothing else.
    """

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, data: bytes) -> Any:
        found = self._read(data)
        if len(data) <= _SEEN_STRUCT_BYTES:
            if len(self) >= _SEEN_STRUCTS:
                self.clear()
            self[data] = found
        return found


def _read_claims(metadata: bytes) -> dict[str, Any] | None:
    """The claims of the token that Envoy has verified; None: the metadata has none. Each program names their field otherwise."""
    found = Metadata.FromString(metadata).filter_metadata
    payloads = MessageToDict(found[JWT_AUTHN]).values() if JWT_AUTHN in found else ()
    return next((payload for payload in payloads if isinstance(payload, dict) and "iss" in payload), None)


def _read_peer(entry: bytes) -> PeerConnection:
    attributes = MessageToDict(Attributes.FromString(entry).values)
    uri, dns, address = (text if isinstance(text := attributes.get(name), str) else "" for name in (URI_SAN, DNS_SAN, SOURCE))
    return PeerConnection(uri, dns, address)


_claims = _SeenStructs(_read_claims).__getitem__
_peer = _SeenStructs(_read_peer).__getitem__


def _read_response_headers(part: Headers) -> Event:
    entries = part.headers.headers
    for name, value in map(_pair, entries):
        if name == ":status":
            if not (value.isascii() and value.isdigit()):
                break
            return ResponseHeaders(int(value), part.end_of_stream, entries)
    raise ProtocolError("an answer without a numeric :status")


def _read_request_body(part: Body) -> Event:
    return RequestBody(part.body, part.end_of_stream)


def _read_response_body(part: Body) -> Event:
    return ResponseBody(part.body, part.end_of_stream)


def _collect(entries: list[bytes]) -> dict[str, str]:
    """All headers by name; a name that comes again has its values joined, as RFC 9110 allows."""
    headers = dict(map(_pair, entries))
    if len(headers) < len(entries):
        headers = {}
        for name, value in map(_pair, entries):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


_READERS: dict[str, Callable[[Any], Event]] = {
    "response_headers": _read_response_headers,
    "request_body": _read_request_body,
    "response_body": _read_response_body,
    "request_trailers": lambda _: RequestTrailers(),
    "response_trailers": lambda _: ResponseTrailers(),
}

"""Bytes of Envoy's messages become events, or a protocol error."""

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from din_extproc.domain.request import NO_PEER, PeerConnection, RequestHead
from din_extproc.domain.response import ResponseHead
from din_extproc.wire import decode as module
from din_extproc.wire.decode import decode, response_head
from din_extproc.wire.events import (
    ProtocolError,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from tests.support.peer import message

HEAD = {":method": "POST", ":path": "/v1/embeddings?a=b", "content-type": "application/json"}


EVENTS = {RequestHeaders, RequestBody, RequestTrailers, ResponseHeaders, ResponseBody, ResponseTrailers, ProtocolError}


def test_a_head_has_its_method_path_and_headers():
    event = decode(message("request_headers", HEAD, end=True))
    assert isinstance(event, RequestHeaders)
    assert event.end_of_stream
    assert (event.head.method, event.head.path) == ("POST", "/v1/embeddings?a=b")
    assert event.head.header("content-type") == "application/json"
    assert event.head.header("missing") == ""


def test_names_come_in_lower_case_and_values_keep_every_byte():
    event = decode(message("request_headers", HEAD | {"X-Odd": "".join(map(chr, range(0x20, 0x100)))}))
    assert event.head.header("x-odd").encode("latin-1") == bytes(range(0x20, 0x100))


def test_a_header_that_comes_twice_has_its_values_joined_in_order():
    request = ProcessingRequest.FromString(message("request_headers", HEAD))
    for value in (b"a", b"b", b"a"):
        request.request_headers.headers.headers.add(key="x-task", raw_value=value)
    assert decode(request.SerializeToString()).head.header("x-task") == "a, b, a"


def test_an_envoy_that_puts_text_into_value_is_read_too():
    request = ProcessingRequest()
    for name, value in (HEAD | {"x-name": "Zoë"}).items():
        request.request_headers.headers.headers.add(key=name, value=value)
    assert decode(request.SerializeToString()).head.header("x-name") == "Zoë".encode().decode("latin-1")


def test_long_values_are_read_whole_and_not_kept():
    value = "x" * 40_000
    before = len(module._seen)
    assert decode(message("request_headers", HEAD | {"x-long": value})).head.header("x-long") == value
    assert not any(len(entry) > 1000 for entry in module._seen)
    assert len(module._seen) <= before + 3


def test_no_secret_outlives_its_request():
    decode(message("request_headers", HEAD | {"authorization": "Bearer sk-secret", "X-API-Key": "sk-secret", "cookie": "sk-secret"}))
    assert not any(b"sk-secret" in entry for entry in module._seen)


def test_what_is_kept_has_a_bound():
    for number in range(3000):
        decode(message("request_headers", HEAD | {"x-number": str(number)}))
    assert len(module._seen) <= 2048


def test_every_other_kind_has_its_event():
    assert decode(message("request_body", body=b"abc", end=True)) == RequestBody(b"abc", True)
    assert decode(message("request_body")) == RequestBody(b"", False)
    assert decode(message("request_trailers")) == RequestTrailers()
    head = decode(message("response_headers", {"date": "x", ":status": "503"}, end=True))
    assert (head.status, head.end_of_stream) == (503, True)
    assert decode(message("response_body", body=b"x")) == ResponseBody(b"x", False)
    assert decode(message("response_trailers")) == ResponseTrailers()


def test_an_answers_headers_are_there_for_who_asks():
    event = decode(message("response_headers", {":status": "503", "Content-Type": "text/plain", "x-a": "\xe9"}))
    assert response_head(event) == ResponseHead(503, {":status": "503", "content-type": "text/plain", "x-a": "\xe9"})
    with pytest.raises(ProtocolError):
        response_head(ResponseHeaders(200, True, (b"\x00",)))


def test_fields_that_are_not_ours_are_passed_over():
    assert decode(message("request_body", body=b"abc") + b"\x42\x02\x0a\x00" + b"\x50\x01") == RequestBody(b"abc", False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x12",
        b"\x12\x05\x0a",
        b"{}",
        message("request_headers", {":path": "/"}),
        message("request_headers", {":method": "GET"}),
        message("response_headers", {"date": "x"}),
        message("response_headers", {":status": "2x0"}),
        b"\x12\x08\x0a\x06\x0a\x04\x0a\x02\xff\xfe",
    ],
)
def test_what_is_no_message_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_become_an_event_or_a_protocol_error(data):
    assert read(data) in EVENTS


@given(st.data())
def test_a_damaged_message_becomes_an_event_or_a_protocol_error(data):
    whole = bytearray(message("request_headers", HEAD | {"x-a": "b"}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    assert read(bytes(whole)) in EVENTS


def read(data: bytes) -> type:
    """What decoding ends with."""
    try:
        return type(decode(data))
    except ProtocolError as error:
        return type(error)


def head_with(connection: dict[str, object] | None = None, **metadata: dict[str, object]) -> RequestHead:
    """Decode a head with attributes of its connection, and metadata by filter (without `envoy.filters.http.`)."""
    request = ProcessingRequest.FromString(message("request_headers", HEAD))
    if connection is not None:
        ParseDict(connection, request.attributes["envoy.filters.http.ext_proc"])
    for name, values in metadata.items():
        ParseDict(values, request.metadata_context.filter_metadata[f"envoy.filters.http.{name}"])
    event = decode(request.SerializeToString())
    assert isinstance(event, RequestHeaders)
    return event.head


def test_a_head_has_what_envoy_says_of_its_connection():
    assert head_with().peer == NO_PEER
    values = {"connection.uri_san_peer_certificate": "spiffe://a/b", "source.address": "10.0.0.7:1", "other": 7}
    for _ in range(2):  # once read, once remembered
        assert head_with(values).peer == PeerConnection(uri="spiffe://a/b", address="10.0.0.7:1")
    odd = {"connection.uri_san_peer_certificate": ["spiffe://a/b"], "connection.dns_san_peer_certificate": None}
    assert head_with(odd).peer == NO_PEER


@pytest.mark.parametrize("field", ["din", "https://issuer.example", "payload"])
def test_the_claims_of_a_verified_token_come_from_its_filter_alone(field):
    claims = {"iss": "https://issuer.example", "n": 1.0}
    values = {field: claims, "failed": {"code": 3.0}}
    assert head_with(jwt_authn=values).claims == claims
    assert head_with(another=values).claims is None


def test_a_number_without_a_value_is_no_claim():
    request = ProcessingRequest.FromString(message("request_headers", HEAD))
    fields = request.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].fields
    fields["din"].struct_value.fields["iss"].number_value = float("inf")
    with pytest.raises(ProtocolError):
        decode(request.SerializeToString())


def test_what_was_read_of_tokens_does_not_grow_without_end():
    seen = module._SeenStructs(len)
    for number in range(5000):
        assert seen[b"%d" % number] == len(str(number))
    assert seen[bytes(100_000)] == 100_000
    assert len(seen) <= 1024
    assert all(len(key) < 100 for key in seen)

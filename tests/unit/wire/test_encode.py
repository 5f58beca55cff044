"""Verdicts become the bytes that Envoy understands, and nothing dangerous becomes bytes."""

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from din_extproc._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.wire import encode

SEND = Send(
    cluster="fast",
    endpoints=("10.0.0.1:8000", "[fd00::1]:8000"),
    request_headers=(("x-din-trace-id", "t-1"), ("x-note", "caf\xe9")),
    response_headers=(("x-ratelimit-remaining-requests", "9"),),
    metadata={"tenant": "研发", "tokens": 512, "share": 0.5, "stream": True, "cached": False},
)


def written(data):
    return ProcessingResponse.FromString(data)


def headers_of(mutation):
    assert all(option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for option in mutation.set_headers)
    assert not any(option.header.value for option in mutation.set_headers)
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def test_a_request_sent_on_names_cluster_and_endpoints_and_has_its_route_picked_anew():
    response = written(encode.send_at_body(SEND))
    common = response.request_body.response
    assert common.clear_route_cache
    assert headers_of(common.header_mutation) == {
        "x-din-cluster": b"fast",
        "x-din-endpoint": b"10.0.0.1:8000,[fd00::1]:8000",
        "x-din-trace-id": b"t-1",
        "x-note": b"caf\xe9",
    }
    assert not common.HasField("body_mutation")
    assert MessageToDict(response.dynamic_metadata) == {
        "din": {"tenant": "研发", "tokens": 512.0, "share": 0.5, "stream": True, "cached": False}
    }


def test_a_new_body_comes_with_its_length():
    common = written(encode.send_at_body(replace(SEND, body=b"{}"))).request_body.response
    assert common.body_mutation.body == b"{}"
    assert headers_of(common.header_mutation)["content-length"] == b"2"


def test_an_empty_new_body_is_a_body():
    common = written(encode.send_at_body(replace(SEND, body=b""))).request_body.response
    assert common.body_mutation.WhichOneof("mutation") == "body"
    assert headers_of(common.header_mutation)["content-length"] == b"0"


def test_path_and_removals_are_written_when_there_are_any():
    mutation = written(encode.send_at_body(replace(SEND, path="/v1/rerank", remove_headers=("accept-encoding", "authorization"))))
    mutation = mutation.request_body.response.header_mutation
    assert headers_of(mutation)[":path"] == b"/v1/rerank"
    assert list(mutation.remove_headers) == ["accept-encoding", "authorization"]


def test_a_request_without_a_body_is_sent_on_from_its_head():
    response = written(encode.send_at_headers(SEND))
    assert response.request_headers.response.clear_route_cache
    assert headers_of(response.request_headers.response.header_mutation)["x-din-cluster"] == b"fast"
    with pytest.raises(ValueError, match="without a body"):
        encode.send_at_headers(replace(SEND, body=b"{}"))


def test_an_answer_ends_the_request_and_tells_the_access_log():
    given = ImmediateResponse(
        status=429, headers=(("retry-after", "3"),), body=b'{"error":{}}', metadata={"refusal": "rate_limit_exceeded"}
    )
    response = written(encode.answer(given))
    immediate = response.immediate_response
    assert (immediate.status.code, immediate.body) == (429, b'{"error":{}}')
    assert headers_of(immediate.headers) == {"retry-after": b"3"}
    assert MessageToDict(response.dynamic_metadata) == {"din": {"refusal": "rate_limit_exceeded"}}


def test_no_metadata_means_no_metadata():
    assert not written(encode.send_at_body(replace(SEND, metadata={}))).HasField("dynamic_metadata")


def test_headers_are_set_on_the_nodes_answer():
    response = written(encode.response_headers(SEND.response_headers))
    assert headers_of(response.response_headers.response.header_mutation) == {"x-ratelimit-remaining-requests": b"9"}


def test_text_that_latin_1_has_no_bytes_for_goes_out_as_utf_8():
    response = written(encode.response_headers((("x-din-tenant", "研发"),)))
    assert response.response_headers.response.header_mutation.set_headers[0].header.raw_value == "研发".encode()


@pytest.mark.parametrize("value", ["a\r\nset-cookie: x", "a\nb", "\x00", "a\x7f", "\x1b[31m", "研\r发", "\ud800"])
def test_a_value_that_could_break_a_header_line_never_leaves(value):
    for write in (
        lambda: encode.response_headers((("x-a", value),)),
        lambda: encode.send_at_body(replace(SEND, request_headers=(("x-a", value),))),
        lambda: encode.send_at_headers(replace(SEND, path=value)),
        lambda: encode.answer(ImmediateResponse(status=400, headers=(("x-a", value),), body=b"")),
    ):
        with pytest.raises(ValueError, match=r"control character|surrogates"):
            write()


@pytest.mark.parametrize("name", ["", "X-Upper", "x a", "x\n", "x:y", "é", "::path"])
def test_a_name_that_is_none_never_leaves(name):
    with pytest.raises(ValueError, match="no header name"):
        encode.response_headers(((name, "x"),))
    with pytest.raises(ValueError, match="no header name"):
        encode.send_at_body(replace(SEND, remove_headers=(name,)))


@pytest.mark.parametrize("status", [0, 100, 199, 600, 1000])
def test_only_a_final_status_answers(status):
    with pytest.raises(ValueError, match="no final HTTP status"):
        encode.answer(ImmediateResponse(status=status, headers=(), body=b""))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encode.CONTINUE_REQUEST_HEADERS, "request_headers"),
        (encode.CONTINUE_REQUEST_BODY, "request_body"),
        (encode.CONTINUE_REQUEST_TRAILERS, "request_trailers"),
        (encode.CONTINUE_RESPONSE_HEADERS, "response_headers"),
        (encode.CONTINUE_RESPONSE_BODY, "response_body"),
        (encode.CONTINUE_RESPONSE_TRAILERS, "response_trailers"),
    ],
)
def test_each_constant_answers_its_own_phase(data, kind):
    assert written(data).WhichOneof("response") == kind


def test_the_reply_to_a_requests_headers_asks_for_the_answers_headers_and_trailers():
    send = Send(cluster="c", endpoints=("e",), request_headers=(), response_headers=(), metadata={})
    for data in (encode.CONTINUE_REQUEST_HEADERS, encode.send_at_headers(send)):
        mode = written(data).mode_override
        assert (mode.response_header_mode, mode.response_trailer_mode) == (ProcessingMode.SEND, ProcessingMode.SEND)
        assert (mode.request_body_mode, mode.response_body_mode) == (ProcessingMode.BUFFERED, ProcessingMode.NONE)


LONG = st.integers(0, 300).map(lambda size: "v" * size)
VALUES = st.text(max_size=8) | LONG | st.booleans() | st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
NAMES = st.integers(1, 200).map(lambda size: "x-" + "n" * size)
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)


@given(
    st.dictionaries(st.text(max_size=8) | LONG, VALUES, max_size=4),
    st.lists(st.tuples(NAMES, PRINTABLE | LONG), max_size=4),
    LONG.map(str.encode) | st.none(),
)
def test_whatever_is_written_is_read_back_by_protobuf(metadata, headers, body):
    send = replace(SEND, metadata=metadata, request_headers=tuple(headers), response_headers=tuple(headers), body=body)
    response = written(encode.send_at_body(send))
    common = response.request_body.response
    pairs = [(option.header.key, option.header.raw_value.decode()) for option in common.header_mutation.set_headers]
    assert pairs[2 : 2 + len(headers)] == headers
    assert common.body_mutation.body == (body or b"")
    assert common.clear_route_cache
    found = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in response.dynamic_metadata.fields["din"].struct_value.fields.items()
    }
    assert found == metadata
    again = written(encode.answer(ImmediateResponse(status=503, headers=tuple(headers), body=body or b"", metadata=metadata)))
    assert again.dynamic_metadata == written(encode.send_at_body(send)).dynamic_metadata
    assert list(again.immediate_response.headers.set_headers) == list(common.header_mutation.set_headers)[2 : 2 + len(headers)]
    assert again.immediate_response.body == (body or b"")
    reply = written(encode.response_headers(tuple(headers))).response_headers.response.header_mutation.set_headers
    assert list(reply) == list(again.immediate_response.headers.set_headers)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 9_000_000])
def test_sizes_around_each_step_of_a_length_are_written_right(size):
    body = b"x" * size
    assert written(encode.send_at_body(replace(SEND, body=body))).request_body.response.body_mutation.body == body
    assert written(encode.answer(ImmediateResponse(status=200, headers=(), body=body))).immediate_response.body == body
    text = "v" * min(size, 70_000)
    (option,) = written(encode.response_headers((("x-a", text),))).response_headers.response.header_mutation.set_headers
    assert option.header.raw_value.decode() == text


def test_what_is_remembered_of_names_has_a_bound():
    for number in range(2000):
        encode.response_headers(((f"x-{number}", "a"),))
        encode.send_at_body(replace(SEND, metadata={f"k-{number}": 1}))
    assert max(len(encode._name), len(encode._key)) <= 1024
    assert len(encode._length) <= 16_384

"""Verdicts become the bytes that Envoy understands, and nothing dangerous becomes bytes."""

import pytest
from google.protobuf.json_format import MessageToDict
from msgspec.structs import replace

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.domain.verdict import Answer, Send
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
    given = Answer(status=429, headers=(("retry-after", "3"),), body=b'{"error":{}}', metadata={"refusal": "rate_limit_exceeded"})
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
        lambda: encode.answer(Answer(status=400, headers=(("x-a", value),), body=b"")),
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
        encode.answer(Answer(status=status, headers=(), body=b""))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encode.CONTINUE_REQUEST_HEADERS, "request_headers"),
        (encode.CONTINUE_REQUEST_BODY, "request_body"),
        (encode.CONTINUE_REQUEST_TRAILERS, "request_trailers"),
        (encode.CONTINUE_RESPONSE_HEADERS, "response_headers"),
        (encode.CONTINUE_RESPONSE_BODY, "response_body"),
        (encode.CONTINUE_RESPONSE_TRAILERS, "response_trailers"),
        (encode.SWALLOW_REQUEST_BODY, "request_body"),
    ],
)
def test_each_constant_answers_its_own_phase(data, kind):
    assert written(data).WhichOneof("response") == kind

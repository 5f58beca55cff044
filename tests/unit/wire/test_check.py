"""ext_authz on the wire: whatever comes in is a request or an error, and what goes out is Envoy's vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc._proto.envoy.service.auth.v3.external_auth_pb2 import CheckRequest, CheckResponse
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.wire.check import decode_check, encode_check
from din_extproc.wire.events import ProtocolError


def request(**fields) -> bytes:
    message = CheckRequest()
    http = message.attributes.request.http
    headers = fields.pop("headers", {})
    for name, value in fields.items():
        setattr(http, name, value)
    http.headers.update(headers)
    return message.SerializeToString()


def test_a_request_is_read_with_its_headers_and_its_body_as_bytes():
    head, body = decode_check(request(method="POST", path="/v1/x?a", headers={":path": "/v1/x?a", "X-Api-Key": "k"}, raw_body=b"\xff{}"))
    assert (head.method, head.path, dict(head.headers), body) == ("POST", "/v1/x?a", {"x-api-key": "k"}, b"\xff{}")
    assert decode_check(request(method="POST", path="/", body="{}"))[1] == b"{}"


def test_raw_headers_are_read_where_envoy_sends_those():
    message = CheckRequest()
    for name, value in ((":method", b"GET"), (":path", b"/v1/models"), ("authorization", b"Bearer x")):
        message.attributes.request.http.header_map.headers.add(key=name, raw_value=value)
    head, _ = decode_check(message.SerializeToString())
    assert (head.method, head.path, head.header("authorization")) == ("GET", "/v1/models", "Bearer x")


@given(st.binary(max_size=200))
def test_whatever_bytes_come_in_a_request_or_a_protocol_error_comes_out(data):
    try:
        head, body = decode_check(data)
    except ProtocolError:
        return
    assert (head.method != "", isinstance(body, bytes)) == (True, True)


def test_a_permission_sets_and_removes_headers_and_leaves_metadata():
    verdict = Send(
        "", (), (("x-din-trace-id", "t"),), (("x-ratelimit-limit-tokens", "5"),), {"labels": "{}"}, remove_headers=("x-api-key",)
    )
    response = CheckResponse.FromString(encode_check(verdict))
    assert response.status.code == 0
    assert [each.header.value for each in response.ok_response.headers] == ["t"]
    assert list(response.ok_response.headers_to_remove) == ["x-api-key"]
    assert [each.header.key for each in response.ok_response.response_headers_to_add] == ["x-ratelimit-limit-tokens"]
    assert response.dynamic_metadata["labels"] == "{}"


def test_a_refusal_carries_status_headers_and_body():
    response = CheckResponse.FromString(encode_check(ImmediateResponse(429, (("retry-after", "3"),), b'{"code":"x"}', {"refusal": "x"})))
    assert (response.status.code, response.denied_response.status.code, response.denied_response.body) == (7, 429, '{"code":"x"}')
    assert response.dynamic_metadata["refusal"] == "x"


def test_a_header_that_could_break_its_line_never_leaves():
    with pytest.raises(ValueError, match="retry-after"):
        encode_check(ImmediateResponse(429, (("retry-after", "3\r\nx: y"),), b""))

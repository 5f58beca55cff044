"""ext_authz: bytes of a `CheckRequest` -> a request's head and body, a verdict -> bytes of a `CheckResponse`.

Rule: whatever bytes come in, a request or a `ProtocolError` comes out; headers leave only if they can't break a header line.
"""

import re

from google.protobuf.message import DecodeError

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from din_extproc._proto.envoy.service.auth.v3.external_auth_pb2 import CheckRequest, CheckResponse, DeniedHttpResponse, OkHttpResponse
from din_extproc._proto.envoy.type.v3.http_status_pb2 import HttpStatus
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Headers, ImmediateResponse, Send, Verdict
from din_extproc.wire.events import ProtocolError

_PERMISSION_DENIED = 7
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def decode_check(data: bytes) -> tuple[RequestHead, bytes]:
    """Read one request.

    Raises:
        ProtocolError: no protobuf, or it is about no HTTP request.
    """
    try:
        http = CheckRequest.FromString(data).attributes.request.http
    except DecodeError as error:
        raise ProtocolError("not a CheckRequest") from error
    headers = dict(http.headers) or {each.key: each.raw_value.decode("latin-1") or each.value for each in http.header_map.headers}
    method = http.method or headers.get(":method", "")
    path = http.path or headers.get(":path", "")
    if not method or not path:
        raise ProtocolError("a CheckRequest without method or path")
    plain = {name.lower(): value for name, value in headers.items() if not name.startswith(":")}
    return RequestHead(method, path, plain), http.raw_body or http.body.encode()


def encode_check(verdict: Verdict) -> bytes:
    """Answer it.

    Raises:
        ValueError: a header could break a header line.
    """
    match verdict:
        case Send():
            permitted = OkHttpResponse(
                headers=_encode_headers(verdict.request_headers),
                headers_to_remove=verdict.remove_headers,
                response_headers_to_add=_encode_headers(verdict.response_headers),
            )
            response = CheckResponse(ok_response=permitted)
        case ImmediateResponse():
            denied = DeniedHttpResponse(
                status=HttpStatus(code=verdict.status),
                headers=_encode_headers(verdict.headers),
                body=verdict.body.decode(),
            )
            response = CheckResponse(denied_response=denied)
            response.status.code = _PERMISSION_DENIED
    response.dynamic_metadata.update(dict(verdict.metadata))
    return response.SerializeToString()


def _encode_headers(headers: Headers) -> list[HeaderValueOption]:
    overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    for name, value in headers:
        if _CONTROL.search(value):
            raise ValueError(f"the value of {name} holds a control character")
    return [HeaderValueOption(header=HeaderValue(key=name, value=value), append_action=overwrite) for name, value in headers]

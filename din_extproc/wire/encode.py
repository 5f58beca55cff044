"""A verdict -> bytes of a `ProcessingResponse`.

Rule: a header that could break a header line never leaves (`ValueError`), and every header set replaces the one that is there.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingResponse,
    TrailersResponse,
)
from din_extproc.domain.verdict import Answer, Headers, Send

CONTINUE_REQUEST_HEADERS = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
CONTINUE_REQUEST_BODY = ProcessingResponse(request_body=BodyResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY = ProcessingResponse(response_body=BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
SWALLOW_REQUEST_BODY = ProcessingResponse(
    request_body=BodyResponse(response=CommonResponse(body_mutation=BodyMutation(clear_body=True)))
).SerializeToString()
"""This piece is not passed on: the reply to a later one carries it."""

NAMESPACE = "din"
"""Of the dynamic metadata."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(r":?[a-z0-9!#$%&'*+.^_`|~-]+")
_FINAL_STATUSES = range(200, 600)
_MEMBERS: Mapping[type, str] = {str: "string_value", bool: "bool_value", int: "number_value", float: "number_value"}
"""Of `google.protobuf.Value`."""


def send_at_headers(send: Send) -> bytes:
    """The reply to request headers that no body follows.

    Raises:
        ValueError: a header or a metadata value can't be written, or there is a new body for a request that has none.
    """
    if send.body is not None:
        raise ValueError("a request without a body can't be given one")
    response = ProcessingResponse()
    common = response.request_headers.response
    common.clear_route_cache = True
    _mutate(common.header_mutation, send)
    return _with_metadata(response, send.metadata)


def send_at_body(send: Send) -> bytes:
    """The reply to the whole request body.

    Raises:
        ValueError: a header or a metadata value can't be written.
    """
    response = ProcessingResponse()
    common = response.request_body.response
    common.clear_route_cache = True
    mutation = common.header_mutation
    _mutate(mutation, send)
    if send.body is not None:
        common.body_mutation.body = send.body
        _set(mutation, (("content-length", str(len(send.body))),))
    return _with_metadata(response, send.metadata)


def answer(given: Answer) -> bytes:
    """The reply that ends the request here, to whatever message is open.

    Raises:
        ValueError: a header or a metadata value can't be written, or the status is none that ends an exchange.
    """
    if given.status not in _FINAL_STATUSES:
        raise ValueError(f"{given.status} is no final HTTP status")
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = given.status
    immediate.body = given.body
    _set(immediate.headers, given.headers)
    return _with_metadata(response, given.metadata)


def response_headers(headers: Headers) -> bytes:
    """The reply to response headers: these are set.

    Raises:
        ValueError: a header can't be written.
    """
    response = ProcessingResponse()
    _set(response.response_headers.response.header_mutation, headers)
    return response.SerializeToString()


def _mutate(mutation: HeaderMutation, send: Send) -> None:
    """What changes in the head of a request that goes on."""
    _set(mutation, (("x-din-cluster", send.cluster), ("x-din-endpoint", ",".join(send.endpoints))))
    _set(mutation, send.request_headers)
    if send.path is not None:
        _set(mutation, ((":path", send.path),))
    mutation.remove_headers.extend(map(_name, send.remove_headers))


def _set(mutation: HeaderMutation, headers: Iterable[tuple[str, str]]) -> None:
    add = mutation.set_headers.add
    for name, value in headers:
        option = add()
        option.append_action = _OVERWRITE
        header = option.header
        header.key = _name(name)
        header.raw_value = value.encode() if value.isascii() and value.isprintable() else _unusual(name, value)


@lru_cache(maxsize=256)
def _name(name: str) -> str:
    """The name, when it is one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no header name in lower case")
    return name


def _unusual(name: str, value: str) -> bytes:
    """Latin-1, as headers were read; UTF-8 for what latin-1 has no byte for."""
    if _CONTROL.search(value):
        raise ValueError(f"the value of {name} holds a control character")
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()


def _with_metadata(response: ProcessingResponse, values: Mapping[str, str | float | bool]) -> bytes:
    """The finished message, with its dynamic metadata."""
    if values:
        fields = response.dynamic_metadata.fields[NAMESPACE].struct_value.fields
        for name, value in values.items():
            setattr(fields[name], _MEMBERS[type(value)], value)
    return response.SerializeToString()

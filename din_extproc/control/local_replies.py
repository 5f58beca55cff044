"""Envoy's local replies (body too large, no node, sidecar gone) in the gateway's error format, or Anthropic's on its path.

Invariant: replies of the sidecar pass unchanged. Their response code details are empty or begin with `din_`, unlike Envoy's own.
"""

from typing import Any

import msgspec
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter
from envoy_data_plane.envoy.config.core.v3 import HeaderValueOption, SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import LocalReplyConfig, ResponseMapper
from envoy_data_plane.google.protobuf import Struct as ProtoStruct
from msgspec import Struct

from din_extproc.control.packing import overwrite_header, pack_extension
from din_extproc.control.routes import UNDECIDED
from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import RefusalCode, anthropic_error_body, error_body

_DETAILS = "response.code_details"
_TRACE_ID = "%REQ(X-DIN-TRACE-ID?X-REQUEST-ID)%"
"""Before the sidecar has given a trace id, the request id finds the request in every log all the same."""
_PATH = "%PATH(NQ:ORIG_OR_PATH)%"
"""The client's, by the header that the sidecar sets where it writes another one for the node. Without the query, which can hold a key."""
_RETRY_AFTER_S = "1"
_TOO_MANY_HEADERS = f"{_DETAILS}.matches('^([Hh]eader|After)_mutation_')"
"""There was no room for the gateway's own; each Envoy words it anew."""


_BROKEN = ("upstream_reset_before_response_started{connection_termination", "upstream_reset_before_response_started{remote_reset")
"""The node got the request and broke off."""


class _Reply(Struct, frozen=True):
    """One kind of Envoy's answers."""

    when: str
    """CEL over `response.code_details` and `response.code`; an attribute that is not there makes it false."""
    code: RefusalCode
    message: str
    status: int | None = None
    """The status to answer with; None keeps Envoy's."""
    retriable: bool = True
    """False: the answer asks SDKs not to send the request again."""


def _details(*names: str) -> str:
    return f"{_DETAILS} in {list(names)}"


def _details_begin(*prefixes: str) -> str:
    return " || ".join(f"{_DETAILS}.startsWith('{prefix}')" for prefix in prefixes)


_REPLIES = (
    _Reply(_details_begin("ext_proc_error"), RefusalCode.SIDECAR_UNAVAILABLE, "The sidecar did not decide about the request in time", 503),
    _Reply(
        _details("cluster_not_found") + f" && xds.route_name == '{UNDECIDED}'",
        RefusalCode.SIDECAR_UNAVAILABLE,
        "The gateway is starting, or no sidecar is reachable; try again in a moment",
    ),
    _Reply("response.code == 413", RefusalCode.REQUEST_TOO_LARGE, "The request body is larger than the gateway accepts"),
    _Reply(
        _details("no_healthy_upstream", "cluster_not_found")
        + " || "
        + _details_begin(
            "upstream_reset_before_response_started{remote_connection_failure",
            "upstream_reset_before_response_started{local_connection_failure",
            "upstream_reset_before_response_started{connection_timeout",
        ),
        RefusalCode.NO_HEALTHY_NODE,
        "No node could be reached",
        503,
    ),
    _Reply(
        _details("response_payload_too_large"),
        RefusalCode.UPSTREAM_ERROR,
        "The node's answer is larger than the gateway holds to translate it",
        502,
    ),
    _Reply(
        f"upstream.request_attempt_count > 1 && ({_details_begin(*_BROKEN, 'lua_response')})",
        RefusalCode.UPSTREAM_ERROR,
        "The nodes ended the exchange before they answered; sent again, the request may break more of them",
        502,
        retriable=False,
    ),
    _Reply(_details_begin("upstream_reset"), RefusalCode.UPSTREAM_ERROR, "The node ended the exchange before it answered", 502),
    _Reply("response.code == 504", RefusalCode.UPSTREAM_TIMEOUT, "The node did not answer in time"),
    _Reply(
        _details("path_normalization_failed", "absolute_path_rejected", "route_not_found"), RefusalCode.PATH_NOT_FOUND, "No such path", 404
    ),
    _Reply(
        _TOO_MANY_HEADERS + " && upstream.address != ''",
        RefusalCode.UPSTREAM_ERROR,
        "The node's answer has more headers than the gateway accepts",
        502,
    ),
    _Reply(_TOO_MANY_HEADERS, RefusalCode.INVALID_REQUEST, "The request has more or larger headers than the gateway accepts", 431),
    _Reply(_details("health_check_failed"), RefusalCode.INTERNAL_ERROR, "This Envoy is draining", 503),
    _Reply(_details("low_version"), RefusalCode.UPGRADE_REQUIRED, "HTTP/1.0 is not served; use HTTP/1.1 or HTTP/2", 426),
    _Reply("response.code == 408", RefusalCode.INVALID_REQUEST, "The request did not arrive in time"),
    _Reply("response.code == 431", RefusalCode.INVALID_REQUEST, "The request headers are larger than the gateway accepts"),
    _Reply("response.code < 500", RefusalCode.INVALID_REQUEST, "The request is not valid HTTP, or not one that the gateway serves"),
    _Reply("response.code >= 500", RefusalCode.INTERNAL_ERROR, "The gateway failed"),
)
"""Replies in order; the first match applies."""


_OF_ANTHROPIC = f"(request.url_path == '{Operation.MESSAGES.value}' || request.url_path.startsWith('{Operation.MESSAGES.value}/'))"


def build_local_reply_config() -> LocalReplyConfig:
    """The mappers, two per kind of answer: Anthropic's path, then every other. A request without a path has the second."""
    return LocalReplyConfig(mappers=[mapper for reply in _REPLIES for mapper in _mappers(reply)])


def _mappers(reply: _Reply) -> list[ResponseMapper]:
    when = f"response.code >= 400 && {_DETAILS} != '' && !{_DETAILS}.startsWith('din_') && ({reply.when})"
    named = [overwrite_header("request-id", _TRACE_ID)]
    return [
        _mapper(reply, f"{_OF_ANTHROPIC} && {when}", _anthropic_body(reply), [*_headers(reply), *named]),
        _mapper(reply, when, _body(reply), _headers(reply)),
    ]


def _mapper(reply: _Reply, expression: str, body: dict[str, Any], headers: list[HeaderValueOption]) -> ResponseMapper:
    condition = pack_extension("envoy.access_loggers.extension_filters.cel", ExpressionFilter(expression=expression))
    return ResponseMapper(
        filter=AccessLogFilter(extension_filter=ExtensionFilter(name=condition.name, typed_config=condition.typed_config)),
        status_code=reply.status,
        body_format_override=SubstitutionFormatString(json_format=ProtoStruct.from_dict(body)),
        headers_to_add=headers,
    )


def _body(reply: _Reply) -> dict[str, Any]:
    """The one error body, with Envoy's placeholders where the request fills it in."""
    body: dict[str, Any] = msgspec.json.decode(error_body(reply.code, reply.message, trace_id=_TRACE_ID, instance=_PATH))
    return body | {"status": "%RESPONSE_CODE%"}


def _anthropic_body(reply: _Reply) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(anthropic_error_body(reply.code, reply.message, trace_id=_TRACE_ID, status=reply.status))
    return body


def _headers(reply: _Reply) -> list[HeaderValueOption]:
    retry = (
        [overwrite_header("retry-after", _RETRY_AFTER_S)]
        if reply.code in (RefusalCode.SIDECAR_UNAVAILABLE, RefusalCode.NO_HEALTHY_NODE)
        else []
    )
    stop = [] if reply.retriable else [overwrite_header("x-should-retry", "false")]
    return [overwrite_header("x-din-trace-id", _TRACE_ID), overwrite_header("x-request-id", _TRACE_ID), *retry, *stop]

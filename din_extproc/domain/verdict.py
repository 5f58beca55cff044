"""The verdict on a request: send it to a node, or answer it here. Holds the only table of error codes."""

import re
from collections.abc import Mapping
from enum import Enum

import msgspec
from msgspec import Struct

Headers = tuple[tuple[str, str], ...]


class RefusalCode(Enum):
    """Every error of the gateway itself: (code, HTTP status, OpenAI error type, title)."""

    INVALID_REQUEST = ("invalid_request", 400, "invalid_request_error", "The request is malformed")
    REQUEST_EXCEEDS_LIMIT = ("request_exceeds_limit", 400, "invalid_request_error", "The request is larger than the whole limit")
    CONTEXT_LENGTH_EXCEEDED = ("context_length_exceeded", 400, "invalid_request_error", "The request is longer than the model's context")
    TRACE_MISSING = ("trace_missing", 400, "invalid_request_error", "The request carries no trace id")
    SENSITIVE_DATA_BLOCKED = ("sensitive_data_blocked", 400, "invalid_request_error", "The prompt holds sensitive data")
    INVALID_API_KEY = ("invalid_api_key", 401, "authentication_error", "The API key is missing or wrong")
    IDENTITY_CONFLICT = ("identity_conflict", 403, "permission_error", "The identities belong to different tenants")
    MODEL_NOT_ALLOWED = ("model_not_allowed", 403, "permission_error", "The key may not use this model")
    MODEL_NOT_FOUND = ("model_not_found", 404, "invalid_request_error", "The model does not exist")
    PATH_NOT_FOUND = ("path_not_found", 404, "invalid_request_error", "The path does not exist")
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, "invalid_request_error", "The method is not allowed here")
    VERSION_MISMATCH = ("version_mismatch", 409, "invalid_request_error", "No node serves an acceptable model version")
    UPGRADE_REQUIRED = ("upgrade_required", 426, "invalid_request_error", "Another protocol is required")
    REQUEST_BREAKS_NODES = ("request_breaks_nodes", 422, "invalid_request_error", "The request breaks the nodes that get it")
    REQUEST_TOO_LARGE = ("request_too_large", 413, "invalid_request_error", "The request body is too large")
    UNSUPPORTED_MEDIA = ("unsupported_media", 415, "invalid_request_error", "The body's encoding is not supported")
    RATE_LIMIT_EXCEEDED = ("rate_limit_exceeded", 429, "rate_limit_error", "The rate limit is reached")
    BUDGET_EXCEEDED = ("budget_exceeded", 429, "insufficient_quota", "The budget is spent")
    CONCURRENCY_LIMIT_EXCEEDED = ("concurrency_limit_exceeded", 429, "rate_limit_error", "Too many requests are in flight")
    UPSTREAM_BUSY = ("upstream_busy", 429, "server_error", "The nodes are busy")
    QUEUE_FULL = ("queue_full", 429, "rate_limit_error", "The queue is full")
    INTERNAL_ERROR = ("internal_error", 500, "server_error", "The gateway failed")
    UPSTREAM_ERROR = ("upstream_error", 502, "server_error", "The node answered with an error")
    INSUFFICIENT_GPU_CAPACITY = ("insufficient_gpu_capacity", 503, "server_error", "The node has no memory left for this request")
    NO_HEALTHY_NODE = ("no_healthy_node", 503, "server_error", "No healthy node serves the model")
    AUDIT_UNAVAILABLE = ("audit_unavailable", 503, "server_error", "The request can't be recorded")
    LIMITS_UNAVAILABLE = ("limits_unavailable", 503, "server_error", "The limits can't be checked")
    SIDECAR_UNAVAILABLE = ("sidecar_unavailable", 503, "server_error", "The gateway is starting or its sidecar is not reachable")
    UPSTREAM_TIMEOUT = ("upstream_timeout", 504, "server_error", "The node did not answer in time")

    def __init__(self, code: str, status: int, type_: str, title: str) -> None:
        self.code = code
        self.status = status
        self.type = type_
        self.title = title


class Refusal(Struct, frozen=True, gc=False):
    """Why a request is refused. `message` is for people and never quotes the prompt or a key."""

    code: RefusalCode
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    """The time after which the same request can pass; None: retrying does not help."""
    headers: Headers = ()
    labels: Mapping[str, str] = {}
    """Additional dynamic metadata for the accounting."""


class Send(Struct, frozen=True, gc=False):
    """Send the request to a node."""

    cluster: str
    """"" where the node was chosen before: nothing is said of cluster and endpoints."""
    endpoints: tuple[str, ...]
    """The chosen node first, then those for retries, as `address:port`."""
    request_headers: Headers
    """Headers to set on the request, besides cluster, endpoint and content-length."""
    response_headers: Headers
    """Headers to set on the response."""
    metadata: Mapping[str, str | float | bool]
    """Dynamic metadata in namespace `din`, which the access log returns."""
    body: bytes | None = None
    """The new body; None leaves it as it is."""
    path: str | None = None
    """The new `:path`; None leaves it as it is."""
    remove_headers: tuple[str, ...] = ()
    needs_response_head: bool = False
    """Whether the handler needs the head of every response; heads of error responses are always passed to it."""


class ImmediateResponse(Struct, frozen=True, gc=False):
    """Answer the request here, without a node."""

    status: int
    headers: Headers
    body: bytes
    metadata: Mapping[str, str | float | bool] = {}


Verdict = Send | ImmediateResponse


def error_body(
    code: RefusalCode, message: str, *, trace_id: str, instance: str = "", param: str | None = None, status: int | None = None
) -> bytes:
    """Encode the gateway's only error body: an RFC 9457 problem document that contains OpenAI's `error` object.

    `status` None means the code's own status.
    """
    return msgspec.json.encode(
        {
            "type": f"urn:din-extproc:error:{code.code}",
            "title": code.title,
            "status": code.status if status is None else status,
            "detail": message,
            "instance": instance,
            "code": code.code,
            "trace_id": trace_id,
            "error": {"message": message, "type": code.type, "param": param, "code": code.code},
        }
    )


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_FAULT = 500
_MESSAGE_CHARS = 1000
_number = re.compile(r"\d+").findall


def anthropic_type(status: int) -> str:
    """Return the type that Anthropic's API gives an error of this status."""
    return _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < _FAULT else "api_error")


def anthropic_error_body(code: RefusalCode, message: str, *, trace_id: str, status: int | None = None) -> bytes:
    """Encode an error as Anthropic's API does. `status` None means the code's own status.

    A prompt that is too long is worded as there, because agents compact their history when they read these words.
    """
    if code is RefusalCode.CONTEXT_LENGTH_EXCEEDED:
        message = _is_too_long(message)
    kind = anthropic_type(code.status if status is None else status)
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": trace_id})


def _is_too_long(message: str) -> str:
    """Every engine names the length and its limit first, in either order; the length is the larger of the two."""
    numbers = [int(digits) for digits in _number(message[:_MESSAGE_CHARS])[:2]]
    if len(numbers) < 2 or numbers[0] == numbers[1]:  # noqa: PLR2004 - a pair
        return f"prompt is too long: {message}"
    return f"prompt is too long: {max(numbers)} tokens > {min(numbers)} maximum"

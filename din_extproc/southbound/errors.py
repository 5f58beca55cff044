"""Maps error answers of nodes to the gateway's own errors.

Known messages take precedence over the status. The engine's message is passed on only for errors of the request itself.

| the node answered                       | becomes                                                                     |
|-----------------------------------------|-----------------------------------------------------------------------------|
| a message of `wordings.py`              | its code: `context_length_exceeded`, `upstream_busy`, ...              |
| a server error with "out of memory"     | 503 `insufficient_gpu_capacity`, with a retry time                        |
| 400, 422                                | 400 `invalid_request`                                                       |
| 401, 403, 407                           | the same status, `upstream_error`: the gateway's credentials, not the client's |
| 402                                     | 502 `upstream_error`: the gateway's account has no credit                       |
| 404, 405, 501                           | 404 `path_not_found`, in the engine's words if it has any; or `model_not_found` |
| 408, 504                                | 504 `upstream_timeout`                                                      |
| 413, 415                                | `request_too_large`, `unsupported_media`                                    |
| 429                                     | 429 `upstream_busy`, with a retry time: the tenant's own limits are another code  |
| any other 4xx                           | the same status, `invalid_request`                                          |
| 503, 529                                | 503 `upstream_error`, with a retry time                                           |
| 424, 500, 502, any other                | 502 `upstream_error`                                                        |
"""

import math
from email.utils import parsedate_to_datetime

from msgspec import Struct

from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.error_body import ParsedError
from din_extproc.southbound.wordings import is_out_of_memory, match_wording

_BAD_REQUEST, _NOT_FOUND, _FAILED_DEPENDENCY, _FAULT = 400, 404, 424, 500
_BY_STATUS = {
    400: RefusalCode.INVALID_REQUEST,
    401: RefusalCode.UPSTREAM_ERROR,
    402: RefusalCode.UPSTREAM_ERROR,
    403: RefusalCode.UPSTREAM_ERROR,
    404: RefusalCode.PATH_NOT_FOUND,
    405: RefusalCode.PATH_NOT_FOUND,
    407: RefusalCode.UPSTREAM_ERROR,
    408: RefusalCode.UPSTREAM_TIMEOUT,
    413: RefusalCode.REQUEST_TOO_LARGE,
    415: RefusalCode.UNSUPPORTED_MEDIA,
    422: RefusalCode.INVALID_REQUEST,
    424: RefusalCode.UPSTREAM_ERROR,
    429: RefusalCode.UPSTREAM_BUSY,
    501: RefusalCode.PATH_NOT_FOUND,
    504: RefusalCode.UPSTREAM_TIMEOUT,
}
_KEPT_STATUSES = frozenset({401, 403, 407})
"""Statuses that are kept because they tell the client not to retry."""
_UNAVAILABLE = frozenset({503, 529})
_RETRY_S = {RefusalCode.UPSTREAM_BUSY: 1, RefusalCode.INSUFFICIENT_GPU_CAPACITY: 5}
"""Used when the node sends no `retry-after`."""
_UNAVAILABLE_RETRY_S = 1
_MAX_RETRY_S = 3600
_MESSAGES = {
    RefusalCode.PATH_NOT_FOUND: "The engine of this model does not support this operation.",
    RefusalCode.MODEL_NOT_FOUND: "The node does not serve the model under the configured name.",
    RefusalCode.INSUFFICIENT_GPU_CAPACITY: "The node has no memory left for this request.",
    RefusalCode.UPSTREAM_BUSY: "The nodes of this model are busy; the limit is theirs, not the tenant's.",
    RefusalCode.UPSTREAM_TIMEOUT: "The node did not answer in time.",
    RefusalCode.REQUEST_TOO_LARGE: "The request is larger than the node accepts.",
}
_PASSED_ON = frozenset({RefusalCode.INVALID_REQUEST, RefusalCode.CONTEXT_LENGTH_EXCEEDED, RefusalCode.UNSUPPORTED_MEDIA})
"""Errors of the request itself: the engine's own message explains them."""


class NodeError(Struct, frozen=True, gc=False):
    """The error that the client receives."""

    code: RefusalCode
    status: int
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    """None: the error has no retry time."""


def normalise_error(engine: str, status: int, error: ParsedError, requested_s: int | None = None) -> NodeError:
    """Map a node's error to the gateway's.

    Args:
        engine: The pool's engine.
        status: Status of the node's response, not a success.
        error: The parsed body.
        requested_s: The node's `retry-after` in seconds, see `retry_after_s`.
    """
    code = _code(engine, status, error)
    answered = _status(code, status)
    default = _UNAVAILABLE_RETRY_S if answered in _UNAVAILABLE else None
    retry = _RETRY_S.get(code, default)
    if code in _PASSED_ON:
        return NodeError(code, answered, error.message or code.title, error.param)
    if code is RefusalCode.PATH_NOT_FOUND and error.message:
        return NodeError(code, answered, error.message)
    message = _MESSAGES.get(code) or _upstream_message(status)
    return NodeError(code, answered, message, retry_after_s=None if retry is None else max(retry, requested_s or 0))


def parse_retry_after(text: str, wall: float) -> int | None:
    """Parse a `retry-after` header to whole seconds, at least 1 and at most an hour; None if it is invalid.

    Args:
        text: Seconds, or a date.
        wall: Now, in seconds since the Unix epoch.
    """
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - wall
    except (ValueError, TypeError, OverflowError):
        return None
    return min(_MAX_RETRY_S, max(1, math.ceil(min(seconds, _MAX_RETRY_S)))) if seconds == seconds else None  # noqa: PLR0124 - a NaN is no time


def _code(engine: str, status: int, error: ParsedError) -> RefusalCode:
    if (status >= _FAULT or status == _FAILED_DEPENDENCY) and is_out_of_memory(error):
        return RefusalCode.INSUFFICIENT_GPU_CAPACITY
    return (
        match_wording(engine, error)
        or _BY_STATUS.get(status)
        or (RefusalCode.INVALID_REQUEST if _BAD_REQUEST <= status < _FAULT else RefusalCode.UPSTREAM_ERROR)
    )


def _status(code: RefusalCode, status: int) -> int:
    if code is RefusalCode.UPSTREAM_ERROR:
        return status if status in _KEPT_STATUSES else 503 if status in _UNAVAILABLE else code.status
    kept = code is RefusalCode.INVALID_REQUEST and status < _FAULT and status not in _BY_STATUS
    return status if kept else code.status


def _upstream_message(status: int) -> str:
    if status in _KEPT_STATUSES:
        return f"The node refused the gateway ({status})."
    if status < _BAD_REQUEST:
        return f"The node answered with a redirection ({status}), which is not followed."
    return f"The node answered with an error ({status})."

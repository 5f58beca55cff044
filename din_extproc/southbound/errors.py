"""An error answer of a node -> one of the gateway's own errors.

Rule: words decide before the status; a client is shown the engine's sentence only where the fault is in its own request.

| the node answered                       | becomes                                                                     |
|-----------------------------------------|-----------------------------------------------------------------------------|
| words of `wordings.py`                  | what they mean: `context_length_exceeded`, `upstream_busy`, ...              |
| a fault with "out of memory"            | 503 `insufficient_gpu_capacity`, with a time                                |
| 400, 422                                | 400 `invalid_request`                                                       |
| 401, 403, 407                           | the same status, `upstream_error`: the gateway's credentials, not the client's |
| 404, 405, 501                           | 404 `path_not_found`: the engine does not serve this; or `model_not_found`  |
| 408, 504                                | 504 `upstream_timeout`                                                      |
| 413, 415                                | `request_too_large`, `unsupported_media`                                    |
| 429                                     | 429 `upstream_busy`, with a time: the tenant's own limits are another code  |
| any other 4xx                           | the same status, `invalid_request`                                          |
| 503, 529                                | 503 `upstream_error`, with a time                                           |
| 424, 500, 502, any other                | 502 `upstream_error`                                                        |
"""

import math
from email.utils import parsedate_to_datetime

from msgspec import Struct

from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.error_body import ParsedError
from din_extproc.southbound.wordings import no_memory, worded

_BAD_REQUEST, _NOT_FOUND, _FAILED_DEPENDENCY, _TOO_MANY, _FAULT = 400, 404, 424, 429, 500
_BY_STATUS = {
    400: RefusalCode.INVALID_REQUEST,
    401: RefusalCode.UPSTREAM_ERROR,
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
_KEPT = frozenset({401, 403, 407})
"""What says that a retry is no use, in a code whose own status would say otherwise."""
_UNAVAILABLE = frozenset({503, 529})
_RETRY_S = {RefusalCode.UPSTREAM_BUSY: 1, RefusalCode.INSUFFICIENT_GPU_CAPACITY: 5}
"""When the node does not say."""
_UNAVAILABLE_RETRY_S = 1
_LONGEST_RETRY_S = 3600
_MESSAGES = {
    RefusalCode.PATH_NOT_FOUND: "The engine of this model does not serve this.",
    RefusalCode.MODEL_NOT_FOUND: "The node does not serve the model under the name that it was asked for.",
    RefusalCode.INSUFFICIENT_GPU_CAPACITY: "The node has no memory left for this request.",
    RefusalCode.UPSTREAM_BUSY: "The nodes of this model are busy; the limit is theirs, not the tenant's.",
    RefusalCode.UPSTREAM_TIMEOUT: "The node did not answer in time.",
    RefusalCode.REQUEST_TOO_LARGE: "The request is larger than the node accepts.",
}
_SHOWN = frozenset({RefusalCode.INVALID_REQUEST, RefusalCode.CONTEXT_LENGTH_EXCEEDED, RefusalCode.UNSUPPORTED_MEDIA})
"""Faults of the request: the engine's own sentence says what is wrong with it."""


class NodeError(Struct, frozen=True, gc=False):
    """What the client is told."""

    code: RefusalCode
    status: int
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    """None: the node did not ask for time."""


def normalise(engine: str, status: int, said: ParsedError, asked_s: int | None = None) -> NodeError:
    """The gateway's error for a node's.

    Args:
        engine: The pool's.
        status: Of the node's answer, none of the good ones.
        said: What its body says.
        asked_s: For how long the node asks to be left alone, see `retry_after_s`.
    """
    code = _code(engine, status, said)
    answered = _status(code, status)
    default = _UNAVAILABLE_RETRY_S if answered in _UNAVAILABLE else None
    retry = _RETRY_S.get(code, default)
    if code in _SHOWN:
        return NodeError(code, answered, said.message or code.title, said.param)
    message = _MESSAGES.get(code) or _upstream(status)
    return NodeError(code, answered, message, retry_after_s=None if retry is None else max(retry, asked_s or 0))


def retry_after_s(text: str, wall: float) -> int | None:
    """A `retry-after` header as whole seconds, at least 1 and at most an hour; None: it says nothing.

    Args:
        text: Seconds, or a date.
        wall: Now, seconds since the epoch.
    """
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - wall
    except (ValueError, TypeError, OverflowError):
        return None
    return min(_LONGEST_RETRY_S, max(1, math.ceil(min(seconds, _LONGEST_RETRY_S)))) if seconds == seconds else None  # noqa: PLR0124 - a NaN is no time


def _code(engine: str, status: int, said: ParsedError) -> RefusalCode:
    if (status >= _FAULT or status == _FAILED_DEPENDENCY) and no_memory(said):
        return RefusalCode.INSUFFICIENT_GPU_CAPACITY
    return (
        worded(engine, said)
        or _BY_STATUS.get(status)
        or (RefusalCode.INVALID_REQUEST if _BAD_REQUEST <= status < _FAULT else RefusalCode.UPSTREAM_ERROR)
    )


def _status(code: RefusalCode, status: int) -> int:
    if code is RefusalCode.UPSTREAM_ERROR:
        return status if status in _KEPT else 503 if status in _UNAVAILABLE else code.status
    kept = code is RefusalCode.INVALID_REQUEST and status < _FAULT and status not in _BY_STATUS
    return status if kept else code.status


def _upstream(status: int) -> str:
    if status in _KEPT:
        return f"The node refused the gateway ({status})."
    if status < _BAD_REQUEST:
        return f"The node sent the request elsewhere ({status}), which is not done."
    return f"The node answered with an error ({status})."

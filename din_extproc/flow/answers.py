"""Answers that the gateway gives itself: refusals, the model list, OPTIONS.

Rule: every error has the same body, on Anthropic's path in Anthropic's shape, and nothing in it comes from the prompt or the key. Every
answer names the exchange in `x-request-id`, where SDKs look for it, and in `x-din-trace-id`.
"""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Operation, RequestHead
from din_extproc.domain.verdict import Headers, ImmediateResponse, Refusal, RefusalCode, anthropic_error_body, error_body
from din_extproc.route.table import ListedModel

_PROBLEM = "application/problem+json"
_JSON = "application/json"
_MESSAGES = Operation.MESSAGES.value
_PATH_ENDS = ("", "/", "?")
MOST_DAYS = 31
"""Of usage that a tenant can ask for at once."""
NO_REPORTS = Refusal(RefusalCode.PATH_NOT_FOUND, "This path is not served here")
_NO_RETRY: Headers = (("x-should-retry", "false"),)
"""OpenAI's clients try a 409 or 429 again unless a header says that it is no use."""


def build_refusal_response(
    refused: Refusal, head: RequestHead, trace_id: str, headers: Headers = (), metadata: Mapping[str, str] | None = None
) -> ImmediateResponse:
    """The error answer. The body is OpenAI's and RFC 9457's at once; `accept` decides which of the two media types it is called.

    `metadata`: identifies the tenant and the request in the access log; it is not sent to the client.
    """
    code = refused.code
    no_use = refused.retry_after_ms is None and code.status < HTTPStatus.INTERNAL_SERVER_ERROR
    own, body = build_error(code, refused.message, head, trace_id, param=refused.param)
    return ImmediateResponse(
        status=code.status,
        headers=(*own, *headers, *refused.headers, *(_NO_RETRY if no_use else ())),
        body=body,
        metadata={"trace_id": trace_id, "refusal": code.code, **(metadata or {}), **refused.labels},
    )


def build_error(
    code: RefusalCode, message: str, head: RequestHead, trace_id: str, *, param: str | None = None, status: int | None = None
) -> tuple[Headers, bytes]:
    """The headers and the body of an error answer to this request. `status` None: the code's own."""
    if is_anthropic_path(head.path):
        return (("content-type", _JSON), *make_trace_headers(head.path, trace_id)), anthropic_error_body(
            code, message, trace_id=trace_id, status=status
        )
    body = error_body(code, message, trace_id=trace_id, instance=make_problem_instance(head.path), param=param, status=status)
    return (("content-type", choose_error_media_type(head)), *make_trace_headers(head.path, trace_id)), body


def make_trace_headers(path: str, trace_id: str) -> Headers:
    """The headers that name the exchange, under the names that clients of the path look for."""
    named = ("x-din-trace-id", trace_id), ("x-request-id", trace_id)
    return (*named, ("request-id", trace_id)) if is_anthropic_path(path) else named


def is_anthropic_path(path: str) -> bool:
    """Return whether the path belongs to Anthropic's API: the Messages API and every path below it, served or not."""
    return path.startswith(_MESSAGES) and path[len(_MESSAGES) : len(_MESSAGES) + 1] in _PATH_ENDS


def build_internal_error(head: RequestHead, trace_id: str) -> ImmediateResponse:
    """Return the client's error for an internal fault, with the id under which it is logged."""
    refused = Refusal(RefusalCode.INTERNAL_ERROR, f"The gateway failed; the log has the reason under {trace_id}.")
    return build_refusal_response(refused, head, trace_id)


HEALTHY = ImmediateResponse(status=200, headers=(("content-type", "text/plain"),), body=b"ok\n")
"""The answer to a load balancer on the health path."""


def build_options_response(trace_id: str) -> ImmediateResponse:
    """OPTIONS without CORS: what may be asked here. With CORS configured, Envoy answers preflights itself."""
    return ImmediateResponse(status=204, headers=(("allow", "GET, HEAD, POST, OPTIONS"), *make_trace_headers("", trace_id)), body=b"")


class _ModelListing(Struct, frozen=True, gc=False):
    """One name as `/v1/models` shows it: OpenAI's object, and `alias_for` with the physical models behind an alias."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "din"
    max_model_len: int | None = None
    """The longest context that the tenant can be served under this name, by vLLM's word; None: no node is known."""
    context_length: int | None = None
    """The same by the word of other clients."""
    alias_for: tuple[str, ...] = ()


def build_models_response(
    listed: Iterable[ListedModel], name: str, trace_id: str, *, length: Callable[[tuple[str, ...]], int | None], created: int
) -> ImmediateResponse | Refusal:
    """`GET /v1/models`, or with a name `GET /v1/models/NAME`: only what the tenant may ask for exists.

    Args:
        listed: What the tenant may ask for; of a request for one model, that one alone.
        name: Of one model; "": all of them.
        trace_id: Of the exchange.
        length: The longest context among the nodes of these pools; None: they have none.
        created: Since when they are served: seconds since the epoch.
    """
    listings = []
    for model in listed:
        longest = length(model.pools)
        listings.append(_ModelListing(model.name, created=created, max_model_len=longest, context_length=longest, alias_for=model.models))
    content: object = {"object": "list", "data": [listing for listing in listings if "*" not in listing.id]}
    if name:
        if not listings:
            return Refusal(RefusalCode.MODEL_NOT_FOUND, "There is no model of this name.", param="model")
        [content] = listings
    return ImmediateResponse(
        status=200,
        headers=(("content-type", _JSON), *make_trace_headers("", trace_id)),
        body=msgspec.json.encode(content),
        metadata={"trace_id": trace_id},
    )


def read_days(path: str) -> int | Refusal:
    """The number of days in the query of `GET /v1/usage?days=7`; today alone without one."""
    days = parse_qs(path.partition("?")[2]).get("days", ["1"])[-1]
    if days.isascii() and days.isdigit() and 0 < int(days[:4]) <= MOST_DAYS:
        return int(days)
    return Refusal(RefusalCode.INVALID_REQUEST, f"days is a number from 1 to {MOST_DAYS}.", param="days")


def build_usage_response(report: object, trace_id: str) -> ImmediateResponse:
    """`GET /v1/usage`."""
    return ImmediateResponse(
        status=200,
        headers=(("content-type", _JSON), ("cache-control", "no-store"), *make_trace_headers("", trace_id)),
        body=msgspec.json.encode(report),
        metadata={"trace_id": trace_id},
    )


def choose_error_media_type(head: RequestHead) -> str:
    """Return the content type of an error body, as the client asks."""
    return _PROBLEM if _PROBLEM in head.header("accept") else _JSON


def make_problem_instance(path: str) -> str:
    """The path without its query: keys are sometimes sent there."""
    return path.partition("?")[0][:200]

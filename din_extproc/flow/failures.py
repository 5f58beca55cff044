"""Maps a node's error answer to the client's: the one error body, whatever the engine wrote.

Rule: only answers that are not good are looked at, redirections among them; what is an error body of ours already, a node agent's or
Envoy's, passes as it is, unless the client speaks Anthropic's dialect and the body does not.
Errors inside a stream that began well are not here: the status has left, and `usage.lua` sees to their shape.
"""

import zlib
from functools import partial
from http import HTTPStatus

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, SUCCESS_STATUSES, BufferedTranslation, Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import Headers
from din_extproc.flow import answers
from din_extproc.southbound.error_body import READ_BYTES, ParsedError, parse_error
from din_extproc.southbound.errors import normalise_error, parse_retry_after

_DEFLATED = frozenset({"gzip", "x-gzip", "deflate"})
_EITHER_HEADER = 32 + zlib.MAX_WBITS


def translate_error(engine: str, response: ResponseHead, request: RequestHead, trace_id: str, wall: float) -> Treatment:
    """Return the treatment of the answer to a request that a node received.

    Args:
        engine: The pool's.
        response: The answer's head.
        request: The client's.
        trace_id: Of the exchange.
        wall: Now, seconds since the epoch.
    """
    if response.status in SUCCESS_STATUSES:
        return PASS
    retold = partial(_rewrite_error, engine, response, request, trace_id, wall)
    if response.status < HTTPStatus.BAD_REQUEST or not _is_read(response):
        return retold(ParsedError())
    if response.header("x-din-trace-id") and answers.is_anthropic_path(request.path):
        return PASS  # Envoy's own answer: a node's loses every such header before it comes here
    return BufferedTranslation(
        lambda body: _keep_own_errors(retold, parse_error(_decode_plain(body, response.header("content-encoding"))), request)
    )


def _is_read(response: ResponseHead) -> bool:
    """Return whether the body is buffered: not if it is too long, nor if it has no length and is no JSON."""
    length = response.header("content-length")
    return int(length) <= READ_BYTES if length.isdigit() else "json" in response.header("content-type").lower()


def _keep_own_errors(retold: "partial[Replacement]", found: ParsedError, request: RequestHead) -> Replacement | None:
    return None if found.is_gateway_error and not answers.is_anthropic_path(request.path) else retold(found)


def _rewrite_error(
    engine: str, response: ResponseHead, request: RequestHead, trace_id: str, wall: float, found: ParsedError
) -> Replacement:
    error = normalise_error(engine, response.status, found, parse_retry_after(response.header("retry-after"), wall))
    retry: Headers = ()
    if error.retry_after_s is not None:
        retry = ("retry-after", str(error.retry_after_s)), ("retry-after-ms", str(error.retry_after_s * 1000))
    headers, body = answers.build_error(error.code, error.message, request, trace_id, param=error.param, status=error.status)
    return Replacement(error.status, (*headers, *retry), body)


def _decode_plain(body: bytes, encoding: str) -> bytes:
    """The body without its compression; b"" when it can't be read or would be longer than anybody reads."""
    coding = encoding.strip().lower()
    if coding in {"", "identity"}:
        return body
    if coding not in _DEFLATED:
        return b""
    unpacker = zlib.decompressobj(_EITHER_HEADER)
    try:
        plain = unpacker.decompress(body, READ_BYTES)
    except zlib.error:
        return b""
    return b"" if unpacker.unconsumed_tail else plain

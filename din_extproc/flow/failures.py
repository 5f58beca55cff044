"""What a client sees of a node's error answer: the one error body, whatever the engine wrote.

Rule: only answers that are not good are looked at, redirections among them; what is an error body of ours already, a node agent's or
Envoy's, passes as it is.
Errors inside a stream that began well are not here: the status has left, and `usage.lua` sees to their shape.
"""

import zlib
from functools import partial
from http import HTTPStatus

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, SUCCESS_STATUSES, BufferedTranslation, Replacement, ResponseHead, Treatment
from din_extproc.domain.verdict import Headers, error_body
from din_extproc.flow import answers
from din_extproc.southbound.error_body import READ_BYTES, ParsedError, said
from din_extproc.southbound.errors import normalise, retry_after_s

_DEFLATED = frozenset({"gzip", "x-gzip", "deflate"})
_EITHER_HEADER = 32 + zlib.MAX_WBITS


def treatment(engine: str, response: ResponseHead, request: RequestHead, trace_id: str, wall: float) -> Treatment:
    """What is done with the answer to a request that a node got.

    Args:
        engine: The pool's.
        response: The answer's head.
        request: The client's.
        trace_id: Of the exchange.
        wall: Now, seconds since the epoch.
    """
    if response.status in SUCCESS_STATUSES:
        return PASS
    retold = partial(_retold, engine, response, request, trace_id, wall)
    if response.status < HTTPStatus.BAD_REQUEST or not _is_read(response):
        return retold(ParsedError())
    return BufferedTranslation(lambda body: _unless_ours(retold, said(_plain(body, response.header("content-encoding")))))


def _is_read(response: ResponseHead) -> bool:
    """Whether the body is waited for: what is too long is not, nor what may never end and is no JSON either."""
    length = response.header("content-length")
    return int(length) <= READ_BYTES if length.isdigit() else "json" in response.header("content-type").lower()


def _unless_ours(retold: "partial[Replacement]", found: ParsedError) -> Replacement | None:
    return None if found.ours else retold(found)


def _retold(engine: str, response: ResponseHead, request: RequestHead, trace_id: str, wall: float, found: ParsedError) -> Replacement:
    error = normalise(engine, response.status, found, retry_after_s(response.header("retry-after"), wall))
    retry: Headers = ()
    if error.retry_after_s is not None:
        retry = ("retry-after", str(error.retry_after_s)), ("retry-after-ms", str(error.retry_after_s * 1000))
    return Replacement(
        status=error.status,
        headers=(("content-type", answers.media_type(request)), ("x-din-trace-id", trace_id), *retry),
        body=error_body(
            error.code,
            error.message,
            trace_id=trace_id,
            instance=answers.instance(request.path),
            param=error.param,
            status=error.status,
        ),
    )


def _plain(body: bytes, encoding: str) -> bytes:
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

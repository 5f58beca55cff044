"""Decoded ext_proc messages of one HTTP exchange. One ext_proc stream is one exchange."""

from collections.abc import Iterable

from msgspec import Struct

from din_extproc.domain.request import RequestHead


class ProtocolError(Exception):
    """The peer sent what ext_proc does not allow, or bytes that are no message. Its stream ends, nothing else."""


class RequestHeaders(Struct, frozen=True, gc=False):
    """The request's head. `end_of_stream`: no body follows."""

    head: RequestHead
    end_of_stream: bool


class RequestBody(Struct, frozen=True, gc=False):
    """The buffered body (the whole of it, in BUFFERED mode)."""

    body: bytes
    end_of_stream: bool


class RequestTrailers(Struct, frozen=True, gc=False):
    """The request ended by trailers."""


class ResponseHeaders(Struct, frozen=True, gc=False):
    """The answer's head, from a node or from Envoy itself."""

    status: int
    end_of_stream: bool
    entries: Iterable[bytes] = ()
    """The headers as they came, for `decode.response_head`: most answers' headers are never read."""


class ResponseBody(Struct, frozen=True, gc=False):
    """A piece of the answer's body. Only pools that need translation ask for it."""

    body: bytes
    end_of_stream: bool


class ResponseTrailers(Struct, frozen=True, gc=False):
    """The answer ended by trailers."""


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers

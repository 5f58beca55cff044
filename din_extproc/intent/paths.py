"""Maps method and `:path` to the operation that a request addresses.

The operations name their paths. A query string and one trailing slash are accepted; any other spelling is unknown.
"""

from collections.abc import Mapping
from urllib.parse import unquote

from msgspec import Struct

from din_extproc.domain.request import BUILT_IN, Operation
from din_extproc.domain.verdict import Refusal, RefusalCode

MAX_NAME = 256
"""The longest model name, in characters."""

_MODELS = Operation.MODELS.value + "/"
_RESPONSES = Operation.RESPONSES.value + "/"
_USAGE = "/v1/usage"
_READS = ("GET", "HEAD")

_NO_PATH = Refusal(RefusalCode.PATH_NOT_FOUND, "This path is not served here")
_NOT_STORED = Refusal(
    RefusalCode.PATH_NOT_FOUND,
    "No response is stored under this id: responses are not stored here. Send store: false, and the whole conversation in input",
)
_NO_MODEL = Refusal(RefusalCode.MODEL_NOT_FOUND, "There is no model of this name", param="model")
_READ_ONLY = Refusal(RefusalCode.METHOD_NOT_ALLOWED, "This path takes GET", headers=(("allow", "GET, HEAD"),))


class EndpointKind(Struct, frozen=True, gc=False):
    """An operation, with the model's name for `/v1/models/<name>` ("": the whole list)."""

    operation: Operation
    model: str = ""
    usage: bool = False
    """`GET /v1/usage`, which the gateway answers like the model list."""


_BUILT_IN = {operation: EndpointKind(operation) for operation in Operation}


def find_endpoint_kind(method: str, path: str, operations: Mapping[str, Operation] = BUILT_IN) -> EndpointKind | Refusal:
    """Return the operation that `method` and `path` address.

    Args:
        method: `:method`. `OPTIONS` requests are answered earlier.
        path: `:path` as sent, with its query string.
        operations: Every operation that is served, by path.

    Returns:
        The endpoint kind, or a refusal with status 404 (unknown path or model) or 405.
    """
    path = path.partition("?")[0]
    operation = operations.get(path) or operations.get(path.removesuffix("/"))
    if operation is Operation.MODELS:
        return EndpointKind(operation) if method in _READS else _READ_ONLY
    if path.removesuffix("/") == _USAGE:
        return EndpointKind(Operation.MODELS, usage=True) if method in _READS else _READ_ONLY
    if operation is not None:
        wanted = operation.spec.method
        if method != wanted:
            return Refusal(RefusalCode.METHOD_NOT_ALLOWED, f"This path takes {wanted}", headers=(("allow", wanted),))
        return _BUILT_IN.get(operation) or EndpointKind(operation)
    if not path.startswith(_MODELS):
        return _NOT_STORED if path.startswith(_RESPONSES) else _NO_PATH
    if method not in _READS:
        return _READ_ONLY
    name = unquote(path[len(_MODELS) :].removesuffix("/"))
    return EndpointKind(Operation.MODELS, name) if is_valid_model_name(name) else _NO_MODEL


def is_valid_model_name(name: str) -> bool:
    """Return whether a model name is usable: neither empty nor too long, no control characters, no lone surrogates."""
    return 0 < len(name) <= MAX_NAME and (name.isprintable() or not _has_invalid_characters(name))


def _has_invalid_characters(name: str) -> bool:
    return any(character < " " or "\x7f" <= character < "\xa0" or "\ud800" <= character <= "\udfff" for character in name)

"""Extracts the error from a node's error body: nested objects, JSON inside strings, plain text, HTML.

Any bytes give a `ParsedError` in bounded time. Text that is not the engine's own message is dropped.
"""

import json
import re
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

READ_BYTES = 64 << 10
"""The longest error body that is parsed; longer ones are pages or traces."""
_WRAPPINGS = 8
"""The largest number of nested objects, lists and strings that are opened."""
_EMBEDDED_BYTES = 16 << 10
_MESSAGE_CHARS = 1000
_NAME_CHARS = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]+")
_ADDRESS = re.compile(
    r"\bhttps?://[^\s'\"<>]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\](?::\d+)?"
    r"|\b[\w-]+(?:\.[\w-]+)+:\d{2,5}\b|\blocalhost(?::\d+)?\b"
)
"""Addresses that would reveal the network behind the gateway."""
_PATH = re.compile(r"(?<![\w/<.-])/(?!v\d+/)[\w.~+@-]+/[\w./~+@-]*|\b[A-Za-z]:\\[^\s'\"]+")
"""Likewise of its machines: a file. Paths of the API stay."""
_INNER = ("error", "errors", "value", "error_message", "detail", "message")
"""Where what is more to the point stands, the most likely first."""
_WRAPS = frozenset({"error", "message", "detail", "error_message"})
_OURS = "urn:din-extproc:error:"
_scanner = json.JSONDecoder()


class ParsedError(Struct, frozen=True, gc=False):
    """An error as reported by the engine; "" or None: not reported."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None
    is_gateway_error: bool = False
    """The body is already a gateway error body, from a node's agent or from Envoy."""


def parse_error(body: bytes) -> ParsedError:
    """Parse an error body."""
    if len(body) > READ_BYTES:
        return ParsedError()
    text = body.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    content = _decode(text)
    if content is None:
        return ParsedError() if text.startswith("<") else ParsedError(message=_clean(text.partition("\n")[0]))
    if isinstance(content, dict) and str(content.get("type", "")).startswith(_OURS):
        return replace(_unwrap(content), is_gateway_error=True)
    return _unwrap(content)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _unwrap(content: Any) -> ParsedError:
    """Unwrap nested errors; inner values take precedence."""
    found = ParsedError()
    for _ in range(_WRAPPINGS):
        if isinstance(content, list):
            content = content[0] if content else None
        elif isinstance(content, str):
            inner = _find_embedded(content)
            if inner is None:
                return _merge(found, message=_clean(content))
            found, content = _merge(found, message=_clean(content)), inner
        elif isinstance(content, dict):
            found = _merge(
                found,
                message=_validation_message(content) or _sentence(content.get("message")),
                type=_name(content.get("type") or content.get("error_type")),
                code=_name(content.get("code")),
                param=_param(content.get("param")) or _place(content.get("loc")),
            )
            content = next((content[key] for key in _INNER if _is_inner(key, content.get(key))), None)
        else:
            return found
    return found


def _merge(found: ParsedError, *, message: str = "", type: str = "", code: str = "", param: str | None = None) -> ParsedError:  # noqa: A002 - the field's name
    return ParsedError(message or found.message, type or found.type, code or found.code, param or found.param)


def _find_embedded(text: str) -> Any:
    """Return the JSON error object embedded in a text, or None."""
    start = text.find("{", 0, _EMBEDDED_BYTES)
    if start < 0:
        return None
    try:
        inner, _ = _scanner.raw_decode(text[: start + _EMBEDDED_BYTES], start)
    except (ValueError, RecursionError):
        return None
    return inner if isinstance(inner, dict) and inner.keys() & _WRAPS else None


def _is_inner(key: str, value: Any) -> bool:
    """Return whether the error goes on there. What gateways call `value` may be anything; it counts when it holds an error."""
    if key != "value":
        return bool(value)
    return (isinstance(value, dict) and bool(value.keys() & _WRAPS)) or (isinstance(value, str) and _find_embedded(value) is not None)


def _sentence(value: Any) -> str:
    return _clean(value) if isinstance(value, str) else ""


def _validation_message(content: dict[str, Any]) -> str:
    """Return the message of FastAPI's validation error, with the field."""
    message = content.get("msg")
    if not isinstance(message, str):
        return ""
    place = _place(content.get("loc"))
    return _clean(f"{place}: {message}" if place else message)


def _place(where: Any) -> str | None:
    return _param(".".join(str(part) for part in where[:8])) if isinstance(where, list) else None


def _param(name: Any) -> str | None:
    """Return a parameter's name within the body."""
    return _name(name).removeprefix("body.") or None if isinstance(name, str) else None


def _name(value: Any) -> str:
    return _CONTROL.sub(" ", value)[:_NAME_CHARS] if isinstance(value, str) else ""


def _clean(text: str) -> str:
    masked = _ADDRESS.sub("(address)", _CONTROL.sub(" ", text[: 2 * _MESSAGE_CHARS]))
    return _PATH.sub("(path)", masked).strip()[:_MESSAGE_CHARS]

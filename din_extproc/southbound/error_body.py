"""What a node's error answer says, dug out of whatever it is wrapped in: objects in objects, JSON in strings, text, a web page.

Rule: whatever bytes come, a `ParsedError` comes out, in bounded time; and text that is not the engine's own sentence is dropped.
"""

import json
import re
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

READ_BYTES = 64 << 10
"""A longer body is no error message: a page, or a trace. It is not read."""
_WRAPPINGS = 8
"""Objects, lists and strings inside each other that are opened at most."""
_EMBEDDED_BYTES = 16 << 10
_MESSAGE_CHARS = 1000
_NAME_CHARS = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]+")
_ADDRESS = re.compile(r"\b(?:https?://[^\s'\"<>]+|\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?)")
"""What would tell a client how the network behind the gateway looks."""
_OURS = "urn:din-extproc:error:"
_scanner = json.JSONDecoder()


class ParsedError(Struct, frozen=True, gc=False):
    """An error in the engine's own words; "" or None: not told."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None
    ours: bool = False
    """The body is a gateway's own error body already: of a node's agent, or of Envoy itself."""


def said(body: bytes) -> ParsedError:
    """Read an error's body."""
    if len(body) > READ_BYTES:
        return ParsedError()
    text = body.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    content = _decoded(text)
    if content is None:
        return ParsedError() if text.startswith("<") else ParsedError(message=_clean(text.partition("\n")[0]))
    if isinstance(content, dict) and str(content.get("type", "")).startswith(_OURS):
        return replace(_dug(content), ours=True)
    return _dug(content)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _dug(content: Any) -> ParsedError:
    """Open one wrapping after the other; what stands further inside is more to the point."""
    found = ParsedError()
    for _ in range(_WRAPPINGS):
        if isinstance(content, list):
            content = content[0] if content else None
        elif isinstance(content, str):
            inner = _embedded(content)
            if inner is None:
                return _with(found, message=_clean(content))
            found, content = _with(found, message=_clean(content)), inner
        elif isinstance(content, dict):
            found = _with(
                found,
                message=_finding(content),
                type=_name(content.get("type") or content.get("error_type")),
                code=_name(content.get("code")),
                param=_param(content.get("param")) or _place(content.get("loc")),
            )
            content = next((content[key] for key in ("error", "errors", "detail", "message") if content.get(key)), None)
        else:
            return found
    return found


def _with(found: ParsedError, *, message: str = "", type: str = "", code: str = "", param: str | None = None) -> ParsedError:  # noqa: A002 - the field's name
    return ParsedError(message or found.message, type or found.type, code or found.code, param or found.param)


def _embedded(text: str) -> Any:
    """The JSON object that a sentence carries, when it is an error; None: it carries none."""
    start = text.find("{", 0, _EMBEDDED_BYTES)
    if start < 0:
        return None
    try:
        inner, _ = _scanner.raw_decode(text[: start + _EMBEDDED_BYTES], start)
    except (ValueError, RecursionError):
        return None
    return inner if isinstance(inner, dict) and inner.keys() & {"error", "message", "detail"} else None


def _finding(content: dict[str, Any]) -> str:
    """FastAPI's way to say what is wrong with which field."""
    message = content.get("msg")
    if not isinstance(message, str):
        return ""
    place = _place(content.get("loc"))
    return _clean(f"{place}: {message}" if place else message)


def _place(where: Any) -> str | None:
    return _param(".".join(str(part) for part in where[:8])) if isinstance(where, list) else None


def _param(name: Any) -> str | None:
    """A parameter by its name in the body."""
    return _name(name).removeprefix("body.") or None if isinstance(name, str) else None


def _name(value: Any) -> str:
    return _CONTROL.sub(" ", value)[:_NAME_CHARS] if isinstance(value, str) else ""


def _clean(text: str) -> str:
    return _ADDRESS.sub("(address)", _CONTROL.sub(" ", text[: 2 * _MESSAGE_CHARS])).strip()[:_MESSAGE_CHARS]

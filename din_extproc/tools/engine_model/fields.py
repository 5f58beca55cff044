"""Checks that fields exist and have the right types, with the same findings and texts as the pydantic models of a real engine.

Rule: as lax as pydantic is by default: "0.5" is a number, "true" a boolean, a present null is an absent field.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from din_extproc.tools.engine_model.errors import EngineFailure, FieldFinding, invalid, shorten, unsupported_media_type

_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_TYPES = {
    "list": (list, "list_type", "Input should be a valid list"),
    "dict": (dict, "dict_type", "Input should be a valid dictionary"),
    "str": (str, "string_type", "Input should be a valid string"),
}


def decode_body(body: bytes, content_type: str) -> dict[str, Any] | EngineFailure:
    """Decode a body as an object, as Python's json does: NaN passes, duplicate keys too (the last wins)."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return unsupported_media_type()
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        try:
            decoded = json.loads(body)
        except json.JSONDecodeError as error:
            finding = FieldFinding("json_invalid", f"body.{error.pos}", "JSON decode error", shorten({}), error.msg)
            return invalid([finding])
        except (UnicodeDecodeError, RecursionError):
            return invalid(
                [FieldFinding("json_invalid", "body.0", "JSON decode error", shorten({}), "There was an error parsing the body")]
            )
    if not isinstance(decoded, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        return invalid([FieldFinding("model_attributes_type", "body", message, shorten(decoded))])
    return decoded


def check_fields(body: Mapping[str, Any], kinds: Mapping[str, str], required: tuple[str, ...]) -> dict[str, Any] | EngineFailure:
    """Return the named fields, coerced; absent and null ones are None. Other fields are ignored, as vLLM does.

    Args:
        body: the decoded object.
        kinds: field name to `int`, `float`, `bool`, `str`, `list`, `dict` or `any`.
        required: the fields that must be there.
    """
    findings: list[FieldFinding] = []
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        value = body.get(name)
        fields[name] = None
        if value is None:
            if name in required:
                findings.append(FieldFinding("missing", f"body.{name}", "Field required", shorten(dict(body))))
            continue
        coerced = _coerce(value, kind)
        if isinstance(coerced, _Wrong):
            findings.append(FieldFinding(coerced.kind, f"body.{name}", coerced.msg, shorten(value)))
        else:
            fields[name] = coerced
    return invalid(findings) if findings else fields


class _Wrong(msgspec.Struct, frozen=True):
    kind: str
    msg: str


def _coerce(value: Any, kind: str) -> Any:
    if kind == "any":
        return value
    if kind in _TYPES:
        type_, code, message = _TYPES[kind]
        return value if isinstance(value, type_) else _Wrong(code, message)
    if kind == "bool":
        return _to_bool(value)
    return _to_number(value, kind)


def _to_bool(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, str)):
        word = _WORDS.get(str(value).lower())
        return _Wrong("bool_parsing", "Input should be a valid boolean, unable to interpret input") if word is None else word
    return _Wrong("bool_type", "Input should be a valid boolean")


def _to_number(value: Any, kind: str) -> Any:
    noun, article = ("integer", "an") if kind == "int" else ("number", "a")
    if isinstance(value, str):
        try:
            return int(value) if kind == "int" else float(value)
        except ValueError:
            return _Wrong(f"{kind}_parsing", f"Input should be a valid {noun}, unable to parse string as {article} {noun}")
    if not isinstance(value, (int, float)):
        return _Wrong(f"{kind}_type", f"Input should be a valid {noun}")
    if kind == "float":
        return float(value)
    if isinstance(value, float) and not value.is_integer():
        return _Wrong("int_from_float", "Input should be a valid integer, got a number with a fractional part")
    return int(value)

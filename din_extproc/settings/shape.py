"""Data against the schema: every deviation a problem at its line, and the sound rest still usable for further checks.

Rule: what is broken is left out, not guessed; `ShapedConfig.broken` says what, so that its absence is not reported as well.
"""

from collections.abc import Iterator
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from msgspec import Struct
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from din_extproc.route.flaw import did_you_mean
from din_extproc.settings.document import Document
from din_extproc.settings.problems import Place
from din_extproc.settings.schema import DinYaml

_KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("at least {} is expected", "ge"),
    "less_than_equal": ("at most {} is expected", "le"),
    "greater_than": ("more than {} is expected", "gt"),
    "less_than": ("less than {} is expected", "lt"),
    "too_short": ("at least {} of these is expected", "min_length"),
    "string_too_short": ("a text is expected, not an empty one", "min_length"),
    "string_pattern_mismatch": ("a text of the form {} is expected", "pattern"),
}
_TYPE_NAMES = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "nothing",
}
_ITEMS = ("aliases", "pools", "rules", "tenants")
"""Sections in which one broken item does not spoil the others."""
Model = TypeVar("Model", bound=BaseModel)


class ShapedConfig(Struct, frozen=True):
    """The sound part of a configuration."""

    config: DinYaml
    rules: tuple[int, ...]
    """The place of each valid rule in the file."""
    tenants: tuple[int, ...]
    """The place of each valid tenant in the file."""
    broken: frozenset[str]
    """Sections that are not whole."""


def shape(document: Document) -> ShapedConfig | None:
    """Hold a configuration against the schema. None: there is no sound rest worth looking at."""
    data = document.data
    if not isinstance(data, dict):
        document.report((), f"a mapping of sections is expected, not {_TYPE_NAMES.get(type(data), 'this')}")
        return None
    try:
        config = DinYaml.model_validate(data)
        return ShapedConfig(config, tuple(range(len(config.rules))), tuple(range(len(config.tenants))), frozenset())
    except ValidationError as error:
        places = report_errors(error, document, DinYaml)
    sound, kept = _remove_places(data, places)
    try:
        config = DinYaml.model_validate({"version": 1} | sound)
    except ValidationError:
        return None
    return ShapedConfig(config, kept["rules"], kept["tenants"], frozenset(str(place[0]) for place in places if place))


def validated(model: type[Model], document: Document) -> Model | None:
    """The document as this model; problems are reported."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        report_errors(error, document, model)
        return None


def report_errors(error: ValidationError, document: Document, model: type[BaseModel]) -> list[Place]:
    """Report each of pydantic's findings; returns their places."""
    places = []
    for finding in error.errors(include_url=False, include_input=True):
        place: Place = tuple(part for part in finding["loc"] if part != "[key]")
        places.append(place)
        message, hint = _translate_finding(finding, place, model)
        document.report(place, message, hint, at_key=finding["type"] == "extra_forbidden" or "[key]" in finding["loc"])
    return places


def _translate_finding(finding: ErrorDetails, place: Place, model: type[BaseModel]) -> tuple[str, str]:
    kind, given = finding["type"], finding.get("input")
    if kind == "extra_forbidden":
        known = sorted(_find_fields(model, place[:-1]))
        return "unknown field", did_you_mean(str(place[-1]), known) or f"known here: {', '.join(known)}"
    if kind == "missing":
        return "is missing", ""
    if kind == "int_parsing_size":
        return "the number is too large", ""
    if kind in {"literal_error", "enum"}:
        return _describe_no_choice(given, finding["ctx"]["expected"])
    if kind in _KINDS:
        return _describe_other_kind(_KINDS[kind], given)
    if kind in _BOUNDS:
        wording, bound = _BOUNDS[kind]
        return wording.format(finding["ctx"][bound]), ""
    return finding["msg"].removeprefix("Value error, "), ""


def _describe_no_choice(given: Any, expected: str) -> tuple[str, str]:
    choices = [choice.strip().strip("'") for choice in expected.replace(" or ", ", ").split(",")]
    given_text = _TYPE_NAMES.get(type(given), "this") if isinstance(given, dict | list | None) else repr(given)
    return f"{given_text} is not among {', '.join(choices)}", did_you_mean(str(given), choices)


def _describe_other_kind(expected: str, given: Any) -> tuple[str, str]:
    given_text = str(given) if isinstance(given, float) else _TYPE_NAMES.get(type(given), "this")
    hint = ""
    if expected == "a text" and isinstance(given, int | float):
        hint = "put it in quotes"
    elif expected == "a whole number" and isinstance(given, str) and given.strip().isdecimal():
        hint = "write it without quotes"
    return f"{expected} is expected, not {given_text}", hint


def _find_fields(model: type[BaseModel], place: Place) -> list[str]:
    """The fields of the section at the place: those of the model that the place leads to."""
    current = model
    for part in place:
        by_name = {field.alias or name: field for name, field in current.model_fields.items()}
        if part in by_name:
            current = next(_find_models(by_name[str(part)].annotation), current)
    return [field.alias or name for name, field in current.model_fields.items()]


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections inside an annotation, whatever wraps them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType) or annotation is Union:
        for inner in get_args(annotation):
            yield from _find_models(inner)


def _remove_places(data: dict[str, Any], places: list[Place]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The data without what is broken: single items where a section has items, else the whole section."""
    sections = {str(place[0]) for place in places if place and (len(place) == 1 or place[0] not in _ITEMS)}
    items = {(str(place[0]), place[1]) for place in places if len(place) > 1}
    sound: dict[str, Any] = {}
    kept: dict[str, tuple[int, ...]] = {"rules": (), "tenants": ()}
    for section, value in data.items():
        if section in sections:
            continue
        if section in _ITEMS and isinstance(value, dict):
            sound[section] = {name: item for name, item in value.items() if (section, name) not in items}
        elif section in _ITEMS and isinstance(value, list):
            kept[section] = tuple(index for index in range(len(value)) if (section, index) not in items)
            sound[section] = [value[index] for index in kept[section]]
        else:
            sound[section] = value
    return sound, kept

"""The reference of `din.yaml`, made from the classes that read it: every key, its type, its range, its default, and what its text says.

Rule: nothing is written here that the classes do not say.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from enum import Enum

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from din_extproc.domain.node import Endpoint
from din_extproc.settings.schema import DinYaml

_HEAD = """# Reference of din.yaml

Made from the classes that read the file (`make golden`); the commented example is [din.yaml](din.yaml). A key that does not stand here is
an error. A value may be `${NAME}` or `${NAME:-default}`, a variable of the environment.
"""
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", SecretStr: "text, kept secret", Endpoint: "address:port"}


def reference() -> str:
    """The whole page."""
    done: set[type[BaseModel]] = set()
    return _HEAD + "".join(_section(DinYaml, "", done))


def _section(model: type[BaseModel], path: str, done: set[type[BaseModel]]) -> Iterator[str]:
    """A section's table, then those inside it. One that stands in several places is described at the first."""
    if model in done:
        return
    done.add(model)
    told = _attribute_texts(model)
    yield f"\n## {path or 'The file'}\n\n{_flat(inspect.getdoc(model) or '')}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        yield f"| `{key}` | {_type(field.annotation)}{_range(field)} | {_default(field)} | {_flat(told.get(name, ''))} |\n"
        inner += [(f"{path}.{key}".strip("."), each) for each in _models(field.annotation)]
    for where, each in inner:
        yield from _section(each, where, done)


def _attribute_texts(model: type[BaseModel]) -> dict[str, str]:
    """The texts that stand below attributes in the source, those of the classes above too."""
    told: dict[str, str] = {}
    for cls in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(before, ast.AnnAssign) and isinstance(text, str):
                told[before.target.id] = text
    return told


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def _type(annotation: object) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" if value != "" else "nothing" for value in inner)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(dict.fromkeys("nothing" if each is type(None) else _type(each) for each in inner))
    if origin in {tuple, list, frozenset, set}:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"mapping of {_type(inner[0])} to {_type(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{each.value}`" for each in annotation)
    return _WORDS.get(annotation, getattr(annotation, "__name__", "value"))  # type: ignore[call-overload]


def _range(field: FieldInfo) -> str:
    bounds = {name: getattr(each, name) for each in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return "".join(f", {signs[name]} {value if isinstance(value, int) else format(value, 'g')}" for name, value in bounds.items())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, SecretStr):
        return f"`{value.get_secret_value()}`"
    if value is None or value in ((), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _flat(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())

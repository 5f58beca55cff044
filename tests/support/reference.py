"""The generated pages of the documentation: configuration, command line and metrics, made from the classes and tables that define them.

Invariant: a page contains only what the code says.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import Any

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand, TyperGroup

from din_extproc.cli.app import app
from din_extproc.domain.node import Endpoint
from din_extproc.observe import instruments
from din_extproc.settings.catalog import CatalogModel
from din_extproc.settings.node import NodeYaml
from din_extproc.settings.pools import SchedulerSection
from din_extproc.settings.remote import ApiLocation
from din_extproc.settings.schema import DinYaml
from tests.support.config_examples import Examples, all_examples, models_in

_HEAD = """# Configuration

Every key of `din.yaml`, of a node agent's `node.yaml` and of the model catalogue, generated from the classes that read them
(`make golden`). The commented examples are `envoy/din.yaml` and `envoy/node.din.yaml`; sections are described in
[configuration in prose](behaviour.md). Other keys are errors. Each example is a value of a whole configuration that a test loads.
"""
_COMMANDS = """# Command line

Generated from `--help` (`make golden`). Exit codes: 0; 1 when the answer is no; 2 for a wrong call. Commands that report have `--json`.
`din-extproc --install-completion` installs completion for bash, zsh and fish.
"""
_METRICS = """# Metrics

Generated from `din_extproc/observe/instruments.py` (`make golden`). `GET /metrics` on the admin port is for Prometheus; one scrape
covers all workers. OpenTelemetry's names apply to OTLP. A family has at most 5,000 label sets; the rest counts as `other`. No label
contains text that clients choose.

| Prometheus | OpenTelemetry | kind | unit | labels | meaning |
|---|---|---|---|---|---|
"""
_WORDS = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    datetime: "date",
    SecretStr: "text, kept secret",
    Endpoint: "address:port",
    ApiLocation: "URL",
    SchedulerSection: "name, or mapping of `name` and options",
    Any: "value or list of values",
}


def configuration_page() -> str:
    """Return the page of every key of `din.yaml`: type, range, default, meaning."""
    done: set[type[BaseModel]] = set()
    examples = all_examples()
    files = ((DinYaml, "din.yaml"), (NodeYaml, "node.yaml"), (CatalogModel, "models.json"))
    return _HEAD + "".join(text for model, name in files for text in _section(model, name, done, examples))


def commands_page() -> str:
    """Return the page of every command with its arguments and options."""
    return _COMMANDS + "".join(_command(typer.main.get_command(app), "din-extproc"))


def metrics_page() -> str:
    """Return the page of every metric."""
    rows = (
        (
            f"`{each.prometheus}`",
            f"`{each.name}`",
            each.kind.value,
            each.unit,
            ", ".join(f"`{name}`" for name in each.labels),
            _flat(each.about),
        )
        for each in instruments.ALL
    )
    return _METRICS + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _command(command: TyperCommand | TyperGroup, name: str) -> Iterator[str]:
    """Yield a command's section, then those of its subcommands."""
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from _command(each, f"{name} {each.name}")
        return
    yield f"\n## {name}\n\n{_flat(command.help or '')}\n\n| argument or option | default | meaning |\n|---|---|---|\n"
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = (*parameter.opts, *parameter.secondary_opts) if parameter.param_type_name == "option" else ((parameter.name or "").upper(),)
        spelled = " ".join(f"`{name}`" for name in names)
        plain = parameter.default not in (None, False, [], ()) and not callable(parameter.default)
        yield f"| {spelled} | {f'`{parameter.default}`' if plain else ''} | {_flat(getattr(parameter, 'help', '') or '')} |\n"


def _section(model: type[BaseModel], path: str, done: set[type[BaseModel]], examples: Examples) -> Iterator[str]:
    """A section's table, then those inside it. One that stands in several places is described at the first."""
    if model in done:
        return
    done.add(model)
    texts = _attribute_texts(model)
    yield f"\n## {path}\n\n{_flat(inspect.getdoc(model) or '')}\n\n| key | type | default | example | meaning |\n|---|---|---|---|---|\n"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        cells = (
            f"{_type(field.annotation)}{_range(field)}",
            _default(field),
            _example(examples.get((model, key))),
            _flat(texts.get(name, "")),
        )
        yield f"| `{key}` | {' | '.join(cells)} |\n"
        inner += [(key if path.endswith((".yaml", ".json")) else f"{path}.{key}", each) for each in models_in(field.annotation)]
    for where, each in inner:
        yield from _section(each, where, done, examples)


def _attribute_texts(model: type[BaseModel]) -> dict[str, str]:
    """The texts that stand below attributes in the source, those of the classes above too."""
    texts: dict[str, str] = {}
    for cls in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(before, ast.AnnAssign) and isinstance(text, str):
                texts[before.target.id] = text
    return texts


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
    if origin in {dict, Mapping}:
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
    if isinstance(value, SchedulerSection):
        return f"`{value.name}`"
    if isinstance(value, SecretStr):
        return f"`{value.get_secret_value()}`"
    if value is None or value in ((), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _example(text: str | None) -> str:
    return "" if text is None else f"`{_flat(text)}`"


def _flat(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())

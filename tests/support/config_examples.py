"""Examples of every configuration key, taken from whole configurations that load: the shipped ones and those of `tests/golden/examples`."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from din_extproc.settings.catalog import CatalogFile
from din_extproc.settings.node import NodeYaml
from din_extproc.settings.schema import DinYaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden" / "examples"
GATEWAYS = (ROOT / "envoy" / "din.yaml", *sorted(FOLDER.glob("gateway*.yaml")))
NODES = (ROOT / "envoy" / "node.din.yaml", FOLDER / "node.yaml")
CATALOGS = (ROOT / "envoy" / "models.json", FOLDER / "models.json")
_LONGEST = 60
"""Characters of an example; a section's examples are those of its keys."""

Examples = dict[tuple[type[BaseModel], str], str]
"""(Section, key) -> one value, as YAML in one line."""


def all_examples() -> Examples:
    """Return the first example of each key."""
    found: Examples = {}
    for model, files in ((DinYaml, GATEWAYS), (NodeYaml, NODES), (CatalogFile, CATALOGS)):
        for file in files:
            for section, key, value in _values(model, yaml.safe_load(file.read_text())):
                text = _flow(value)
                if len(text) <= _LONGEST:
                    found.setdefault((section, key), text)
    return found


def _values(model: type[BaseModel], data: Any) -> Iterator[tuple[type[BaseModel], str, Any]]:
    """Yield each section's keys with their values, those of sections inside it too."""
    if not isinstance(data, dict):
        return
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key not in data:
            continue
        value, models = data[key], list(models_in(field.annotation))
        yield model, key, value
        known = {each.alias or inner for section in models for inner, each in section.model_fields.items()}
        if isinstance(value, str) and value in known:
            yield from ((section, value, True) for section in models)
        sections = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and not set(value) & known:
            sections = list(value.values())
        for each in sections:
            for section in models:
                yield from _values(section, each)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def _flow(value: Any) -> str:
    """Return a value as YAML in one line. Long texts, such as hashes, are cut."""
    if isinstance(value, str) and len(value) > _LONGEST:
        value = value[:12] + "..."
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

"""The generated reference pages say what the code says. `make golden` rewrites them."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from din_extproc.settings.catalog import CatalogFile
from din_extproc.settings.load import load
from din_extproc.settings.node import NodeSettings, NodeYaml, load_node
from din_extproc.settings.schema import DinYaml
from din_extproc.settings.settings import Settings
from din_extproc.southbound.engines import ENGINES
from tests.support.certificates import Authority
from tests.support.config_examples import CATALOGS, GATEWAYS, NODES, all_examples, models_in
from tests.support.engine_reference import SAMPLES, operations_page, parameters_page
from tests.support.reference import commands_page, configuration_page, metrics_page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docs" / "pages" / "reference"
PAGES = {
    "configuration.md": configuration_page,
    "cli.md": commands_page,
    "metrics.md": metrics_page,
    "parameters.md": parameters_page,
    "operations.md": operations_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    made = PAGES[name]()
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        (FOLDER / name).write_text(made)
    assert (FOLDER / name).read_text() == made


def test_the_reference_has_every_section_of_the_example():
    keys = set(re.findall(r"^\| `([a-z_0-9]+)` \|", (FOLDER / "configuration.md").read_text(), re.MULTILINE))
    sections = set(re.findall(r"^([a-z_]+):", (ROOT / "envoy" / "din.yaml").read_text(), re.MULTILINE))
    assert sections <= keys
    assert {"message_ms", "body_limit_mib", "on_error", "reached_at", "max_streams", "scheduler"} <= keys


def _keys(model: type[BaseModel], done: set[type[BaseModel]]) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the keys that hold values, of a section and those inside it."""
    done.add(model)
    for name, field in model.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner:
            yield model, field.alias or name
        for each in inner:
            if each not in done:
                yield from _keys(each, done)


def test_every_key_has_an_example():
    examples = all_examples()
    without = [
        f"{model.__name__}: {key}"
        for root in (DinYaml, NodeYaml, CatalogFile)
        for model, key in _keys(root, set())
        if (model, key) not in examples
    ]
    assert without == [], "give them a value in tests/golden/examples, then run: make golden"


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that the examples name."""
    authority = Authority(tmp_path)
    for name in ("din", "envoy"):
        authority.issue(name, "din.internal")
    for name, text in (
        ("node-tokens.yaml", "{}"),
        ("keys.yaml", "keys: []"),
        ("jwks.json", '{"keys": []}'),
        ("prices.yaml", "models: {}"),
        ("openai.key", "k"),
        ("node.token", "t"),
    ):
        (tmp_path / name).write_text(text + "\n")
    tokenizer = tmp_path / "tokenizers" / "m"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    (tmp_path / "audit.key").write_text("0" * 64)
    return tmp_path


@pytest.mark.parametrize("file", GATEWAYS, ids=lambda file: file.stem)
def test_the_examples_of_a_gateway_load(file, folder):
    shutil.copy(CATALOGS[file.name != "din.yaml"], folder / "models.json")
    shutil.copy(file, folder / "din.yaml")
    settings = load(folder / "din.yaml", {"AZURE_KEY": "k", "DIN_AUDIT_KEY": "1" * 64})
    assert isinstance(settings, Settings), str(settings)
    assert settings.warnings == ()


@pytest.mark.parametrize("file", NODES, ids=lambda file: file.stem)
def test_the_examples_of_a_node_load(file, folder):
    shutil.copy(CATALOGS[file.name != "node.din.yaml"], folder / "models.json")
    shutil.copy(file, folder / "node.yaml")
    settings = load_node(folder / "node.yaml", {})
    assert isinstance(settings, NodeSettings), str(settings)


def test_every_parameter_that_a_table_names_is_on_the_page():
    assert {name for engine in ENGINES.values() for name in engine.openai} <= set(SAMPLES)

"""Every code block of README and documentation is of a kind that a test checks; configurations load, inline ones name keys that exist."""

import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from din_extproc.domain.identity import NO_IDENTITIES
from din_extproc.domain.verdict import RefusalCode, error_body
from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.observe import instruments
from din_extproc.roles.configure.render import render_envoy
from din_extproc.schedule.pick import STRATEGIES
from din_extproc.settings.load import load
from din_extproc.settings.node import NodeYaml
from din_extproc.settings.schema import DinYaml
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explain import explain
from din_extproc.tools.simulate.workload import WorkloadYaml
from tests.deploy.shipped import ROOT
from tests.support.certificates import Authority
from tests.support.config_examples import models_in
from tests.support.pages import EXECUTED, PAGES, TEXTS, Block, all_blocks

GENERATED = {"reference/configuration", "reference/cli", "reference/metrics", "reference/parameters", "reference/operations"}
_FILES = ("din-ca.pem", "din.pem", "din.key", "nodes-ca.pem", "envoy.pem", "envoy.key")
ELSEWHERE = {
    "accept: application/problem+json",
    "authorization: Bearer",
    "event: error",
    "instances: [{model, version, max_concurrency}]",
    "jwks.file",
    "response.failed",
    "temperature: 0",
}
"""Inline code that looks like configuration and is of HTTP, of streams or of request bodies."""


@pytest.fixture
def folder(tmp_path):
    """A folder with the shipped catalogue and the files that blocks name."""
    (tmp_path / "models.json").write_text((ROOT / "envoy" / "models.json").read_text())
    authority = Authority(tmp_path, "nodes-ca")
    for name in ("din", "envoy"):
        authority.issue(name, "din.internal")
    (tmp_path / "din-ca.pem").write_bytes(authority.file.read_bytes())
    Authority(tmp_path, "workloads-ca").issue("listener", "din.internal")
    for name, text in (("node-tokens.yaml", "{}"), ("keys.yaml", "keys: []"), ("jwks.json", '{"keys": []}')):
        (tmp_path / name).write_text(text)
    return tmp_path


def check_gateway(data: dict[str, Any], folder: Any) -> None:
    """Load a `din.yaml`; a part of one replaces or extends the same sections of the shipped example."""
    if "version" not in data:
        whole = yaml.safe_load((ROOT / "envoy" / "din.yaml").read_text())
        for name, section in data.items():
            before = whole.get(name)
            whole[name] = {**before, **section} if isinstance(before, dict) else section + before if isinstance(before, list) else section
        data = whole
    (folder / "din.yaml").write_text(yaml.safe_dump(data).replace("sha256$...", _hash()))
    settings = load(folder / "din.yaml", {})
    assert isinstance(settings, Settings), str(settings)
    if settings.identity != NO_IDENTITIES:
        binary = find_envoy()
        assert binary is not None
        assert find_config_error(render_envoy(settings), binary) is None


def _hash() -> str:
    [known, *_] = re.findall(r"sha256\$\w{32}\$\w{64}", (ROOT / "envoy" / "din.yaml").read_text())
    return known


def check_yaml(block: Block, folder: Any) -> None:
    """Load a block of YAML as what its keys say that it is."""
    data = yaml.safe_load(block.text)
    kinds = [
        model
        for model in (DinYaml, WorkloadYaml, NodeYaml)
        if set(data) <= {each.alias or name for name, each in model.model_fields.items()}
    ]
    assert kinds, f"{block.page}: no configuration has all of {sorted(data)}"
    if kinds[0] is DinYaml:
        check_gateway(data, folder)
    else:
        TypeAdapter(kinds[0]).validate_python(data)


def check_json(block: Block, folder: Any) -> None:
    """Compare an error body with one that the gateway makes; explain a request under the page's first configuration."""
    example = json.loads(block.text)
    if "body" in example:
        check_yaml(next(each for each in all_blocks() if each.page == block.page and each.language == "yaml"), folder)
        settings = load(folder / "din.yaml", {})
        assert isinstance(settings, Settings), str(settings)
        assert explain(settings, "", block.text.encode()).sent
        return
    [code] = [each for each in RefusalCode if each.code == example["code"]]
    made = json.loads(error_body(code, "...", trace_id="...", instance=example["instance"], param=example["error"]["param"]))
    assert made | {"detail": "...", "trace_id": "..."} == example | {"error": {**example["error"], "message": made["error"]["message"]}}


def check_drawing(block: Block, _folder: Any) -> None:
    """Refuse commands and configuration without a language."""
    assert set(block.text) & set("▶│└▼"), f"{block.page}: a block without a language is a drawing"


CHECKERS: Mapping[str, Callable[[Block, Any], None]] = {"yaml": check_yaml, "json": check_json, "": check_drawing}


@pytest.mark.parametrize("block", all_blocks(), ids=lambda block: f"{block.page}-{block.language}")
def test_every_code_block_is_of_a_kind_that_is_checked(block, folder):
    assert block.language in EXECUTED | CHECKERS.keys(), f"{block.page}: nothing checks blocks of {block.language!r}"
    if block.language in CHECKERS:
        CHECKERS[block.language](block, folder)


def _fields(model: type[BaseModel], path: str, within: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the annotated type of every key."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}"
        yield here, typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for inner in models_in(field.annotation):
            if inner not in within:
                yield from _fields(inner, here, (*within, inner))


FIELDS = [each for model in (DinYaml, NodeYaml, WorkloadYaml) for each in _fields(model, "", (model,))]
OPTIONS = {"name", "option"} | {name for strategy in STRATEGIES.values() for name in strategy.options.__struct_fields__}
"""Keys of a scheduler with options; "option" stands for any."""
OTHERS = {each.name for each in instruments.ALL} | ELSEWHERE


def inline_configuration() -> list[tuple[str, str]]:
    """Return (page, code) of what running text shows as a dotted key or as `key: value`."""
    written = {
        page: re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL) for page, text in TEXTS.items() if page not in GENERATED
    }
    spans = [(page, " ".join(span.split())) for page, text in written.items() for span in re.findall(r"`([^`]+)`", text)]
    return [(page, span) for page, span in spans if re.match(r"[a-z_][a-z_0-9.]*: |[a-z_]+(?:\.[a-z_]+)+$", span)]


def wrong_key(path: str, value: Any) -> str:
    """Return what is wrong with a key and its value; names in capitals and values left out stand for any."""
    types = [annotation for known, annotation in FIELDS if known.endswith(f".{path}")]
    if not types:
        return "" if path in OPTIONS else f"no key {path}"
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return "".join(wrong_key(path, each) for each in value)
    if path == "scheduler" and isinstance(value, dict):
        return "".join(f"no option {each}" for each in value.keys() - OPTIONS)
    if isinstance(value, dict) and any(list(models_in(annotation)) for annotation in types):
        return "".join(wrong_key(inner, each) for inner, each in value.items() if not inner.isupper())
    text = json.dumps(value)
    if value is None or re.search(r'"[A-Z]+"|\.\.\.', text) or any(_fits(annotation, value) for annotation in types):
        return ""
    return f"{path} can't be {text}"


def _fits(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("page", "span"), inline_configuration())
def test_configuration_in_running_text_names_keys_that_exist(page, span):
    if (
        span in OTHERS
        or (ROOT / "envoy" / span).exists()
        or (ROOT / "envoy" / "lua" / span).exists()
        or span.endswith((".yaml", ".py", ".md", ".example.com"))
    ):
        return
    key, value = next(iter(yaml.safe_load(span).items())) if ": " in span else (span, None)
    assert wrong_key(key, value) == "", page


def test_the_pages_are_those_of_the_folder():
    assert set(TEXTS) == {"README"} | {str(page.relative_to(PAGES).with_suffix("")) for page in PAGES.rglob("*.md")}

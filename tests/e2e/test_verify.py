"""`din-extproc verify` against a deployment that is right, and against three that are wrong in one place each."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from din_extproc.domain.request import POOLING, TRANSCRIBING
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.verify.verify import VerifyOptions, VerifyRefused
from din_extproc.tools.verify.verify import verify as walk
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e
GENERATING = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
}
TEXT = {"operations": "generate"}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    options = {"max_model_len": 32768, "decode_rate": 2000.0, "prefill_rate": 1e6, "max_num_seqs": 256, "kv_tokens": 10_000_000}
    sims = {name: EngineSim(model=model, **options) for name, model in {"fast-a": "small", "fast-b": "small", "deep": "large"}.items()}
    sims["embed"] = EngineSim(model="embedder", runner="pooling", dimensions=8)
    with together(sims) as running:
        yield running


def config(engines: dict[str, EngineSim]) -> dict[str, Any]:
    def at(name: str, **fields: Any) -> dict[str, Any]:
        return node(name, engines[name].address, **fields)

    return {
        "aliases": {"m": {"model": "small"}, "auto": {"models": ["small", "large"]}},
        "pools": {
            "fast": {"model": "small", "engine": "vllm", "scheduler": "round_robin", **TEXT, "nodes": [at("fast-a"), at("fast-b")]},
            "deep": {"model": "large", "engine": "vllm", **TEXT, "nodes": [at("deep", max_seq_len=32768, version="2026.1.0")]},
            "embed": {"model": "embedder", "engine": "vllm", "operations": ["/v1/embeddings"], "nodes": [at("embed")]},
        },
        "rules": [
            {"id": "light", "when": {"any": [{"header": {"x-task-tier": "extraction"}}, {"stream": True}]}, "pool": "fast"},
            {"id": "long", "when": {"all": [{"estimated_tokens": {"gt": 4000}}, {"priority": ["standard"]}]}, "pool": "deep"},
            {"id": "vectors", "when": {"path": "/v1/embeddings"}, "pool": "embed"},
        ],
        "tenants": [tenant("acme"), tenant("other", models=("large",))],
    }


@pytest.fixture(scope="module")
def stack(engines: dict[str, EngineSim]) -> Iterator[Stack]:
    with Stack(config(engines)) as running:
        yield running


def verify(stack: Stack, file: Path | None = None, key: str = "acme", **options: int) -> tuple[int, dict[str, Any]]:
    settings = load(file or stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    verified = walk(settings, VerifyOptions(stack.url, key_of(key), **options))
    return int(not verified.sound), msgspec.to_builtins(verified)


def changed(stack: Stack, tmp_path: Path, change) -> Path:
    """The deployment's configuration, changed: as if the deployment were otherwise than it should be."""
    content = copy.deepcopy(yaml.safe_load(stack.config_file.read_text()))
    change(content)
    file = tmp_path / "din.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def wrong(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in report["entries"] if entry["verdict"] not in ("ok", "no request")]


def test_every_entry_of_a_sound_deployment_is_ok(stack: Stack) -> None:
    code, report = verify(stack)
    assert not wrong(report)
    assert code == 0
    asked = [(entry["name"], entry["rule"], entry["pool"]) for entry in report["entries"] if entry["verdict"] == "ok"]
    assert {("m", "light", "fast"), ("m", "", "fast"), ("auto", "light", "fast"), ("auto", "long", "deep")} <= set(asked)
    assert ("embedder", "vectors", "embed") in asked
    light = next(entry for entry in report["entries"] if (entry["name"], entry["rule"]) == ("m", "light"))
    assert {each["node"] for each in light["answered"]} == {"fast-a", "fast-b"}
    assert {entry["operation"] for entry in report["entries"] if entry["pool"] == "deep" and not entry.get("why")} == GENERATING
    never = [entry for entry in report["entries"] if entry["verdict"] == "no request"]
    assert never
    assert all(entry["why"] for entry in never)


def test_only_what_the_tenant_may_use_is_walked(stack: Stack) -> None:
    code, report = verify(stack, key="other")
    assert code == 0
    assert {entry["name"] for entry in report["entries"]} == {"auto", "large"}


def test_an_entry_longer_than_wanted_is_named_and_makes_the_answer_a_no(stack: Stack) -> None:
    code, report = verify(stack, longest=1000)
    assert code == 1
    long = next(entry for entry in report["entries"] if (entry["name"], entry["rule"]) == ("auto", "long"))
    assert long["verdict"] == "not asked"
    assert "longer than the 1000" in long["why"]


def test_an_operation_that_the_engine_does_not_have_is_found(stack: Stack, tmp_path: Path) -> None:
    code, report = verify(stack, changed(stack, tmp_path, lambda content: content["pools"]["deep"].pop("operations")), key="other")
    assert code == 1
    assert {entry["operation"] for entry in wrong(report)} == POOLING | TRANSCRIBING


def test_what_no_request_can_be_made_for_is_named_and_makes_the_answer_a_no(stack: Stack, tmp_path: Path) -> None:
    rule = {"id": "at-night", "when": {"cel": 'headers["x-mood"] == "dark"'}, "pool": "deep"}
    code, report = verify(stack, changed(stack, tmp_path, lambda content: content["rules"].insert(0, rule)), key="other")
    assert code == 1
    missed = [entry for entry in report["entries"] if entry["verdict"] == "not asked"]
    assert {entry["rule"] for entry in missed} == {"at-night"}
    assert all("no request could be made that meets its condition" in entry["why"] for entry in missed)


def test_a_request_that_the_tenants_limits_never_allow_is_named_and_makes_the_answer_a_no(engines: dict[str, EngineSim]) -> None:
    with Stack({**config(engines), "tenants": [tenant("acme", tpm=2000)]}) as small:
        code, report = verify(small)
    assert code == 1
    missed = [entry for entry in report["entries"] if entry["verdict"] == "not asked"]
    assert {entry["rule"] for entry in missed} >= {"long"}
    assert all("the tenant's limits refuse it" in entry["why"] for entry in missed)


def test_a_relabelled_node_is_found(stack: Stack, tmp_path: Path) -> None:
    def relabel(content: dict[str, Any]) -> None:
        content["pools"]["deep"]["nodes"][0]["id"] = "deeper"
        content["pools"]["fast"]["nodes"][0]["version"] = "2024.1.0"

    code, report = verify(stack, changed(stack, tmp_path, relabel))
    assert code == 1
    problems = {(entry["pool"], problem) for entry in wrong(report) for problem in entry["problems"]}
    assert ("deep", "deep answered, which is no node of the pool that can take it: deeper") in problems
    assert ("fast", "fast-a answered as version 2025.3.1, configured is 2024.1.0") in problems


def test_an_alias_that_points_elsewhere_is_found(stack: Stack, tmp_path: Path) -> None:
    code, report = verify(stack, changed(stack, tmp_path, lambda content: content["aliases"].update(m={"model": "large"})))
    assert code == 1
    assert {entry["name"] for entry in wrong(report)} == {"m"}
    assert any("which is no node of the pool" in problem for entry in wrong(report) for problem in entry["problems"])


def test_a_header_that_envoy_strips_is_found(stack: Stack, tmp_path: Path) -> None:
    rendered = yaml.safe_load((stack.folder / "envoy.yaml").read_text())
    text = yaml.safe_dump(rendered).replace("x-din-exec-time-ms", "x-something-else")
    assert "x-something-else" in text
    kept = (stack.folder / "envoy.yaml").read_text()
    stack.envoy.terminate()
    stack.envoy.wait(10)
    try:
        stack.start_envoy(text)
        code, report = verify(stack, key="other")
        assert code == 1
        assert {problem for entry in wrong(report) for problem in entry["problems"]} == {"the answer has no x-din-exec-time-ms"}
    finally:
        stack.envoy.terminate()
        stack.envoy.wait(10)
        stack.start_envoy(kept)


def test_on_the_command_line_the_exit_code_is_the_answer(stack: Stack) -> None:
    command = [sys.executable, "-m", "din_extproc", "verify", "-c", stack.config_file, "--url", stack.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=os.environ | {"DIN_KEY": key_of("other")})
    assert done.returncode == 0, done.stderr
    assert "ok          large -> long -> deep (/v1/chat/completions, " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{len(done.stdout.splitlines()) - 1} entries of other at {stack.url}: ")


def test_a_key_of_nobody_is_a_clear_no(stack: Stack) -> None:
    settings = load(stack.config_file, {})
    with pytest.raises(VerifyRefused, match="The API key is not valid"):
        walk(settings, VerifyOptions(stack.url, "din_x_y"))


def test_a_gateway_that_is_not_there_makes_every_entry_unreachable(stack: Stack) -> None:
    verified = walk(load(stack.config_file, {}), VerifyOptions("http://127.0.0.1:9", key_of("other")))
    assert not verified.sound
    assert {entry.verdict for entry in verified.entries} == {"unreachable", "no request"}
    assert any(line.startswith("unreachable auto -> long -> deep") for line in verified.lines())


def test_a_rule_on_the_clients_deadline_routes_and_is_walked(engines: dict[str, EngineSim]) -> None:
    pools = {
        name: {"model": "small", "engine": "vllm", **TEXT, "nodes": [node(each, engines[each].address)]}
        for name, each in (("quick", "fast-a"), ("patient", "fast-b"))
    }
    rules = [{"id": "urgent", "when": {"timeout_ms": {"le": 20_000}}, "pool": "quick"}, {"id": "rest", "when": "always", "pool": "patient"}]
    with Stack({"pools": pools, "rules": rules, "tenants": [tenant("acme")]}) as stack:
        answered = [stack.chat(model="small", headers=headers).headers["x-din-node-id"] for headers in ({"x-din-timeout-ms": "15000"}, {})]
        assert answered == ["fast-a", "fast-b"]
        code, report = verify(stack)
        assert code == 0, wrong(report)
        assert {entry["rule"] for entry in report["entries"] if entry["verdict"] == "ok"} == {"urgent", "rest"}

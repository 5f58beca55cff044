"""Every command of README and documentation, executed; `test_demo.py` runs README's tour. Those that reach outside stay on this machine."""

import contextlib
import hashlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from din_extproc.audit.chain import sign_entry
from din_extproc.audit.records import SettlementRecord
from din_extproc.audit.report import make_segment_name
from din_extproc.cli.app import app
from tests.bench.__main__ import BENCHMARKS
from tests.support.node_stack import RegistryThread
from tests.support.pages import EXECUTED, ROOT, TEXTS, Console, all_blocks, code_blocks, shell_blocks
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, events, key_of, node, tenant

pytestmark = pytest.mark.e2e

BLOCKS = shell_blocks()
RUN_HERE = {
    "README",
    "start/demo", "start/own-envoy", "start/first-tenant", "start/node-joins", "howto/size-a-pool", "howto/deploy", "howto/upgrade",
    "start/istio", "start/envoy-gateway", "start/cloud-overflow",
}  # fmt: skip


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2) as reply:
        return reply.status == 200
    return False


def test_no_block_of_commands_is_left_out():
    found = {(block.page, block.language) for block in all_blocks() if block.language in EXECUTED}
    assert found == {(page, "sh") for page in RUN_HERE} | {("howto/python-client", "python"), ("README", "console")}


PATHS = {
    "keys new",
    "keys rotate",
    "keys revoke",
    "keys list",
    "keys node",
    "render envoy",
    "render istio",
    "render envoy-gateway",
    "render ext-authz",
    "render monitoring",
    "render node",
    "bench baseline",
    "bench split",
    "bench history",
    "audit verify",
}
"""Commands of two words that the text also names without the program's own name."""


def named_in_the_text() -> list[list[str]]:
    """Return every command in running text or tables, as its words."""
    text = "\n".join(text for page, text in TEXTS.items() if page != "reference/cli")
    running = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running)]
    spans += [f"{before} {after}" for before, after in re.findall(r"`([a-z-]+ [^`]+)`[^`|]*\(`(--[a-z-]+)`", running)]
    return [words for span in spans for words in [span.split()] if words[0] in KINDS or " ".join(words[:2]) in PATHS]


def of_the_program(words: list[str]) -> str:
    command = typer.main.get_command(app)
    rest = words[1:] if words[0] == "din-extproc" else words
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return ", ".join(f"no option {word}" for word in rest if word.startswith("-") and word not in options)


def of_make(words: list[str]) -> str:
    known = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return "" if words[1] in known else f"no target {words[1]}"


def of_python(words: list[str]) -> str:
    if words[2] == "tests.bench":
        return ", ".join(f"no benchmark {name}" for name in words[3:] if name not in {*BENCHMARKS, "claims"})
    return "" if (ROOT / f"{words[2].replace('.', '/')}.py").exists() else f"no module {words[2]}"


KINDS = {"din-extproc": of_the_program, "make": of_make, "python": of_python}


def test_every_command_in_the_running_text_is_there_with_its_options():
    named = named_in_the_text()
    assert len(named) > 40
    wrong = {" ".join(words): KINDS.get(words[0], of_the_program)(words) for words in named}
    assert {command: why for command, why in wrong.items() if why} == {}


def test_the_example_of_the_client(engine):
    [example] = code_blocks("howto/python-client", "python")
    pools = {"p": {"model": "qwen2.5-14b-instruct", "engine": "vllm", "nodes": [node("gpu-07", engine.address)]}}
    aliases = {"bx-fast-chat": {"model": "qwen2.5-14b-instruct"}}
    outputs: list[tuple[object, ...]] = []
    with Stack({"aliases": aliases, "pools": pools, "tenants": [tenant("acme")]}) as stack:
        example = example.replace('"http://localhost:10000"', repr(stack.url)).replace("[...]", '[{"role": "user", "content": "hello"}]')
        names = {"key": key_of("acme"), "print": lambda *words: outputs.append(words)}
        exec(compile(example, "python-client.md", "exec"), names)
    [(node_id, trace, *times)] = outputs
    assert (node_id, len(trace)) == ("gpu-07", 32)
    assert names["text"]
    assert all(time_ms is not None for time_ms in times)


@pytest.mark.parametrize("page", ["README", "start/demo"])
def test_the_make_targets_of_a_first_visit(page):
    with Console({}) as console:
        for command in BLOCKS[page][0]:
            assert console.run(command)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="qwen2.5-14b-instruct", decode_rate=5000.0) as running:
        yield running


def running_here(page: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return a page's din.yaml for free ports, the words that commands need instead, and what it says."""
    [example] = code_blocks(page, "yaml")
    ports = {name: str(free_port()) for name in ("6379", "8000", "8001", "8002", "50051", "10000")}
    instead = {f"{before}{port}": f"{before}{free}" for port, free in ports.items() for before in ("--port ", "127.0.0.1:", "localhost:")}
    for before, after in instead.items():
        example = re.sub(rf"{re.escape(before)}\b", after, example)
    config = yaml.safe_load(example)
    config["gateway"] |= {name: {"address": f"127.0.0.1:{free_port()}"} for name in ("access_log", "admin")}
    config["envoy"] = {"listener": f"127.0.0.1:{ports['10000']}", "admin": f"127.0.0.1:{free_port()}"}
    config["store"] = {"url": f"redis://127.0.0.1:{ports['6379']}"}
    return yaml.safe_dump(config), instead, config


def test_from_the_clone_to_the_first_streamed_answer_and_an_upgrade():
    config, instead, _ = running_here("start/own-envoy")
    [install, configure, run, [wait, ask]] = BLOCKS["start/own-envoy"]
    with Console(instead | {"/var/lib/din/audit": "audit"}) as console:
        (console.folder / "din.yaml").write_text(config)
        outputs = {command.split("#")[0].strip(): console.run(command) for command in (*install, *configure, *run)}
        assert "sound" in outputs["din-extproc check din.yaml"]
        console.run(wait)
        answer = console.run(ask)
        assert answer.rstrip().endswith("data: [DONE]"), answer
        assert len(events(answer)) > 2
        [key] = yaml.safe_load((console.folder / "keys.yaml").read_text())["keys"]
        routed = {"pool": "chat", "rule": "", "asked_for": "bx-fast-chat", "alias": "bx-fast-chat"}
        write_audit_log(console.folder / "audit", tenant="team-a", key_id=key["id"], **routed)
        for command in [each for block in BLOCKS["howto/upgrade"] for each in block]:
            console.run(command)


def test_two_nodes_on_this_machine_and_the_one_that_is_left():
    text, instead, config = running_here("start/first-tenant")
    [commands] = BLOCKS["start/first-tenant"]
    with Console(instead) as console:
        (console.folder / "din.yaml").write_text(text)
        *prepare, ask = commands
        for command in prepare:
            for part in command.split(" && "):
                console.run(part)
        console.eventually(lambda: answers(f"http://{config['envoy']['admin']}/ready"))
        console.eventually(lambda: answers(f"http://{config['gateway']['admin']['address']}/readyz"))
        console.eventually(lambda: "x-din-node-id: one" in console.run(ask))
        console.end("engine-sim", instead["--port 8001"].split()[1])
        answer = console.run(ask)
    assert "x-din-node-id: two" in answer
    assert "x-bxagent-degraded: true" in answer


def test_nodes_that_register_with_curl(tmp_path):
    [_, _, commands] = BLOCKS["start/node-joins"]
    with Console({}) as console:
        made = console.run(commands[0])
    token, line = re.findall(r"(din\w*_\S+)|^(gpu-7: .*)$", made, re.MULTILINE)
    tokens = tmp_path / "node-tokens.yaml"
    tokens.write_text(line[1] + "\n")
    digest = hashlib.sha256(b"weights").hexdigest()
    entry = {"model_name": "qwen2.5-14b-instruct", "model_version": "2025.3.1", "dtype": "bf16", "max_seq_len": 32768, "sha256": digest}
    (tmp_path / "models.json").write_text(json.dumps({"models": [entry]}))
    registry = {"address": f"127.0.0.1:{free_port()}", "http_address": f"127.0.0.1:{free_port()}", "node_tokens_file": str(tokens)}
    config = {
        "catalog": {"source": str(tmp_path / "models.json")},
        "pools": {"p": {"model": "qwen2.5-14b-instruct", "engine": "vllm", "dtype": "bf16"}},
        "tenants": [tenant("acme")],
    }
    stack = Stack(config, gateway={"registry": registry})
    try:
        stack.redis.start()
        stack.start_sidecar()
        instead = {"http://gateway:50061": f"http://{registry['http_address']}", "9f86d0...": digest, "curl": "curl -sS --fail-with-body"}
        with Console(instead, TOKEN=token[0]) as console:
            lease = json.loads(console.run(commands[1]))["lease"]
            responses = [json.loads(console.run(command.replace("5c1d...", lease)) or "{}") for command in commands[2:]]
        assert len(responses) == 3
        assert stack.log("sidecar").count("gpu-7") >= 2
    finally:
        stack.stop()


def test_a_node_s_agent_and_the_sum_of_its_weights(engine, tmp_path):
    [agent, [make_sums, sum_of_sums], _] = BLOCKS["start/node-joins"]
    health, listener, admin = free_port(), free_port(), free_port()
    with RegistryThread() as registry, Console({}) as console:
        example = yaml.safe_load((ROOT / "envoy" / "node.din.yaml").read_text())
        example["engine"]["address"] = engine.address
        example["registry"] = {"addresses": [registry.url], "heartbeat_s": 1}
        example["health"]["address"] = f"127.0.0.1:{health}"
        example["node"]["address"] = f"127.0.0.1:{listener}"
        socket = str(console.folder / "node.sock")
        example["proxy"] |= {"listener": f"127.0.0.1:{listener}", "admin": f"127.0.0.1:{admin}", "ext_proc": {"socket": socket}}
        (console.folder / "envoy").mkdir()
        (console.folder / "envoy" / "node.din.yaml").write_text(yaml.safe_dump(example))
        (console.folder / "models.json").write_text((ROOT / "envoy" / "models.json").read_text())
        for command in agent:
            for part in command.split("#")[0].split("&& "):
                console.run(part)
        console.eventually(lambda: answers(f"http://127.0.0.1:{health}/health") and answers(f"http://127.0.0.1:{admin}/ready"))
        console.eventually(lambda: bool(registry.registrations))
    assert registry.registrations[0]["id"] == "gpu-07"
    assert folder_sum(tmp_path, make_sums, sum_of_sums) == hashlib.sha256((tmp_path / "SHA256SUMS").read_bytes()).hexdigest()


def folder_sum(folder: Path, make_sums: str, sum_of_sums: str) -> str:
    (folder / "sub").mkdir()
    for name in ("b.bin", "a b.json", "sub/c", ".hidden"):
        (folder / name).write_text(name)
    with Console({}) as console:
        for name in (each.name for each in folder.iterdir()):
            (console.folder / name).symlink_to(folder / name)
        console.run(f"cd {folder}; {make_sums}")
        return console.run(f"cd {folder}; {sum_of_sums}").split()[0]


def write_audit_log(folder: Path, **routed: str) -> None:
    """Write the log of one request."""
    asked = {"operation": "/v1/chat/completions", "prompt_estimate": 100, "duration_ms": 500.0}
    known = {"outcome": "completed", "status": 200, "model": "qwen2.5-14b-instruct"}
    settled = SettlementRecord(
        at=1_800_000_000.0, request_id="r", trace_id="t", prompt_tokens=100, completion_tokens=20, **routed, **known, **asked
    )
    folder.mkdir()
    (folder / make_segment_name("gw", 1)).write_bytes(sign_entry(b"s" * 32, b"\0" * 32, 1, settled)[0])


def test_simulate():
    [example] = code_blocks("howto/size-a-pool", "yaml")
    small = yaml.safe_load(example) | {"seconds": 30, "failures": [], "slo": {}}
    small["requests"][0]["rate"] = 1
    with Console({"/var/lib/din/audit": "audit"}) as console:
        for name in ("din.yaml", "new.yaml"):
            (console.folder / name).write_text((ROOT / "envoy" / "din.yaml").read_text())
        (console.folder / "models.json").write_text((ROOT / "envoy" / "models.json").read_text())
        (console.folder / "workload.yaml").write_text(yaml.safe_dump(small))
        write_audit_log(
            console.folder / "audit", tenant="finance", key_id="fin-2026-11", pool="p", rule="", asked_for="bx-auto", alias="bx-auto"
        )
        outputs = [console.run(command) for command in BLOCKS["howto/size-a-pool"][0]]
    assert "| cluster-fast-throughput-14b | 4 |" in outputs[0]
    assert all("requests/s" in each for each in outputs)
    assert "nodes of cluster-fast-throughput-14b are enough" in outputs[4]


def test_deploy():
    with Console({}) as console:
        (console.folder / "deploy").symlink_to(ROOT / "deploy")
        assert [console.run(command) for command in BLOCKS["howto/deploy"][0]]


def test_the_secret_of_the_credentials():
    with Console({}) as console:
        [[command]] = BLOCKS["start/cloud-overflow"]
        assert console.run(command) == "secret/din-credentials created\n"


@pytest.mark.parametrize("page", ["start/istio", "start/envoy-gateway"])
def test_a_mesh(page):
    [part] = code_blocks(page, "yaml")
    config = yaml.safe_load((ROOT / "envoy" / "din.yaml").read_text())
    config["gateway"] |= yaml.safe_load(part)["gateway"]
    with Console({}) as console:
        (console.folder / "deploy").symlink_to(ROOT / "deploy")
        (console.folder / "din.yaml").write_text(yaml.safe_dump(config))
        (console.folder / "models.json").write_text((ROOT / "envoy" / "models.json").read_text())
        for command in BLOCKS[page][0]:
            console.run(command)
        assert (console.folder / f"{page.removeprefix('start/')}.yaml").read_text().count("apiVersion") > 2

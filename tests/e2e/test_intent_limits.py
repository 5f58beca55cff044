"""Rules on what the client allows, its deadline and its budgets: the local pool and its queue, or another pool."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e
TEXT = {"operations": "generate"}
RULES = [
    {"id": "frugal", "when": {"budget_tokens": {"le": 300}}, "pool": "small"},
    {"id": "urgent", "when": {"timeout_ms": {"lt": 5000}, "cel": "budget_cost >= 0.01"}, "pool": "quick"},
    {"id": "rest", "when": "always", "pool": "local"},
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with together({name: EngineSim(model="m") for name in ("small", "quick", "local")}) as engines:
        pools = {name: {"model": "m", "engine": "vllm", **TEXT, "nodes": [node(name, sim.address)]} for name, sim in engines.items()}
        audit = {"folder": "audit", "replica": "gw", "keys": {"k": {"file": "audit.key"}}, "flush_ms": 20}
        running = Stack({})
        (running.folder / "audit.key").write_text("an audit key of these tests, long enough")
        running.write({"pools": pools, "rules": RULES, "tenants": [tenant("acme")], "audit": audit})
        with running:
            yield running


def served_by(stack: Stack, **limits: str) -> str:
    reply = stack.chat(headers={f"x-din-{name.replace('_', '-')}": value for name, value in limits.items()})
    assert reply.status_code == 200, reply.text
    return reply.headers["x-din-node-id"]


def command(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "din_extproc", *arguments, "-c", str(stack.config_file)]
    return subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)


def test_the_pool_depends_on_deadline_and_budgets(stack):
    assert served_by(stack) == "local"
    assert served_by(stack, budget_tokens="300") == "small"
    assert served_by(stack, budget_tokens="301") == "local"
    assert served_by(stack, timeout_ms="4000", budget_cost="0.05") == "quick"
    assert served_by(stack, timeout_ms="4000", budget_cost="0.001") == "local", "too urgent, but not worth it"
    assert served_by(stack, budget_cost="0.05") == "local"
    refused = stack.chat(headers={"x-din-budget-cost": "much"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-din-budget-cost")


def test_explain_replay_and_verify_know_them(stack):
    asked = {"headers": {"x-din-timeout-ms": "4000", "x-din-budget-cost": "0.05"}, "body": {"model": "m", "messages": [], "max_tokens": 9}}
    (stack.folder / "request.json").write_text(json.dumps(asked))
    result = command(stack, "explain", str(stack.folder / "request.json"), "--tenant", "acme")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "deadline in ms 4000, budget in money 0.05" in result.stdout
    assert "rule      - frugal -> small: it has no budget in tokens" in result.stdout
    assert "rule      * urgent -> quick" in result.stdout
    stack.all_accounted()
    stack.eventually(
        lambda: '"budget_cost":50000000' in "".join(file.read_text() for file in (stack.folder / "audit").glob("*.jsonl")), "it is recorded"
    )
    replayed = command(stack, "replay", str(stack.folder / "audit"), "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert json.loads(replayed.stdout)["changes"] == [], replayed.stdout
    verified = command(stack, "verify", "--url", stack.url, "--key", key_of("acme"), "--json")
    entries = json.loads(verified.stdout)["entries"]
    assert {entry["rule"] for entry in entries if entry["verdict"] == "ok"} >= {"frugal", "rest"}, verified.stdout

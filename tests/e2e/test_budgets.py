"""Budgets through the whole gateway: refusals that clients do not repeat, true headers, and sums that equal the audit log."""

import json
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest
import redis

from din_extproc.domain.price import UNITS, format_money
from din_extproc.domain.request import Operation
from din_extproc.tools.verify.sample_body import build_body, content_type
from tests.support.operating import Operator, admin_keys
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def config() -> Iterator[dict[str, Any]]:
    with EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) as sim:
        yield {
            "pools": {
                "pool": {"model": "m", "engine": "vllm", "operations": ["generate", "transcribe"], "nodes": [node("n1", sim.address)]}
            },
            "rules": [{"id": "all", "when": "always", "pool": "pool"}],
            "tenants": [tenant("hard"), tenant("soft"), tenant("free")],
            "prices": {"currency": "EUR", "models": {"m": {"input": 1, "output": 2, "request": 0.01, "audio_second": 0.5}}, "header": True},
            "budgets": {
                "time_zone": "Europe/Berlin",
                "limits": [
                    {"name": "hard-day", "tenant": "hard", "period": "day", "tokens": 1000},
                    {"name": "soft-month", "tenant": "soft", "period": "month", "money": 0.015, "soft": True},
                ],
            },
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k": {"value": "1" * 64}}},
            "health": {"breaker": False},
        }


@pytest.fixture(scope="module")
def stack(config) -> Iterator[Stack]:
    with Stack(config) as running:
        yield running


def ask(stack: Stack, name: str, tokens: int = 20) -> httpx.Response:
    body = {"model": "m", "max_tokens": tokens, "messages": [{"role": "user", "content": "How much is left?"}]}
    return httpx.post(f"{stack.url}{PATH}", json=body, headers={"authorization": f"Bearer {key_of(name)}"}, timeout=30)


def test_a_hard_budget_ends_in_a_429_that_no_client_repeats(stack):
    answers = [ask(stack, "hard", 200)]
    while answers[-1].status_code == 200:
        headers = answers[-1].headers
        assert (headers["x-ratelimit-limit-tokens"], int(headers["x-ratelimit-remaining-tokens"]) < 1000) == ("1000", True)
        answers.append(ask(stack, "hard", 200))
    refused = answers[-1]
    assert 4 <= len(answers) <= 30
    assert (refused.status_code, refused.json()["code"], refused.json()["error"]["type"]) == (429, "budget_exceeded", "insufficient_quota")
    assert (refused.headers["x-should-retry"], "retry-after" in refused.headers) == ("false", False)
    reset = datetime.strptime(refused.headers["x-din-budget-reset"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert 0 < (reset - datetime.now(UTC)).total_seconds() <= 25 * 3600
    assert refused.headers["x-din-budget-reset"] in refused.json()["detail"]
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key_of("hard"), max_retries=5)
    before = stack.status()["counts"]["refused"]["budget_exceeded"]
    with pytest.raises(openai.RateLimitError, match="hard-day"):
        client.chat.completions.create(model="m", max_tokens=200, messages=[{"role": "user", "content": "x"}])
    stack.settled(len(answers))
    assert stack.status()["counts"]["refused"]["budget_exceeded"] == before + 1


def test_a_whole_answer_names_its_cost_as_the_audit_log_does_and_a_stream_can_not(stack):
    whole = ask(stack, "free")
    used = whole.json()["usage"]
    assert whole.headers["x-din-cost"] == format_money(used["prompt_tokens"] * 1000 + used["completion_tokens"] * 2000 + UNITS // 100)

    def recorded() -> dict[str, int]:
        return {each["trace_id"]: each["cost"] for each in audited(stack, "settled")}

    trace = whole.headers["x-din-trace-id"]
    stack.eventually(lambda: trace in recorded(), "the answer is in the audit log")
    assert format_money(recorded()[trace]) == whole.headers["x-din-cost"]
    body = {"model": "m", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "How much?"}]}
    streamed = httpx.post(f"{stack.url}{PATH}", json=body, headers={"authorization": f"Bearer {key_of('free')}"}, timeout=30)
    assert (streamed.status_code, "x-din-cost" in streamed.headers) == (200, False)
    assert "data: [DONE]" in streamed.text


def test_a_transcription_costs_the_seconds_of_its_sound(stack):
    form = build_body(Operation.TRANSCRIPTIONS, "m", 3)
    headers = {"authorization": f"Bearer {key_of('free')}", "content-type": content_type(Operation.TRANSCRIPTIONS)}
    answer = httpx.post(f"{stack.url}{Operation.TRANSCRIPTIONS.value}", content=form, headers=headers, timeout=30)
    assert answer.json()["usage"] == {"type": "duration", "seconds": 1}

    def costs() -> list[int]:
        return [each["cost"] for each in audited(stack, "settled") if each["trace_id"] == answer.headers["x-din-trace-id"]]

    stack.eventually(lambda: costs() == [UNITS // 2 + UNITS // 100 + 10 * 1000], costs)


def test_a_soft_budget_lets_pass_and_says_so(stack):
    first, second = ask(stack, "soft"), ask(stack, "soft")
    assert [answer.status_code for answer in (first, second)] == [200, 200]
    assert "x-din-budget-exceeded" not in first.headers
    assert second.headers["x-din-budget-exceeded"] == "soft-month"
    assert ask(stack, "free").headers.get("x-din-budget-exceeded") is None


def test_what_is_spent_equals_the_audit_log_to_the_token(stack):
    ask(stack, "hard", 1)
    ask(stack, "soft")
    stack.all_accounted()
    for pair in (("hard", "hard-day"), ("soft", "soft-month")):
        stack.eventually(lambda pair=pair: recorded(stack, pair[0]) == spent(stack, *pair), lambda pair=pair: recorded(stack, pair[0]))
    assert recorded(stack, "soft")[1] > 0


@pytest.fixture
def operated(config) -> Iterator[Stack]:
    with Stack(config, admin_keys=admin_keys()) as running:
        yield running


def test_an_operator_looks_adds_and_resets_and_it_is_on_record(operated):
    stack = operated
    while ask(stack, "hard", 200).status_code == 200:
        pass
    operator = Operator(stack)
    report = operator.run("budgets", "--tenant", "hard", "--json")
    [row] = json.loads(report.stdout)["budgets"]
    assert (row["budget"], row["hard"], row["tokens"]["limit"], row["exceeded"]) == ("hard-day", True, 1000, True)
    assert "hard-day" in operator.run("budgets").stdout
    added = operator.run("budgets", "top-up", "hard-day", "--tokens", "5000", "--reason", "quarter end")
    assert (added.returncode, added.stdout.startswith("hard-day: ")) == (0, True), added.stderr
    assert ask(stack, "hard", 200).status_code == 200
    assert operator.run("budgets", "reset", "hard-day").returncode == 0
    missing = operator.run("budgets", "reset", "no-such")
    assert (missing.returncode, "no budget is called 'no-such'" in missing.stderr) == (1, True)
    assert Operator(stack, key="prometheus").run("budgets", "reset", "hard-day").returncode == 1
    stack.eventually(lambda: [each["order"] for each in audited(stack, "budget")] == ["top-up", "reset"], lambda: audited(stack, "budget"))
    assert [(each["operator"], each.get("reason", "")) for each in audited(stack, "budget")] == [("ops", "quarter end"), ("ops", "")]
    stack.eventually(lambda: 'din_budget_used_ratio{din_budget_name="hard-day"' in operator.get("/metrics").text, "the metric is there")
    assert 'din_cost_total{din_tenant_id="hard"' in operator.get("/metrics").text


def test_a_tenant_looks_at_its_own_limits_budgets_and_usage(stack):
    assert ask(stack, "soft").status_code == 200
    stack.all_accounted()

    def look(path: str, name: str | None = "soft") -> httpx.Response:
        with stack.client(name) as client:
            return client.get(path)

    stack.eventually(lambda: look("/v1/usage").json()["usage"], "the usage of today is there")
    report = look("/v1/usage?days=2").json()
    assert (report["object"], report["tenant"], report["key"]) == ("usage", "soft", "soft")
    [budget] = report["budgets"]
    assert (budget["budget"], budget["hard"], budget["currency"]) == ("soft-month", False, "EUR")
    assert {(row["key"], row["model"], row["currency"]) for row in report["usage"]} == {("soft", "m", "EUR")}
    assert report["limits"]["requests_per_minute"]["used"] >= 1
    assert look("/v1/usage?days=0").json()["code"] == "invalid_request"
    assert look("/v1/usage", None).status_code == 401
    with stack.client("soft") as client:
        assert client.post("/v1/usage", json={}).status_code == 405


def audited(stack: Stack, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind."""
    files = (stack.folder / "audit").glob("*-0*.jsonl")
    return [each for file in sorted(files) for line in file.read_text().splitlines() if (each := json.loads(line))["kind"] == kind]


def recorded(stack: Stack, name: str) -> tuple[int, int]:
    """Return the tokens and the cost of a tenant in the audit log."""
    settled = [line for line in audited(stack, "settled") if line["tenant"] == name]
    return sum(each["prompt_tokens"] + each["completion_tokens"] for each in settled), sum(each.get("cost", 0) for each in settled)


def spent(stack: Stack, name: str, budget: str) -> tuple[int, int]:
    """Return the tokens and the cost that the budget's counter holds."""
    with redis.Redis(port=stack.redis.port) as connection:
        numbers = struct.unpack(">14d", connection.get(f"din:{{t={name}}}:spend:budget:{budget}"))
    return int(numbers[8]), int(numbers[9])

"""Prompts near and beyond the context of nodes, through a real Envoy: where they go, and what a client sees when the estimate was off."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim, together
from tests.support.shipped_example import shipped_example
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
FAST = {"decode_rate": 5000.0, "prefill_rate": 1e7, "kv_tokens": 10_000_000}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together(
        {name: EngineSim(model="m", max_model_len=length, **FAST) for name, length in {"short": 4096, "long": 32768}.items()}
    ) as sims:
        yield sims


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    nodes = [node(name, sim.address, max_seq_len=sim.options["max_model_len"]) for name, sim in engines.items()]
    pool = {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}
    with Stack({"pools": {"p": pool}, "tenants": [tenant("acme")]}) as running:
        yield running


def ask(stack: Stack, content: str, **fields):
    return stack.chat(messages=[{"role": "user", "content": content}], max_tokens=4, **fields)


def test_an_underestimated_prompt_that_a_short_node_refuses_is_answered_by_a_longer_one(stack, engines):
    engines["short"].forget()
    replies = [ask(stack, "a " * 4200) for _ in range(8)]
    assert [reply.status_code for reply in replies] == [200] * 8, replies[0].text
    assert {reply.headers["x-din-node-id"] for reply in replies} == {"long"}
    status = stack.settled(8)
    assert status["breakers"]["nodes"] == {}, "a request that is too long speaks against no node"
    assert ask(stack, "hello").status_code == 200


def test_near_the_boundary_a_node_that_surely_fits_is_chosen_at_once(stack, engines):
    engines["short"].forget()
    replies = [ask(stack, "some words " * 2030) for _ in range(4)]
    assert {(reply.status_code, reply.headers["x-din-node-id"]) for reply in replies} == {(200, "long")}
    assert engines["short"].seen()[0].get("refused", 0) == 0


def test_a_request_that_no_node_can_hold_is_refused_with_the_reason(stack):
    reply = ask(stack, "word " * 60_000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_mistake_of_the_client_stays_its_own(stack):
    reply = ask(stack, "a " * 4200, temperature=-3)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    stack.eventually(lambda: stack.status()["exchanges"]["open"] == 0, "nothing is open")
    assert stack.status()["breakers"]["nodes"] == {}


def test_a_prompt_that_is_too_long_for_the_rules_pool_goes_to_the_fallback_before_dispatch():
    with shipped_example() as (example, fleet):
        body = {"model": "bx-auto", "messages": [{"role": "user", "content": "echo word " * 20_000}], "max_tokens": 4}
        file = example.folder / "long.json"
        with example.client() as client:
            request = client.build_request("POST", "/v1/chat/completions", json=body)
            file.write_bytes(request.content)
            replies = [client.post("/v1/chat/completions", json=body) for _ in range(5)]
        assert [reply.status_code for reply in replies] == [200] * 5, replies[0].text
        assert {reply.headers["x-din-node-id"] for reply in replies} <= {"gpu-21", "gpu-22"}
        assert {reply.headers["x-din-degraded-reason"] for reply in replies} == {"context_length_exceeded"}
        assert not fleet.members["gpu-11"].seen()[1], "the short pool was not asked"
        command = [sys.executable, "-m", "din_extproc", "explain", str(file), "--tenant", "acme", "-c", str(example.config_file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "context_length_exceeded" in result.stdout
        assert "cluster-standard-reasoning" in result.stdout

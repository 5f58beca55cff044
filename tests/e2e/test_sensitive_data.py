"""Sensitive data in prompts through a real Envoy: what reaches the node, the client and the log."""

import json

import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
SECRET = "alice@example.com"


@pytest.fixture(scope="module")
def engine():
    sim = EngineSim(model="m", max_model_len=2_000_000, decode_rate=2000.0, prefill_rate=1e8, kv_tokens=10_000_000)
    try:
        yield sim.start()
    finally:
        sim.stop()


@pytest.fixture(scope="module")
def stack(engine):
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address, max_seq_len=2_000_000)]}},
        "tenants": [
            {**tenant("acme"), "sensitive_data": "mask"},
            {**tenant("trial"), "sensitive_data": {"policy": "block", "kinds": ["email"]}},
            {**tenant("other"), "sensitive_data": "flag"},
        ],
    }
    with Stack(config) as running:
        yield running


def sent(stack, engine, who, body: bytes):
    engine.forget()
    with stack.client(who) as client:
        reply = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    return reply, [request["body"] for request in engine.seen()[1]]


def body(text: str) -> bytes:
    return b'{"model":"m", "max_tokens":3,"x_vendor":1.50,"messages":[{"role":"user","content":"%b"}]}' % text.encode()


@pytest.mark.parametrize("written", [SECRET, SECRET.replace("@", "\\u0040"), "caf\\u00e9\\n" + SECRET])
def test_masked_the_node_gets_the_client_s_bytes_with_a_mark_in_the_data_s_place(stack, engine, written):
    reply, (got,) = sent(stack, engine, "acme", body(f"你好 {written}, answer"))
    assert reply.status_code == 200, reply.text
    mark = written.replace(SECRET, "[EMAIL]").replace(SECRET.replace("@", "\\u0040"), "[EMAIL]")
    assert got == body(f"你好 {mark}, answer")


def test_a_megabyte_is_masked_at_its_end(stack, engine):
    reply, (got,) = sent(stack, engine, "acme", body("word " * 5_000 + "x" * 1_000_000 + " " + SECRET))
    assert reply.status_code == 200, reply.text
    assert got.endswith(b'[EMAIL]"}]}')


def test_blocked_the_node_gets_nothing_and_neither_answer_nor_log_repeat_the_data(stack, engine):
    reply, got = sent(stack, engine, "trial", body(f"to {SECRET}"))
    assert (reply.status_code, reply.json()["code"], got) == (400, "sensitive_data_blocked", [])
    assert "email" in reply.json()["detail"]
    assert "alice" not in reply.text + json.dumps(dict(reply.headers)) + stack.log("sidecar")
    stack.eventually(lambda: stack.status()["counts"]["refused"].get("sensitive_data_blocked") == 1, "the refusal is counted")


def test_flagged_it_passes_untouched_and_is_counted_by_kind(stack, engine):
    _, (got,) = sent(stack, engine, "other", body(f"to {SECRET}"))
    assert got == body(f"to {SECRET}")
    stack.eventually(lambda: stack.status()["counts"]["sensitive"].get("flag", {}).get("email") == 1, "the finding is counted")
    counted = stack.status()["counts"]["sensitive"]
    assert counted["block"] == {"email": 1}
    assert counted["mask"]["email"] >= 4

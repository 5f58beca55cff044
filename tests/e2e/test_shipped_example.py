"""The shipped configuration in front of modelled engines: every operation of every rule is answered."""

from collections.abc import Iterator

import pytest

from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.verify.verify import VerifyOptions, verify
from tests.support.engine_fleet import EngineFleet
from tests.support.shipped_example import shipped_example
from tests.support.stack import Stack, key_of

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def example() -> Iterator[tuple[Stack, EngineFleet]]:
    with shipped_example() as running:
        yield running


def test_verify_asks_every_operation_of_every_rule_and_all_of_them_answer(example):
    stack, _ = example
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    verified = verify(settings, VerifyOptions(stack.url, key_of("acme")))
    assert verified.sound, "\n".join(verified.lines())
    assert verified.counts().keys() <= {"ok", "partly", "no request"}, "\n".join(verified.lines())
    asked = {(entry.rule, entry.operation) for entry in verified.entries if not entry.why}
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    pooling = {"/v1/embeddings", "/v1/rerank"}
    text_rules = ("ultra-long-context-router", "lightweight-intent-classifier", "complex-multi-step-reasoning")
    wanted = {(rule, each) for rule in text_rules for each in generating} | {("rerank-embedding-fastpath", each) for each in pooling}
    assert wanted <= asked


def test_rerank_reaches_the_pool_that_the_rule_names(example):
    stack, _ = example
    with stack.client() as client:
        reply = client.post("/v1/rerank", json={"model": "bge-m3", "query": "cat", "documents": ["a dog", "the cat"], "top_n": 1})
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "gpu-31"), reply.text
    assert [result["index"] for result in reply.json()["results"]] == [1]

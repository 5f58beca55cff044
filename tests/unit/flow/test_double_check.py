"""Which requests are asked once more, what is asked, and what it may cost."""

import json

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, node, tenant

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def planes(tmp_path):
    def make(engine="vllm", served="engine-name", **verification) -> RequestPlane:
        twins = [node(name, f"10.0.0.{number}:8000") for number, name in enumerate("abc", 1)]
        others = [node("v", "10.0.0.8:8000", version="2025.4.0")]
        config = {
            "version": 1,
            "pools": {
                "p": {"model": "m", "engine": engine, "served_model": served, "scheduler": "round_robin", "nodes": [*twins, *others]}
            },
            "tenants": [tenant("acme")],
            "verification": {"share": 1.0, **verification},
        }
        file = tmp_path / "din.yaml"
        file.write_text(yaml.safe_dump(config))
        return RequestPlane(load(file, {}), LocalLedger(lambda: 0), Background(), DecisionCounters())

    return make


async def decide(plane, body, path="/v1/chat/completions"):
    head = RequestHead("POST", path, {"authorization": f"Bearer {key_of('acme')}"})
    verdict = await plane.context.create_handler().decide(head, json.dumps(body).encode())
    assert isinstance(verdict, Send)
    return verdict


async def test_the_question_is_the_client_s_forced_to_be_deterministic_and_the_client_s_own_stays_as_it_was(planes):
    plane = planes()
    body = {
        **HELLO,
        "temperature": 1.3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 500,
        "n_predict": 500,
        "user": "u",
    }
    verdict = await decide(plane, body)
    assert json.loads(verdict.body) == {**body, "model": "engine-name"}
    (check,) = plane.context.checks.waiting
    assert json.loads(check.body) == {
        **HELLO, "model": "engine-name", "user": "u", "temperature": 0, "top_p": 1, "seed": 1, "n": 1, "stream": False,
        "stream_options": None, "max_tokens": 32, "max_completion_tokens": 32, "n_predict": 32, "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip
    assert (check.path, check.trace_id) == ("/v1/chat/completions", dict(verdict.response_headers)["x-din-trace-id"])
    assert str(check.node.endpoint) == verdict.endpoints[0]


@pytest.mark.parametrize(
    ("own", "sampled"), [({"temperature": 0, "logit_bias": {"5": 1}}, False), ({"temperature": 0.7, "top_p": 0.9, "seed": 42}, True)]
)
async def test_a_greedy_or_seeded_request_is_asked_again_as_it_is_up_to_its_own_length(planes, own, sampled):
    plane = planes()
    await decide(plane, {**HELLO, **own, "stream": True, "max_tokens": 500})
    (check,) = plane.context.checks.waiting
    whole = {"model": "engine-name", "n": 1, "stream": False, "max_tokens": 500, "logprobs": True, "top_logprobs": 5}
    assert json.loads(check.body) == {**HELLO, **own, **whole}
    assert check.sampled == sampled


async def test_an_answer_that_the_budget_can_not_pay_for_is_compared_as_far_as_it_can(planes):
    plane = planes(tokens_per_minute=600)
    await decide(plane, {**HELLO, "temperature": 0.0, "max_tokens": 5000})
    (check,) = plane.context.checks.waiting
    assert 32 < json.loads(check.body)["max_tokens"] < 200
    assert 3 * check.tokens <= 600


async def test_only_nodes_of_the_same_version_are_asked(planes):
    plane = planes()
    while not plane.context.checks.waiting or plane.context.checks.waiting[-1].node.id != "a":
        await decide(plane, HELLO)
    peers = plane.context.checks.waiting[-1].select_peers(plane.context.selector.members.get_nodes("p"))
    assert {peer.id for peer in peers} == {"b", "c"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
    ],
)
async def test_what_can_not_be_compared_is_not_asked(planes, fields):
    plane = planes()
    await decide(plane, {**HELLO, **fields})
    assert plane.context.checks.waiting == []
    await decide(plane, HELLO)
    assert len(plane.context.checks.waiting) == 1, "the next one is taken instead"


async def test_engines_of_another_dialect_and_lists_of_prompts_are_not_asked(planes):
    plane = planes(engine="tgi")
    await decide(plane, HELLO)
    assert plane.context.checks.waiting == []
    plane = planes()
    await decide(plane, {"model": "m", "prompt": ["a", "b"]}, "/v1/completions")
    assert plane.context.checks.waiting == []
    await decide(plane, {"model": "m", "prompt": "a", "max_tokens": 5}, "/v1/completions")
    asked = json.loads(plane.context.checks.waiting[0].body)
    assert (asked["logprobs"], asked["max_tokens"]) == (5, 5)


async def test_one_in_a_hundred_is_one_in_a_hundred(planes):
    plane = planes(share=0.01, tokens_per_minute=1_000_000)
    for _ in range(1000):
        await decide(plane, HELLO)
    assert len(plane.context.checks.waiting) == 10


async def test_the_budget_is_for_all_answers_and_comes_back_with_time_and_with_what_was_not_asked(planes):
    plane = planes(tokens_per_minute=300)
    checks = plane.context.checks
    for _ in range(5):
        await decide(plane, HELLO)
    taken = len(checks.waiting)
    cost = 3 * checks.waiting[0].tokens
    assert taken == 300 // cost
    checks.refund_unused(checks.waiting[0], 0)
    await decide(plane, HELLO)
    assert len(checks.waiting) == taken + 1


async def test_without_the_section_nothing_is_taken(planes, tmp_path):
    planes()
    file = tmp_path / "din.yaml"
    config = yaml.safe_load(file.read_text())
    del config["verification"]
    file.write_text(yaml.safe_dump(config))
    assert RequestPlane(load(file, {}), LocalLedger(lambda: 0), Background(), DecisionCounters()).context.checks is None

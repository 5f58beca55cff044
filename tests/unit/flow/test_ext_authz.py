"""A request that another proxy asks about: decided as ext_proc decides, recorded as ext_proc records, and sent where the proxy likes."""

import json

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import Estimate, RequestHead
from din_extproc.domain.usage import Labels
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.ext_authz import ExtAuthzHandlerFactory
from din_extproc.flow.trace import Sampler
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, node, tenant

CONFIG = {
    "version": 1,
    "gateway": {"ext_authz": {}},
    "aliases": {"auto": {"models": ["small", "large"]}},
    "pools": {
        "s": {"model": "small", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000", max_seq_len=1000)]},
        "l": {"model": "large", "engine": "vllm", "nodes": [node("b", "10.0.0.2:8000", max_seq_len=50_000)]},
    },
    "rules": [{"id": "gold", "when": {"header": {"x-task-tier": ["gold"]}}, "pool": "l"}],
    "tenants": [tenant("acme", rpm=100, tpm=100_000, max_streams=1)],
}
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Tokenizer:
    """Returns the configured count, and counts its calls."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked = 0

    async def count(self, _prompt, estimate, _gauge) -> Estimate:
        self.asked += 1
        return replace(estimate, tokens=self.tokens, exact=True)


@pytest.fixture
def plane(tmp_path):
    (tmp_path / "din.yaml").write_text(yaml.safe_dump(CONFIG))
    return RequestPlane(load(tmp_path / "din.yaml", {}), LocalLedger(lambda: 0), Background(), DecisionCounters())


async def check(factory, content="hello", model="auto", **headers):
    handler = factory.create_handler()
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    head = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of('acme')}", **headers})
    return handler, await handler.decide(head, json.dumps(body).encode())


def labels(verdict) -> Labels:
    return msgspec.json.decode(verdict.metadata["labels"], type=Labels)


async def test_it_leaves_the_spans_tags_and_times_of_a_decision(plane):
    plane.context.sampler = Sampler(1.0)
    _, verdict = await check(
        ExtAuthzHandlerFactory(plane.context), traceparent=f"00-{TRACE}-b7ad6b7169203331-01", **{"x-task-tier": "gold"}
    )
    assert isinstance(verdict, Send)
    left = labels(verdict)
    assert left.span.startswith(f"{TRACE}-")
    assert left.span.endswith("-b7ad6b7169203331")
    assert dict(verdict.request_headers)["traceparent"].startswith(f"00-{TRACE}-")
    assert left.tags is not None
    assert (left.tags.model, left.tags.task_tier, left.tags.output_tokens, left.tags.entry) == ("auto", "gold", 8, "ext_authz")
    assert left.decided_us > 0


@pytest.mark.parametrize(("tier", "model"), [("gold", "large"), ("", "small")])
async def test_it_is_charged_for_the_model_that_the_rules_choose_and_names_no_pool(plane, tier, model):
    _, verdict = await check(ExtAuthzHandlerFactory(plane.context), **{"x-task-tier": tier})
    assert isinstance(verdict, Send)
    left = labels(verdict)
    assert (left.model, left.alias, left.pool, verdict.cluster, verdict.endpoints) == (model, "auto", "", "", ())


async def test_a_prompt_near_a_boundary_is_counted_exactly(plane, tmp_path):
    tokenizer = Tokenizer(990)
    settings = load(tmp_path / "din.yaml", {})
    plane.context.view = make_view(settings, {"small": tokenizer})
    _, verdict = await check(ExtAuthzHandlerFactory(plane.context), "word " * 950)
    assert tokenizer.asked == 1
    assert labels(verdict).prompt_estimate == 990
    assert labels(verdict).reserved_tokens == 998


async def test_a_refusal_tells_how_the_request_came(plane):
    factory = ExtAuthzHandlerFactory(plane.context)
    await check(factory)
    _, second = await check(factory)
    assert isinstance(second, ImmediateResponse)
    assert second.metadata["refusal"] == "concurrency_limit_exceeded"
    left = labels(second).tags
    assert left is not None
    assert left.entry == "ext_authz"


async def test_a_verdict_that_can_not_be_sent_gives_back_what_it_reserved(plane):
    started = []
    plane.context.start = started.append
    factory = ExtAuthzHandlerFactory(plane.context)
    handler, _ = await check(factory)
    assert factory.permits
    handler.failed(ValueError("no such header"))
    assert factory.permits == {}
    for coroutine in started:
        await coroutine
    assert isinstance((await check(factory))[1], Send), "the slot is free"

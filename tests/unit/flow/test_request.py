"""The request handler: the order of its stages, and the release of all that it acquired, however the exchange ends."""

import asyncio
import json
import tracemalloc

import pytest
import yaml

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import Priority, RequestHead
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.inline_task import InlineTask
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, node, tenant


class HeldLedger(LocalLedger):
    """A ledger whose verdicts wait until the test lets them go, as those of a distant Redis do. Gives back what nobody waits for."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)
        self.gate: asyncio.Future[None] | None = None
        self.away = False

    async def reserve(self, claim):
        if self.away:
            raise LimitsUnavailable("away")
        reply = await super().reserve(claim)
        if self.gate is not None:
            try:
                await self.gate
            except asyncio.CancelledError:
                await self.release(claim.tenant, claim.request_id)
                await self.settle(claim.tenant, claim.request_id, 0)
                raise
        return reply


CONFIG = {
    "version": 1,
    "aliases": {"m": {"model": "physical"}, "bound": {"model": "physical", "version": ">=2025.3,<2026"}},
    "pools": {
        "main": {"model": "physical", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000", max_seq_len=1000)]},
        "spare": {"model": "lighter", "engine": "vllm", "nodes": [node("b", "10.0.0.2:8000", max_seq_len=50_000)]},
    },
    "rules": [{"id": "all", "when": "always", "pool": "main", "fallback": "spare"}],
    "tenants": [tenant("acme", max_streams=1, rpm=10, tpm=100_000)],
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.fixture
def fresh(tmp_path):
    """Makes planes that have not decided anything yet."""
    file = tmp_path / "din.yaml"

    def made(**sections) -> RequestPlane:
        file.write_text(yaml.safe_dump({**CONFIG, **sections}))
        return RequestPlane(load(file, {}), HeldLedger(), Background(), DecisionCounters())

    return made


@pytest.fixture
def plane(fresh):
    return fresh()


def tokens_left(verdict) -> str:
    return dict(verdict.response_headers)["x-ratelimit-remaining-tokens"]


def head(path="/v1/chat/completions", method="POST", **headers) -> RequestHead:
    return RequestHead(method, path, {"authorization": f"Bearer {key_of('acme')}", **headers})


async def decide(plane, body=BODY, **options):
    flow = plane.context.create_handler()
    return flow, await flow.decide(head(**options), json.dumps(body).encode())


def code(verdict) -> str:
    assert isinstance(verdict, ImmediateResponse), verdict
    return json.loads(verdict.body)["code"]


@pytest.mark.parametrize(
    ("model", "header", "constraint"),
    [
        ("m", "", None),
        ("m", ">=2025", None),
        ("bound", "", ">=2025.3,<2026"),
        ("bound", "!=2025.4", ">=2025.3,<2026,!=2025.4"),
        ("m@~2025.3", "", "~2025.3"),
        ("m@~2025.3", ">=2025", "~2025.3,>=2025"),
        ("bound", "!=2025.4" + ",!=2024.1" * 12, ">=2025.3,<2026,!=2025.4" + ",!=2024.1" * 12),
    ],
)
async def test_the_node_gets_the_whole_version_constraint_when_the_client_s_header_is_only_a_part(plane, model, header, constraint):
    _, verdict = await decide(plane, {**BODY, "model": model}, **({"x-din-model-version": header} if header else {}))
    assert isinstance(verdict, Send), verdict
    assert dict(verdict.request_headers).get("x-din-model-version") == constraint


async def test_a_verdict_names_pool_nodes_body_and_what_settlement_needs(plane):
    _, verdict = await decide(plane)
    assert isinstance(verdict, Send)
    assert (verdict.cluster, verdict.endpoints) == ("main+spare", ("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.2:8000"))
    assert json.loads(verdict.body)["model"] == "physical"
    start, length, version = verdict.metadata["move"].split(" ", 2)
    assert (verdict.body[int(start) : int(start) + int(length)], version) == (b'"physical"', "")
    assert dict(verdict.response_headers)["x-ratelimit-remaining-requests"] == "9"
    assert verdict.metadata


async def test_a_request_does_not_move_between_pools_that_one_port_serves(tmp_path):
    """By its address alone the engine would be asked once more for the model that it has just failed at."""
    shared = {**CONFIG["pools"]["spare"], "nodes": [node("b", "10.0.0.1:8000", max_seq_len=50_000)]}
    file = tmp_path / "shared.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "pools": {**CONFIG["pools"], "spare": shared}}))
    _, verdict = await decide(RequestPlane(load(file, {}), HeldLedger(), Background(), DecisionCounters()))
    assert verdict.cluster == "main"
    assert set(verdict.endpoints) == {"10.0.0.1:8000"}
    assert "move" not in verdict.metadata


async def test_the_end_of_an_exchange_frees_its_place_and_its_node(plane):
    flow, _ = await decide(plane)
    assert code((await decide(plane))[1]) == "concurrency_limit_exceeded"
    assert plane.context.selector.load.tokens_in_flight()
    flow.ended()
    assert plane.context.selector.load.tokens_in_flight() == {}
    assert plane.context.live == {}
    assert isinstance((await decide(plane))[1], Send)


async def test_a_client_that_leaves_while_the_counters_are_asked_leaves_nothing_behind(plane, fresh):
    ledger = plane.context.ledger
    ledger.gate = asyncio.get_running_loop().create_future()
    flow = plane.context.create_handler()
    callbacks = []
    drive = InlineTask(flow.decide(head(), json.dumps(BODY).encode()), callbacks.append, callbacks.append)
    assert callbacks == []
    drive.cancel()
    flow.ended()
    assert [type(each) for each in callbacks] == [asyncio.CancelledError]
    ledger.gate = None
    assert plane.context.selector.load.tokens_in_flight() == {}
    _, verdict = await decide(plane)
    assert tokens_left(verdict) == tokens_left((await decide(fresh()))[1])


async def test_an_open_request_does_not_keep_its_body(plane):
    """Answers stream for minutes, and bodies may be megabytes."""
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 1_000_000}], "model": "bound"}
    raw = json.dumps(body).encode()
    flow = plane.context.create_handler()
    tracemalloc.start()
    try:
        verdict = await flow.decide(head(), raw)
        assert isinstance(verdict, Send)
        assert verdict.body is not raw
        del verdict
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


async def test_a_verdict_that_can_not_be_sent_gives_everything_back(plane):
    flow, verdict = await decide(plane)
    assert isinstance(verdict, Send)
    failure = flow.failed(ValueError("a header that can't be written"))
    assert code(failure) == "internal_error"
    assert "header" not in failure.body.decode()
    flow.ended()
    assert plane.context.selector.load.tokens_in_flight() == {}
    assert tokens_left((await decide(plane))[1]) == tokens_left(verdict)


async def test_unavailable_counters_are_reported_with_a_retry_after(plane):
    plane.context.ledger.away = True
    _, verdict = await decide(plane)
    assert code(verdict) == "limits_unavailable"
    assert int(dict(verdict.headers)["retry-after"]) >= 1
    assert plane.context.selector.load.tokens_in_flight() == {}


async def test_a_request_that_only_the_fallback_can_take_goes_there_and_says_why(plane):
    long = {**BODY, "messages": [{"role": "user", "content": "word " * 4000}]}
    _, verdict = await decide(plane, long)
    assert verdict.cluster == "spare"
    headers = dict(verdict.response_headers)
    assert headers["x-bxagent-degraded"] == "true"
    assert headers["x-din-degraded-reason"] == "context_length_exceeded"
    assert json.loads(verdict.body)["model"] == "lighter"


async def test_a_request_too_long_for_pool_and_fallback_gets_the_pool_s_own_reason(plane):
    far = {**BODY, "max_tokens": 900_000}
    assert code((await decide(plane, far))[1]) == "context_length_exceeded"


async def test_who_asks_is_known_before_the_body_is_read(plane):
    flow = plane.context.create_handler()
    assert code(await flow.decide(RequestHead("POST", "/v1/chat/completions", {}), b"{broken")) == "invalid_api_key"
    assert code(await plane.context.create_handler().decide(RequestHead("POST", "/elsewhere", {}), b"")) == "path_not_found"


async def test_a_refused_request_costs_nothing(plane):
    for _ in range(20):
        assert code((await decide(plane, {**BODY, "model": "nobody"}))[1]) == "model_not_found"
    _, verdict = await decide(plane)
    assert dict(verdict.response_headers)["x-ratelimit-remaining-requests"] == "9"


WORDS = "hello world this is a text " * 10


@pytest.mark.parametrize(
    ("path", "fields", "pool"),
    [
        ("/v1/embeddings", {"input": [WORDS] * 200}, "main"),
        ("/v1/embeddings", {"input": [[7] * 900] * 100}, "main"),
        ("/v1/embeddings", {"input": ["short", WORDS * 40]}, "spare"),
        ("/v1/embeddings", {"input": [[7], [7] * 1001]}, "spare"),
        ("/v1/rerank", {"query": "q", "documents": [WORDS] * 200}, "main"),
        ("/v1/completions", {"prompt": [WORDS * 5] * 8, "max_tokens": 300}, "main"),
        ("/v1/completions", {"prompt": [WORDS * 5] * 2, "max_tokens": 900}, "spare"),
        ("/v1/chat/completions", {"n": 8, "max_tokens": 600}, "main"),
        ("/v1/chat/completions", {"n": 2, "max_tokens": 1100}, "spare"),
    ],
)
async def test_a_context_has_to_hold_one_input_and_one_answer_not_all_of_them(fresh, path, fields, pool):
    _, verdict = await decide(fresh(), {"model": "m", "messages": BODY["messages"], **fields}, path=path)
    assert isinstance(verdict, Send), verdict
    assert verdict.cluster.split("+")[0] == pool


@pytest.mark.parametrize(
    ("path", "fields", "output"),
    [
        ("/v1/completions", {"prompt": ["x"] * 40, "max_tokens": 400}, 16_000),
        ("/v1/completions", {"prompt": "x", "max_tokens": 400, "max_completion_tokens": 1}, 400),
        ("/v1/chat/completions", {"n": 8}, 8 * 256),
        ("/v1/completions", {"prompt": ["x"] * 40}, 40 * 256),
        ("/v1/chat/completions", {"max_tokens": 1, "n_predict": 120}, 120),
    ],
)
async def test_what_all_answers_together_may_cost_is_reserved(fresh, path, fields, output):
    _, verdict = await decide(fresh(), {"model": "m", "messages": BODY["messages"], **fields}, path=path)
    assert isinstance(verdict, Send), verdict
    assert output < 100_000 - int(tokens_left(verdict)) < output + 400


async def test_what_one_answer_usually_has_is_expected_of_each(fresh):
    plane = fresh()
    for _ in range(30):
        plane.outputs.learn("acme", "physical", 10)
    _, verdict = await decide(plane, {**BODY, "n": 50, "max_tokens": 800})
    assert 50 * 10 < 100_000 - int(tokens_left(verdict)) < 50 * 20


async def test_a_stored_response_is_refused_clearly_where_several_nodes_serve_the_model(fresh):
    asked = {"model": "m", "input": "go on", "previous_response_id": "resp_1"}
    main = CONFIG["pools"]["main"]
    plane = fresh()
    _, verdict = await decide(plane, asked, path="/v1/responses")
    assert isinstance(verdict, Send), verdict
    plane = fresh(pools={**CONFIG["pools"], "main": {**main, "nodes": [*main["nodes"], node("twin", "10.0.0.9:8000", max_seq_len=1000)]}})
    _, verdict = await decide(plane, asked, path="/v1/responses")
    assert code(verdict) == "invalid_request"
    assert json.loads(verdict.body)["error"]["param"] == "previous_response_id"
    _, verdict = await decide(plane, {**asked, "previous_response_id": None}, path="/v1/responses")
    assert isinstance(verdict, Send)


async def test_the_model_list_tells_context_lengths_and_since_when(plane):
    flow = plane.context.create_handler()
    listed = json.loads((await flow.decide(head("/v1/models", "GET"), b"")).body)["data"]
    longest = max(node["max_seq_len"] for pool in CONFIG["pools"].values() for node in pool["nodes"] if pool["model"] == "physical")
    lengths = {model["id"]: model for model in listed}
    assert lengths["physical"]["max_model_len"] == lengths["physical"]["context_length"] == longest
    assert all(model["created"] > 1_700_000_000 for model in listed)


async def test_anthropic_s_path_tells_its_limits_by_anthropic_s_names(fresh):
    asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    _, verdict = await decide(fresh(), asked, path="/v1/messages")
    assert isinstance(verdict, Send), verdict
    limit_headers = dict(verdict.response_headers)
    assert limit_headers["anthropic-ratelimit-tokens-limit"] == limit_headers["x-ratelimit-limit-tokens"]
    assert limit_headers["anthropic-ratelimit-tokens-remaining"] == limit_headers["x-ratelimit-remaining-tokens"]
    assert limit_headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
    assert limit_headers["request-id"] == limit_headers["x-request-id"] == limit_headers["x-din-trace-id"]
    assert verdict.metadata["dialect"] == "messages"
    _, verdict = await decide(fresh())
    assert not any(name.startswith("anthropic") or name == "request-id" for name, _ in verdict.response_headers)


@pytest.mark.parametrize("name", ["claude-opus-4-8[1m]", "qwen/qwen3-8b@q4_k_m", "name@20250929"])
async def test_models_can_be_named_with_brackets_and_an_at_and_patterns_take_them_by_the_letter(fresh, name):
    plane = fresh(
        aliases={name: {"model": "physical"}, "claude-opus-4-8m": {"model": "physical"}}, tenants=[tenant("acme", models=(name,))]
    )
    _, verdict = await decide(plane, {**BODY, "model": name})
    assert isinstance(verdict, Send), verdict
    listed = json.loads((await plane.context.create_handler().decide(head("/v1/models", "GET"), b"")).body)["data"]
    assert name in {model["id"] for model in listed}
    assert not plane.context.view.table.models_for(Tenant("x", ("claude-opus-4-[8]m",), Priority.STANDARD, RateLimits(), {}))


@pytest.mark.parametrize("engine", ["llamacpp", "ollama"])
async def test_an_engine_that_caps_its_output_is_asked_for_any_and_no_more_than_a_context_is_reserved(fresh, engine):
    nodes = [node("a", "10.0.0.1:8000", max_seq_len=8192)]
    sections = {"pools": {"main": {"model": "physical", "engine": engine, "nodes": nodes}}, "rules": []}
    for wished in (32_000, 1_000_000):
        _, verdict = await decide(fresh(**sections), {**BODY, "max_tokens": wished})
        assert isinstance(verdict, Send), verdict
        assert 8192 <= 100_000 - int(tokens_left(verdict)) < 8300
    sections["pools"]["main"]["engine"] = "vllm"
    _, verdict = await decide(fresh(**sections), {**BODY, "max_tokens": 32_000})
    assert code(verdict) == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": WORDS * 400, "truncate_prompt_tokens": -1}),
        ("/v1/embeddings", {"input": WORDS * 400, "truncate_prompt_tokens": 512}),
        ("/v1/responses", {"input": WORDS * 400, "truncation": "auto", "max_output_tokens": 10}),
    ],
)
async def test_a_prompt_that_the_engine_is_asked_to_cut_passes_and_reserves_what_is_left(fresh, path, fields):
    nodes = [node("a", "10.0.0.1:8000", max_seq_len=1000)]
    sections = {"pools": {"main": {"model": "physical", "engine": "vllm", "nodes": nodes}}, "rules": []}
    _, verdict = await decide(fresh(**sections), {"model": "m", **fields}, path=path)
    assert isinstance(verdict, Send), verdict
    assert 100_000 - int(tokens_left(verdict)) <= 1010
    whole = {key: value for key, value in fields.items() if not key.startswith("trunc")}
    _, verdict = await decide(fresh(**sections), {"model": "m", **whole}, path=path)
    assert code(verdict) == "context_length_exceeded"

"""OpenAI's own client, unchanged, in front of real small models: what a user's program sees of the gateway."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from din_extproc.client import Client, LimitReached, RequestRefused, Unavailable, Unproven, VersionMismatch
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.split import SplitOptions, split
from tests.support.servers import EngineSim, LlamaServer
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
FORCED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="modelled", auto_tool_choice=True, decode_rate=2000.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(scope="module")
def stack(sim: EngineSim) -> Iterator[Stack]:
    chat = LlamaServer("--ctx", "4096", "--parallel", "2")
    vectors = LlamaServer("--ctx", "512", "--parallel", "1", "--embedding", "--pooling", "mean", alias="vectors")
    try:
        chat.start()
        vectors.start()
        small = {"max_seq_len": 2048, "max_concurrency": 2}
        pools = {
            "chat": {"model": "smollm2", "engine": "llamacpp", "nodes": [node("llama", chat.address, **small)]},
            "vectors": {"model": "vectors", "engine": "llamacpp", "nodes": [node("embed", vectors.address, **small)]},
            "modelled": {"model": "modelled", "engine": "vllm", "nodes": [node("sim", sim.address)]},
        }
        config = {
            "aliases": {"bx-fast-chat": {"model": "smollm2"}},
            "pools": pools,
            "rules": [{"id": f"to-{name}", "when": {"model": pool["model"]}, "pool": name} for name, pool in pools.items()],
            "tenants": [
                tenant("acme"),
                tenant("trial", rpm=1, tpm=1000),
                tenant("other", models=("vectors",)),
                tenant("single", max_streams=1),
            ],
        }
        with Stack(config) as running:
            yield running
    finally:
        chat.stop()
        vectors.stop()


def client(stack: Stack, name: str = "acme", **options) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key=key_of(name), **{"max_retries": 0, **options})


@pytest.fixture(scope="module")
def acme(stack) -> Iterator[OpenAI]:
    with client(stack) as made:
        yield made


# What works


def test_a_chat_completion(acme):
    answer = acme.chat.completions.create(model="bx-fast-chat", messages=QUESTION, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_shows_usage_only_to_who_asked(acme):
    ask = {"model": "bx-fast-chat", "messages": QUESTION, "max_tokens": 8, "stream": True}
    for options in ({}, {"stream_options": {"include_usage": False}}):
        chunks = list(acme.chat.completions.create(**ask, **options))
        assert all(chunk.choices for chunk in chunks), "whoever reads choices[0] of every chunk must not fall"
        assert all(chunk.usage is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason in {"length", "stop"}
    chunks = list(acme.chat.completions.create(**ask, stream_options={"include_usage": True}))
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1
    assert usages[0].completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_streaming_aid_of_the_client_gives_the_whole_message(acme):
    with acme.chat.completions.stream(model="bx-fast-chat", messages=QUESTION, max_tokens=8) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.current_completion_snapshot.choices[0].message
    assert message.content == "".join(deltas)


def test_the_old_completions(acme):
    answer = acme.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text
    streamed = list(acme.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=8, stream=True))
    assert all(chunk.choices for chunk in streamed)
    assert "".join(chunk.choices[0].text for chunk in streamed)


def test_embeddings_as_numbers_and_as_the_base64_that_the_client_asks_for_by_itself(acme):
    for form in ({}, {"encoding_format": "float"}):
        answer = acme.embeddings.create(model="vectors", input=["a node", "a gateway"], **form)
        assert [len(item.embedding) for item in answer.data] == [576, 576]
        assert answer.usage.prompt_tokens > 0


def test_token_ids_as_input(acme):
    answer = acme.embeddings.create(model="vectors", input=[[1, 2, 3], [4]])
    assert len(answer.data) == 2


def test_models(acme):
    assert {model.id for model in acme.models.list()} == {"bx-fast-chat", "smollm2", "vectors", "modelled"}
    assert acme.models.retrieve("bx-fast-chat").alias_for == ["smollm2"]


def test_a_tool_call_whole_and_streamed(acme):
    ask = {"model": "modelled", "messages": QUESTION, "tools": [TOOL], "tool_choice": FORCED, "max_tokens": 100}
    whole = acme.chat.completions.create(**ask).choices[0].message.tool_calls[0].function
    assert whole.name == "weather"
    assert set(json.loads(whole.arguments)) == {"city", "days"}
    with acme.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)


def test_the_answers_headers_are_there_in_raw_responses_also_of_streams(acme, stack):
    for stream in (False, True):
        raw = acme.chat.completions.with_raw_response.create(model="bx-fast-chat", messages=QUESTION, max_tokens=4, stream=stream)
        assert raw.headers["x-din-node-id"] == "llama"
        assert raw.headers["x-din-model-version"] == "2025.3.1"
        assert float(raw.headers["x-din-exec-time-ms"]) >= 0
        assert len(raw.headers["x-din-trace-id"]) == 32
        for kind in ("requests", "tokens"):
            limit, left = (int(raw.headers[f"x-ratelimit-{what}-{kind}"]) for what in ("limit", "remaining"))
            assert 0 < left < limit
            assert raw.headers[f"x-ratelimit-reset-{kind}"].endswith("s")
        parsed = raw.parse()
        assert [chunk.id for chunk in parsed] if stream else parsed.id


async def test_the_asynchronous_client(stack):
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key_of("acme"), max_retries=0) as made:

        async def streamed(number: int) -> str:
            answer = await made.chat.completions.create(
                model="modelled", messages=[{"role": "user", "content": f"number {number}"}], max_tokens=20, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

        texts = await asyncio.gather(*(streamed(number) for number in range(10)))
        whole = await made.chat.completions.create(model="modelled", messages=[{"role": "user", "content": "number 3"}], max_tokens=20)
        assert texts[3] == whole.choices[0].message.content
        assert len(set(texts)) == 10
        with pytest.raises(openai.NotFoundError):
            await made.chat.completions.create(model="nobody-has-this", messages=QUESTION)


# What does not, by the client's own classes


def test_errors_are_of_the_clients_classes(stack, acme):
    def refused(kind: type[openai.APIStatusError], code: str, made: OpenAI = acme, **fields) -> openai.APIStatusError:
        with pytest.raises(kind) as refusal:
            made.chat.completions.create(**{"model": "modelled", "messages": QUESTION, "max_tokens": 4, **fields})
        assert refusal.value.code == code
        assert refusal.value.response.headers["x-din-trace-id"] == refusal.value.response.json()["trace_id"]
        return refusal.value

    assert refused(openai.NotFoundError, "model_not_found", model="nobody-has-this").param == "model"
    assert refused(openai.BadRequestError, "invalid_request", messages="no list").param == "messages"
    assert refused(openai.BadRequestError, "context_length_exceeded", max_tokens=50_000)
    assert refused(openai.ConflictError, "version_mismatch", model="modelled@>=2030")
    with client(stack, "other") as other, OpenAI(base_url=f"{stack.url}/v1", api_key="sk-test-SECRET", max_retries=0) as unknown_client:
        refused(openai.PermissionDeniedError, "model_not_allowed", other)
        assert "SECRET" not in str(refused(openai.AuthenticationError, "invalid_api_key", unknown_client))
    with client(stack, "trial") as trial:
        trial.chat.completions.create(model="modelled", messages=QUESTION, max_tokens=4)
        assert refused(openai.RateLimitError, "rate_limit_exceeded", trial).type == "rate_limit_error"


def test_an_engines_own_refusal_reaches_the_client_as_a_bad_request(acme):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        acme.chat.completions.create(model="modelled", messages=QUESTION, max_tokens=4, temperature=-3)


def test_an_error_inside_a_stream_is_raised_by_the_client(acme, sim):
    sim.fail("error_event:after=3,count=1,message=engine died")
    seen = []
    with pytest.raises(openai.APIError, match="engine died"):
        seen.extend(acme.chat.completions.create(model="modelled", messages=QUESTION, max_tokens=50, stream=True))
    assert seen


# Retries of the client


def _attempts(stack: Stack) -> int:
    counts = stack.status()["counts"]
    return counts["sent"] + sum(counts["refused"].values())


def test_what_can_never_pass_is_not_tried_again_by_the_client(stack):
    never = (
        ({"model": "modelled@>=2030"}, openai.ConflictError),
        ({"messages": [{"role": "user", "content": "word " * 1500}]}, openai.BadRequestError),
    )
    with client(stack, "trial", max_retries=3) as patient:
        for fields, kind in never:
            before = _attempts(stack)
            with pytest.raises(kind) as refusal:
                patient.chat.completions.create(**{"model": "modelled", "messages": QUESTION, "max_tokens": 4, **fields})
            assert refusal.value.response.headers["x-should-retry"] == "false"
            assert _attempts(stack) == before + 1


def test_a_client_that_waits_for_retry_after_gets_through(stack, sim):
    """One request at a time is allowed: of four that come together some are refused with `retry-after`, and pass then."""
    sim.fail("latency:ms=200")
    try:
        with client(stack, "single", max_retries=20) as patient, ThreadPoolExecutor(4) as pool:
            ask = {"model": "modelled", "messages": QUESTION, "max_tokens": 4}
            answers = list(pool.map(lambda _: patient.chat.completions.create(**ask), range(4)))
    finally:
        sim.fail("")
    assert len(answers) == 4
    assert stack.status()["counts"]["refused"]["concurrency_limit_exceeded"] > 0


# The network's own client: the same, with proof and times


@pytest.fixture(scope="module")
def network(stack) -> Iterator[Client]:
    with Client(stack.url, key_of("acme"), max_retries=0) as made:
        yield made


def test_an_answer_says_where_it_comes_from_and_how_long_it_took(network):
    answer = network.chat(
        model="modelled", messages=QUESTION, max_tokens=8, version=">=2025", trace_id="my-own-trace-1", deadline_ms=20_000
    )
    assert answer.content.choices[0].message.content
    assert (answer.provenance.node_id, answer.provenance.model_version, answer.provenance.trace_id) == ("sim", "2025.3.1", "my-own-trace-1")
    assert (answer.provenance.degraded, answer.provenance.dropped_parameters) == (False, ())
    assert 0 <= answer.times.transfer_ms <= answer.times.head_ms <= answer.times.total_ms
    assert answer.times.ttft_ms is None


def test_a_stream_has_its_times_when_it_is_over(network):
    with network.stream(model="modelled", messages=QUESTION, max_tokens=20) as stream:
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.times
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert joined
    assert stream.provenance.node_id == "sim"
    assert 0 < stream.times.head_ms <= stream.times.ttft_ms <= stream.times.total_ms
    assert 0 <= stream.times.tpot_ms < stream.times.total_ms


@pytest.mark.parametrize(
    ("key", "asked", "kind", "code"),
    [
        ("acme", {"model": "modelled", "version": ">=2099"}, VersionMismatch, "version_mismatch"),
        ("acme", {"model": "nothing"}, RequestRefused, "model_not_found"),
        ("other", {"model": "modelled"}, RequestRefused, "model_not_allowed"),
        ("trial", {"model": "modelled", "max_tokens": 2000}, RequestRefused, "request_exceeds_limit"),
    ],
)
def test_what_the_gateway_refuses_has_a_type_and_a_trace_id(stack, key, asked, kind, code):
    messages = [{"role": "user", "content": "word " * (1500 if key == "trial" else 1)}]
    with Client(stack.url, key_of(key), max_retries=0) as made:
        with pytest.raises(kind) as raised:
            made.chat(messages=messages, **asked)
        with pytest.raises(kind), made.stream(messages=messages, **asked):
            pass
    assert (raised.value.code, bool(raised.value.trace_id)) == (code, True)


def test_a_node_that_fails_and_a_limit_that_is_reached_have_types_of_their_own(stack, sim, network):
    sim.fail("error_event:after=2,count=1")
    with pytest.raises(Unavailable) as failed, network.stream(model="modelled", messages=QUESTION, max_tokens=9) as stream:
        list(stream)
    assert failed.value.trace_id == stream.provenance.trace_id
    with Client("http://127.0.0.1:9", "none", max_retries=0) as unreachable, pytest.raises(Unavailable) as away:
        unreachable.chat(model="modelled", messages=QUESTION)
    assert away.value.code == "unreachable"
    sim.fail("throttle:count=2,retry_after_s=1")
    with pytest.raises(LimitReached) as busy:
        network.chat(model="modelled", messages=QUESTION, max_tokens=1)
    assert (busy.value.code, busy.value.status, busy.value.retry_after_s) == ("upstream_busy", 429, 1.0)
    sim.fail("")
    body = {"model": "modelled", "messages": QUESTION, "max_tokens": 1}
    stack.eventually(lambda: stack.chat(body).status_code == 503, "the node is left alone for as long as it asked")
    stack.eventually(lambda: stack.chat(body).status_code == 200, "the node is asked again")


def test_an_answer_without_proof_is_none(sim):
    with Client(sim.url, "none", max_retries=0) as straight, pytest.raises(Unproven, match="no x-din-node-id, x-din-model-version"):
        straight.chat(model="modelled", messages=QUESTION, max_tokens=1)


# Where the time goes


@pytest.mark.parametrize(("model", "tokens"), [("modelled", (1, 10, 100, 500)), ("bx-fast-chat", (1, 40))])
def test_the_parts_of_short_and_long_streams_add_up(stack, model, tokens):
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    found = split(settings, SplitOptions(url=stack.url, key=key_of("acme"), model=model, tokens=tokens, repeats=1, clock_requests=4))
    assert found.sound, found.lines()
    assert tuple(each.tokens for each in found.splits) == tokens
    assert {each.node_says for each in found.splits} == {model == "bx-fast-chat"}  # llama.cpp has a stopwatch of its own
    assert all(each.parts["node"] > each.total_ms / 4 for each in found.splits[1:])

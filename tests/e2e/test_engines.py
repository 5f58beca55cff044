"""One interface over every engine: the same requests through a real Envoy to each, and what a client sees of the difference.

Rule: `DIFFERENCES` lists every one. What is not listed is the same.
"""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.engine_fleet import EngineFleet
from tests.support.engine_steps import STEPS, StepClient, Subject, outcome
from tests.support.pages import TEXTS
from tests.support.servers import EngineSim
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e

ENGINES = {
    "vllm": ("vllm", "vllm", "openai"),
    "sglang": ("sglang", "vllm", "openai"),
    "tensorrt_llm": ("tensorrt_llm", "tensorrt_llm", "openai"),
    "tgi": ("tgi", "tgi", "openai"),
    "tgi-native": ("tgi", "tgi", "native"),
    "ollama": ("ollama", "ollama", "openai"),
    "ollama-native": ("ollama", "ollama", "native"),
    "triton": ("triton", "triton", "openai"),
    "triton-native": ("triton", "triton", "native"),
}
"""Pool -> engine, modelled engine, api."""
ALL = sorted(ENGINES)
CHATTY = [name for name in ALL if name != "triton-native"]
POOLED = {"vllm", "sglang", "ollama", "ollama-native", "triton", "triton-native"}
DIFFERENCES = {
    ("triton-native", "chat"): "no chat template: its OpenAI frontend serves chats",
    ("triton-native", "usage"): "Triton tells none",
    ("triton-native", "finish_reason"): "a whole answer never says that it was cut by its length",
    ("ollama-native", "rerank"): "Ollama has none",
    ("ollama", "rerank"): "Ollama has none",
    ("triton", "rerank"): "its OpenAI frontend has none",
}
OPTIONS = {"max_model_len": 1024, "decode_rate": 1000.0, "prefill_rate": 1e6, "auto_tool_choice": True}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    sims = {name: {"model": name, "api": modelled, **OPTIONS} for name, (_, modelled, _) in ENGINES.items()}
    for name in POOLED:
        sims[f"{name}-pooled"] = {"model": f"{name}-pooled", "api": ENGINES[name][1], "runner": "pooling", "dimensions": 8}
    with EngineFleet(sims) as fleet:
        yield dict(fleet.members)


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    pools = {}
    for name, sim in engines.items():
        engine, _, api = ENGINES[name.removesuffix("-pooled")]
        pools[name] = {"model": name, "engine": engine, "api": api, "stream_usage": True, "nodes": [node(f"{name}-1", sim.address)]}
    with Stack({"pools": pools, "tenants": [tenant("acme")]}) as running:
        yield running


def text_of(name: str) -> tuple[str, dict]:
    """The path and prompt of a generation that every engine can do, for this one."""
    if name in CHATTY:
        return "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "hello [[tag]]"}], "max_tokens": 6}
    return "/v1/completions", {"model": name, "prompt": "hello [[tag]]", "max_tokens": 6}


def at_rest(stack: Stack) -> dict:
    """The counts, once nothing is under way any more, settling included: the log brings an exchange some milliseconds after its end."""
    counts: list[dict] = []

    def still() -> bool:
        counts.append(stack.status()["counts"])
        time.sleep(0.1)
        return len(counts) > 1 and counts[-2]["outcomes"] == counts[-1]["outcomes"]

    stack.eventually(still, "nothing is under way")
    return counts[-1]


def generated(choice: dict) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_what_a_client_sees_of_every_engine_is_the_table_in_the_readme(stack, engines):
    table = [["engine", *STEPS], ["---"] * (1 + len(STEPS))]
    for name in ENGINES:
        pooled = f"{name}-pooled" if name in POOLED else ""
        subject = Subject(name, name, pooled, pooled, faults=engines[name].fail, chats=name in CHATTY, tool_choice="auto")
        table.append([name, *(outcome(step, StepClient(stack, subject)) for step, _ in STEPS.values())])
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    assert text in TEXTS["reference/engines"], f"\n{text}"


@pytest.mark.parametrize("name", CHATTY)
def test_a_chat_has_openais_fields_and_the_same_text_everywhere(stack, name):
    answers = {}
    with stack.client() as client:
        for each in ("vllm", name):
            reply = client.post("/v1/chat/completions", json=text_of(each)[1])
            assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json"), reply.text
            answers[each] = reply.json()
    answer, reference = answers[name], answers["vllm"]
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.keys()
    assert (answer["object"], answer["model"]) == ("chat.completion", name)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    assert generated(choice) == generated(reference["choices"][0])
    fields = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [answer["usage"][count] for count in fields] == [reference["usage"][count] for count in fields]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_has_the_same_order_of_events_everywhere_and_is_counted_right(stack, name, usage):
    path, body = text_of(name)
    before = at_rest(stack)
    with stack.client() as client:
        whole = client.post(path, json=body).json()
        asked = {**body, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
        reply = client.post(path, json=asked)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    sent = events(reply.text)
    chunks = [event for event in sent if event["choices"]]
    assert len({event["id"] for event in sent}) == 1
    if name in CHATTY:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        joined = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert joined == generated(whole["choices"][0])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    tells = usage and (name, "usage") not in DIFFERENCES
    assert [bool(event.get("usage")) for event in sent] == [False] * len(chunks) + [True] * tells
    if tells:
        assert sent[-1]["usage"]["completion_tokens"] == 6
    after = stack.settled(sum(before["outcomes"].values()) + 2)["counts"]
    assert after["completion_tokens"] - before["completion_tokens"] == 12 if name != "triton-native" else True


@pytest.mark.parametrize("name", [name for name in CHATTY if name not in ("tgi", "triton")])
@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_call_has_an_id_a_name_and_arguments_as_text(stack, name, stream):
    body = {"model": name, "messages": [{"role": "user", "content": "rain?"}], "tools": [TOOL], "max_tokens": 50, "stream": stream}
    with stack.client() as client:
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(reply.text)]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        identity, name_of, arguments = (
            calls[0]["id"],
            calls[0]["function"]["name"],
            "".join(c["function"].get("arguments", "") for c in calls),
        )
        finish = events(reply.text)[-1]["choices"][0]["finish_reason"]
    else:
        choice = reply.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        identity, name_of, arguments, finish = call["id"], call["function"]["name"], call["function"]["arguments"], choice["finish_reason"]
    assert identity
    assert (name_of, json.loads(arguments), finish) == ("weather", {"city": "example"}, "tool_calls")


@pytest.mark.parametrize("name", sorted(POOLED))
def test_embeddings_are_the_same_numbers_everywhere(stack, name):
    with stack.client() as client:
        wanted = client.post("/v1/embeddings", json={"model": "vllm-pooled", "input": ["a b", "c"]}).json()["data"]
        answer = client.post("/v1/embeddings", json={"model": f"{name}-pooled", "input": ["a b", "c"]}).json()
        packed = client.post("/v1/embeddings", json={"model": f"{name}-pooled", "input": ["a b", "c"], "encoding_format": "base64"}).json()
        reference = client.post("/v1/embeddings", json={"model": "vllm-pooled", "input": ["a b", "c"], "encoding_format": "base64"}).json()
    assert [entry["embedding"] for entry in answer["data"]] == [entry["embedding"] for entry in wanted]
    assert [entry["embedding"] for entry in packed["data"]] == [entry["embedding"] for entry in reference["data"]]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}


@pytest.mark.parametrize("name", sorted(POOLED))
def test_documents_are_ranked_alike_or_the_model_has_no_such_path(stack, name):
    with stack.client() as client:
        body = {"model": f"{name}-pooled", "query": "big cat", "documents": ["a dog", "the big cat", "a cat"], "top_n": 2}
        reply = client.post("/v1/rerank", json=body)
    if (name, "rerank") in DIFFERENCES:
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
        return
    results = reply.json()["results"]
    assert [(result["index"], round(result["relevance_score"], 2), result["document"]["text"]) for result in results] == [
        (1, 0.99, "the big cat"),
        (2, 0.5, "a cat"),
    ]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("words", [20_000, 1500], ids=["known_here", "the_engine_says_so"])
def test_a_prompt_over_the_context_is_refused_with_one_code(stack, name, words):
    path, body = text_of(name)
    words = "word " * words
    long = {"messages": [{"role": "user", "content": words}]} if "messages" in body else {"prompt": words}
    with stack.client() as client:
        reply = client.post(path, json={**body, **long})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("name", ["tgi-native", "ollama-native", "triton-native"])
def test_an_unsupported_parameter_is_refused_by_name(stack, name):
    path, body = text_of(name)
    if name == "tgi-native":
        path, body = "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 3}
    with stack.client() as client:
        reply = client.post(path, json={**body, "logit_bias": {"1": 5}})
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (400, "invalid_request", "logit_bias")


@pytest.mark.parametrize("name", ["tgi", "ollama", "ollama-native"])
def test_an_unsupported_parameter_is_dropped_and_reported(stack, engines, name):
    body = {**text_of(name)[1], "tools": [TOOL], "parallel_tool_calls": False}
    with stack.client() as client:
        reply = client.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.headers["x-din-dropped-parameters"]) == (200, "parallel_tool_calls")
    assert b"parallel" not in engines[name].seen()[1][-1]["body"]


@pytest.mark.parametrize("name", ALL)
def test_a_value_that_no_engine_takes_is_refused_with_one_code(stack, name):
    path, body = text_of(name)
    with stack.client() as client:
        reply = client.post(path, json={**body, "temperature": -3})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request"), reply.text
    assert "temperature" in error["message"]


@pytest.mark.parametrize("name", ALL)
def test_a_client_that_leaves_stops_the_engine(stack, engines, name):
    path, body = text_of(name)
    sim = engines[name]
    sim.forget()
    sim.fail("drip:ms=20,bytes=20")
    try:
        with stack.client() as client, client.stream("POST", path, json={**body, "max_tokens": 900, "stream": True}) as reply:
            next(reply.iter_bytes())
        stack.eventually(lambda: sim.seen()[1][-1]["ended"] is not None, "the engine has noticed it")
        assert sim.seen()[1][-1]["outcome"] == "aborted"
    finally:
        sim.fail("")


@pytest.mark.parametrize("name", ALL)
def test_an_error_in_the_stream_arrives_in_band_in_one_shape(stack, engines, name):
    path, body = text_of(name)
    engines[name].fail("error_event:after=2,message=CUDA is lost")
    try:
        with stack.client() as client:
            reply = client.post(path, json={**body, "stream": True})
    finally:
        engines[name].fail("")
    error = next(event["error"] for event in events(reply.text) if "error" in event)
    assert error["message"] == "CUDA is lost"
    assert {"message", "type", "param", "code"} <= error.keys()


@pytest.mark.parametrize("name", ALL)
def test_an_engine_that_dies_in_mid_stream_never_looks_like_a_good_end(stack, engines, name):
    path, body = text_of(name)
    engines[name].fail("reset:after=30")
    got: list[bytes] = []
    try:
        with stack.client() as client, client.stream("POST", path, json={**body, "max_tokens": 60, "stream": True}) as reply:
            parts = reply.iter_bytes()
            with pytest.raises(httpx.RemoteProtocolError):
                got.extend(parts)
    finally:
        engines[name].fail("")
    assert b"[DONE]" not in b"".join(got)


@pytest.mark.parametrize("name", ["tgi-native", "ollama-native", "vllm"])
def test_an_engine_that_ends_a_stream_too_soon_is_reported_as_truncated(stack, engines, name):
    path, body = text_of(name)
    if name == "tgi-native":
        path, body = "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 6}
    engines[name].fail("truncate:after=3")
    try:
        with stack.client() as client:
            reply = client.post(path, json={**body, "stream": True})
    finally:
        engines[name].fail("")
    assert events(reply.text)[-1]["error"]["code"] == "upstream_truncated"
    assert "[DONE]" not in reply.text

"""What OpenAI's API can ask for beyond a plain chat, through a real Envoy to modelled engines and to a real llama.cpp."""

import json
from collections.abc import Iterator

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.support.engine_fleet import EngineFleet
from tests.support.servers import EngineSim, LlamaServer
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e

OPTIONS = {"decode_rate": 1000.0, "prefill_rate": 1e6, "auto_tool_choice": True}
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
MEDIA = {
    "image": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    "audio": {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    fleet = {"org/seer": {"model": "org/seer", "media_tokens": 100, **OPTIONS}, "pooled": {"model": "pooled", "runner": "pooling"}}
    fleet["thinker"] = {"model": "thinker", "reasoning": "reasoning_content", **OPTIONS}
    with EngineFleet(fleet) as running:
        yield dict(running.members)


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    with LlamaServer("--ctx", "2048", "--parallel", "2") as llama:
        pools = {
            "seer": {"model": "org/seer", "engine": "vllm", "nodes": [node("seer", engines["org/seer"].address)]},
            "pooled": {"model": "pooled", "engine": "vllm", "nodes": [node("pooled", engines["pooled"].address)]},
            "thinker": {"model": "thinker", "engine": "vllm", "nodes": [node("thinker", engines["thinker"].address)]},
            "llama": {"model": "smollm2", "engine": "llamacpp", "nodes": [node("llama", llama.address, max_seq_len=1024)]},
        }
        aliases = {"short": {"model": "org/seer"}}
        with Stack({"aliases": aliases, "pools": pools, "tenants": [tenant("acme"), tenant("other", models=("pooled",))]}) as running:
            yield running


@pytest.fixture(scope="module")
def client(stack) -> Iterator[httpx.Client]:
    with stack.client() as made:
        yield made


def chat(client: httpx.Client, **fields):
    reply = client.post("/v1/chat/completions", json={"model": "short", "messages": HELLO, "max_tokens": 4, **fields})
    assert reply.status_code == 200, reply.text
    return reply


def test_several_choices_come_whole_and_as_interleaved_chunks(client):
    whole = chat(client, n=3).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    texts = ["", "", ""]
    for event in events(chat(client, n=3, stream=True).text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole]


def test_log_probabilities_pass_in_either_form(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=2).json()["choices"]
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2] * 4
    reply = client.post("/v1/completions", json={"model": "short", "prompt": "x", "max_tokens": 2, "logprobs": 1})
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize("kind", MEDIA)
def test_media_are_passed_on_and_cost_what_the_model_says(client, engines, kind):
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, MEDIA[kind]]}
    answer = chat(client, messages=[message]).json()
    assert answer["usage"]["prompt_tokens"] > 100
    assert json.loads(engines["org/seer"].seen()[1][-1]["body"])["messages"] == [message]


def test_reasoning_comes_apart_from_the_answer_whole_and_in_deltas(client):
    message = chat(client, model="thinker", max_tokens=60).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    texts = dict.fromkeys(("reasoning_content", "content"), "")
    order = []
    for event in events(chat(client, model="thinker", max_tokens=60, stream=True).text):
        for channel in texts:
            piece = event["choices"][0]["delta"].get(channel) or ""
            texts[channel] += piece
            order += [channel] * bool(piece)
    assert texts == {channel: message[channel] for channel in texts}
    assert order == sorted(order, reverse=True), "all of the one, then all of the other"


def test_the_wished_for_form_of_an_answer_reaches_the_engine_byte_for_byte(client, engines):
    schema = (
        '"response_format" :{ "type":"json_schema","json_schema":{"name":"v","schema":{"type":"object","x":1.50,"pattern":"\\u0041/\\/"}}}'
    )
    body = f'{{"model":"org/seer","messages":[{{"role":"user","content":"hi"}}],"max_tokens":2, {schema} }}'
    reply = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text
    assert engines["org/seer"].seen()[1][-1]["body"] == body.encode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_engine_answers_in_json_of_the_schema_that_was_asked_for(client, stream):
    asked = {"model": "smollm2", "max_tokens": 60, "temperature": 0, "seed": 1, "response_format": FORMAT, "stream": stream}
    reply = chat(client, messages=[{"role": "user", "content": "Is the sky blue?"}], **asked)
    if stream:
        text = "".join(choice["delta"].get("content") or "" for event in events(reply.text) for choice in event["choices"])
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(text)), text


def test_a_real_engine_answers_with_json_when_any_will_do(client):
    asked = {"model": "smollm2", "max_tokens": 120, "temperature": 0, "response_format": {"type": "json_object"}}
    choice = chat(client, messages=[{"role": "user", "content": 'Answer {"a": 1}'}], **asked).json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("prompt", ["one", ["one", "two"], [5, 6, 7], [[5, 6], [7]]])
def test_prompts_are_texts_lists_or_token_ids(client, prompt):
    reply = client.post("/v1/completions", json={"model": "short", "prompt": prompt, "max_tokens": 2})
    assert reply.status_code == 200, reply.text
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(reply.json()["choices"]) == (len(prompt) if several else 1)


@pytest.mark.parametrize("given", ["one", ["one", "two"], [5, 6, 7], [[5, 6], [7]]])
def test_embeddings_are_of_texts_or_token_ids_with_as_many_numbers_as_asked_for(client, given):
    reply = client.post("/v1/embeddings", json={"model": "pooled", "input": given, "dimensions": 16})
    assert reply.status_code == 200, reply.text
    assert {len(entry["embedding"]) for entry in reply.json()["data"]} == {16}


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_under_jinas_path_and_coheres(client, path):
    reply = client.post(path, json={"model": "pooled", "query": "a cat", "documents": ["a dog", "a cat"], "top_n": 1})
    assert [result["index"] for result in reply.json()["results"]] == [1]


def test_models_are_listed_and_found_with_their_slashes_and_only_what_may_be_used(stack, client):
    listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert listed.keys() == {"org/seer", "pooled", "smollm2", "short", "thinker"}
    assert listed["short"]["alias_for"] == ["org/seer"]
    assert client.get("/v1/models/org/seer").json() == client.get("/v1/models/org%2Fseer").json() == listed["org/seer"]
    with stack.client("other") as limited:
        assert [model["id"] for model in limited.get("/v1/models").json()["data"]] == ["pooled"]
        assert limited.get("/v1/models/org/seer").status_code == 404


def test_head_and_empty_bodies_are_answered_at_once(client):
    got, headed = client.get("/v1/models"), client.head("/v1/models")
    assert (headed.status_code, headed.content, headed.headers["content-type"]) == (200, b"", got.headers["content-type"])
    assert client.post("/v1/chat/completions", content=b"").status_code == 400


def test_responses_and_messages_reach_an_engine_that_has_them(client):
    response = client.post("/v1/responses", json={"model": "smollm2", "input": "hello", "max_output_tokens": 4})
    assert (response.status_code, response.json()["object"]) == (200, "response"), response.text
    message = client.post("/v1/messages", json={"model": "smollm2", "messages": HELLO, "max_tokens": 4})
    assert (message.status_code, message.json()["type"]) == (200, "message"), message.text
    message = client.post("/v1/messages", json={"model": "short", "messages": HELLO, "max_tokens": 4})
    assert (message.status_code, message.json()["type"]) == (200, "message"), message.text


def test_llama_cpp_takes_its_own_name_for_a_penalty_and_counts_what_it_is_allowed(client):
    body = {"model": "smollm2", "messages": HELLO, "max_completion_tokens": 3, "repetition_penalty": 1.3, "temperature": 0}
    reply = client.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 3), reply.text
    refused = client.post("/v1/chat/completions", json={**body, "guided_regex": "a+"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    grammar = client.post("/v1/chat/completions", json={**body, "max_completion_tokens": 8, "guided_grammar": 'root ::= "yes" | "no"'})
    assert grammar.json()["choices"][0]["message"]["content"] in ("yes", "no")


def test_the_limit_in_an_engine_s_own_words_is_counted_as_the_engine_follows_it(stack, client):
    before = stack.all_accounted()["counts"]
    usage = chat(client, model="smollm2", max_tokens=1, n_predict=20).json()["usage"]
    assert usage["completion_tokens"] > 1, "llama.cpp follows its own word"
    charged = before["completion_tokens"] + usage["completion_tokens"]
    stack.eventually(lambda: stack.status()["counts"]["completion_tokens"] == charged, "it is charged")

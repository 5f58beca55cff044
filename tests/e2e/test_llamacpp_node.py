"""A real small model on llama.cpp's server, as the demo runs it: chat on one node, embeddings on another."""

import json

import pytest

from tests.support.servers import LlamaServer

pytestmark = pytest.mark.e2e
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def chat():
    with LlamaServer("--ctx", "2048", "--parallel", "2") as server:
        yield server


def test_a_real_model_answers_and_counts(chat):
    answer = json.loads(chat.ask("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}))
    assert answer["choices"][0]["message"]["content"].strip()
    counted = json.loads(chat.ask("POST", "/apply-template", {"messages": MESSAGES}))["prompt"]
    tokens = json.loads(chat.ask("POST", "/tokenize", {"content": counted, "parse_special": True}))["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_a_real_stream_ends_with_usage_and_marker(chat):
    body = {"messages": MESSAGES, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    events = chat.ask("POST", "/v1/chat/completions", body).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["usage"]["completion_tokens"] == 8


def test_a_real_node_has_health_load_and_its_name(chat):
    assert json.loads(chat.ask("GET", "/health")) == {"status": "ok"}
    assert b"llamacpp:requests_processing 0" in chat.ask("GET", "/metrics")
    assert json.loads(chat.ask("GET", "/v1/models"))["data"][0]["id"] == "smollm2"


def test_an_embedding_node_gives_a_vector_per_text():
    with LlamaServer("--ctx", "512", "--parallel", "1", "--embedding", "--pooling", "mean") as server:
        answer = json.loads(server.ask("POST", "/v1/embeddings", {"input": ["a node", "a gateway"]}))
    assert [len(item["embedding"]) for item in answer["data"]] == [576, 576]
    assert answer["usage"]["prompt_tokens"] > 0

"""The modelled engine beside a real vLLM 0.32: the same statuses, keys, types, framing and error texts for every captured exchange."""

import http.client
import json
import re
from pathlib import Path

import pytest

from tests.support.servers import EngineSim

CAPTURES = Path(__file__).parent.parent / "captures" / "vllm"
HI = [{"role": "user", "content": "Say hello to the world in one sentence."}]
LONG = [{"role": "user", "content": "word " * 600}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
USAGE = {"include_usage": True}
CHAT, TEXT, EMBED, RERANK = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"

# capture -> path and body of the request behind it
GENERATE = {
    "chat-nonstream": (CHAT, {"messages": HI, "max_tokens": 12}),
    "chat-logprobs": (CHAT, {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    "chat-n2": (CHAT, {"messages": HI, "max_tokens": 2, "n": 2}),
    "chat-stream-usage": (CHAT, {"messages": HI, "max_tokens": 5, "stream": True, "stream_options": USAGE}),
    "chat-stream-nousage": (CHAT, {"messages": HI, "max_tokens": 3, "stream": True}),
    "chat-stream-continuous-usage": (
        CHAT,
        {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}},
    ),
    "completions-nonstream": (TEXT, {"prompt": "the cat is a", "max_tokens": 5}),
    "completions-stream-usage": (TEXT, {"prompt": "the cat is a", "max_tokens": 3, "stream": True, "stream_options": USAGE}),
    "err-404": ("/v1/nothing", {}),
    "err-bad-max-tokens": (CHAT, {"messages": HI, "max_tokens": -3}),
    "err-bad-messages": (CHAT, {"messages": "hi"}),
    "err-bad-role": (CHAT, {"messages": [{"role": "alien", "content": "hi"}], "max_tokens": 2}),
    "err-bad-temp-range": (CHAT, {"messages": HI, "temperature": -3}),
    "err-bad-temp-type": (CHAT, {"messages": HI, "temperature": "hot"}),
    "err-context-completions": (TEXT, {"prompt": "hi", "max_tokens": 5000}),
    "err-context-maxtokens": (CHAT, {"messages": HI, "max_tokens": 5000}),
    "err-context-prompt": (CHAT, {"messages": LONG, "max_tokens": 2}),
    "err-context-prompt-stream": (CHAT, {"messages": LONG, "max_tokens": 2, "stream": True}),
    "err-embeddings-unsupported": (EMBED, {"input": "hi"}),
    "err-empty-messages": (CHAT, {"messages": []}),
    "err-image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
    "err-missing-messages": (CHAT, {}),
    "err-stream-options-without-stream": (CHAT, {"messages": HI, "stream_options": USAGE}),
    "err-tools-not-enabled": (CHAT, {"messages": HI, "tools": [TOOL]}),
    "err-unknown-model": (CHAT, {"model": "nope", "messages": HI}),
    "err-unknown-param": (CHAT, {"messages": HI, "max_tokens": 2, "frobnicate": 1}),
    "tokenize": ("/tokenize", {"messages": HI}),
}
POOLING = {
    "embeddings": (EMBED, {"input": ["hello world", "a panda is a bear"]}),
    "embeddings-base64": (EMBED, {"input": "hi", "encoding_format": "base64"}),
    "rerank": (RERANK, {"query": "what is a panda", "documents": ["hi", "a panda is a bear"]}),
    "score": ("/score", {"text_1": "what is a panda", "text_2": ["hi", "a panda is a bear"]}),
    "err-rerank-bad": (RERANK, {"query": "what is a panda"}),
    "err-embeddings-context": (EMBED, {"input": "word " * 300}),
    "err-chat-on-pooling": (CHAT, {"messages": HI}),
}
# vLLM counts prompts with the model's tokenizer, and both answer with their own text: these differ, their types don't.
FREE = {"id", "created", "content", "text", "tokens", "count", "prompt_tokens", "completion_tokens", "total_tokens", "token", "logprob"}
FREE |= {"bytes", "relevance_score", "score", "embedding", "system_fingerprint", "arguments", "finish_reason"}
OPEN_HEADERS = {"date", "content-length"}


def captured(name: str) -> tuple[int, dict[str, str], bytes]:
    head, _, body = (CAPTURES / f"{name}.txt").read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")
    lines = head.decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def shape(value: object, key: str = "") -> object:
    """A document with its free values replaced by their types; a list of numbers by the type of its first."""
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [type(value[0]).__name__] if key in FREE and value else [shape(item, key) for item in value]
    return type(value).__name__ if key in FREE and value is not None else value


def events(body: bytes) -> list[object]:
    """The shapes of a stream's events; the tokens between the first two and the last are as many as there are."""
    assert body.endswith(b"\n\n")
    parts = body.strip(b"\n").split(b"\n\n")
    assert all(part.startswith(b"data: ") for part in parts)
    return [part.decode() if part == b"data: [DONE]" else shape(json.loads(part[6:])) for part in parts]


def ask(server: EngineSim, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def tiny():
    with EngineSim(model="tiny-llama", served_model=["tiny"], max_model_len=512, decode_rate=500) as server:
        yield server


@pytest.fixture(scope="module")
def minilm():
    with EngineSim(model="all-minilm", served_model=["minilm"], runner="pooling", max_model_len=256) as server:
        yield server


def answered_as_captured(server: EngineSim, name: str, model: str, path: str, body: dict[str, object]) -> bool:
    status, headers, expected = captured(name)
    sent = json.dumps({"model": model, **body}).encode()
    got = ask(server, "POST", path, sent, {"content-type": "application/json"})
    assert {k: v for k, v in got[1].items() if k not in OPEN_HEADERS} == {k: v for k, v in headers.items() if k not in OPEN_HEADERS}
    if "event-stream" in headers["content-type"]:
        assert events(got[2]) == events(expected)
    elif b'"error"' in expected:
        assert json.loads(got[2]) == json.loads(expected)
    else:
        assert shape(json.loads(got[2])) == shape(json.loads(expected))
        assert list(json.loads(got[2])) == list(json.loads(expected)), "the order of keys"
    return got[0] == status


@pytest.mark.parametrize("name", GENERATE)
def test_a_generating_engine_answers_as_captured(name, tiny):
    assert answered_as_captured(tiny, name, "tiny", *GENERATE[name])


@pytest.mark.parametrize("name", POOLING)
def test_a_pooling_engine_answers_as_captured(name, minilm):
    assert answered_as_captured(minilm, name, "minilm", *POOLING[name])


def test_bad_json_is_refused_at_the_captured_position(tiny):
    got = ask(tiny, "POST", CHAT, b'{"model":nope', {"content-type": "application/json"})
    assert json.loads(got[2]) == json.loads(captured("err-bad-json")[2])


def test_a_wrong_content_type_is_refused_as_captured(tiny):
    status, _, expected = captured("err-content-type")
    got = ask(tiny, "POST", CHAT, b"{}", {"content-type": "text/plain"})
    assert (got[0], json.loads(got[2])) == (status, json.loads(expected))


def test_a_wrong_method_is_refused_as_captured(tiny):
    status, headers, expected = captured("err-405")
    got = ask(tiny, "GET", CHAT, b"", {})
    assert (got[0], got[1]["allow"], got[2]) == (status, headers["allow"], expected)


def test_a_wrong_key_is_refused_as_captured():
    with EngineSim(api_key="secret") as server:
        status, _, expected = captured("err-unauthorized")
        got = ask(server, "GET", "/v1/models", b"", {"authorization": "Bearer wrong"})
        assert (got[0], got[2]) == (status, expected)
        assert ask(server, "GET", "/v1/models", b"", {"authorization": "Bearer secret"})[0] == 200


@pytest.mark.parametrize(("name", "path"), [("health", "/health"), ("load", "/load"), ("models", "/v1/models"), ("version", "/version")])
def test_the_pages_are_as_captured(name, path, tiny):
    status, _, expected = captured(name)
    got = ask(tiny, "GET", path, b"", {})
    assert got[0] == status
    assert (shape(json.loads(got[2])) if got[2] else b"") == (shape(json.loads(expected)) if expected else b"")


def test_a_request_id_comes_back_in_the_answer_s_id(tiny):
    body = json.dumps({"messages": HI, "max_tokens": 2}).encode()
    got = ask(tiny, "POST", CHAT, body, {"content-type": "application/json", "x-request-id": "my-id-1"})
    assert json.loads(got[2])["id"] == json.loads(captured("request-id")[2])["id"]


def test_a_forced_tool_is_cut_short_by_the_length_as_captured(tiny):
    name = "smollm2-tool-forced"
    body = json.dumps({"messages": HI, "max_tokens": 4, **FORCED}).encode()
    got = json.loads(ask(tiny, "POST", CHAT, body, {"content-type": "application/json"})[2])
    expected = json.loads(captured(name)[2])
    assert shape(got["choices"]) == shape(expected["choices"])


def test_a_forced_tool_streams_with_the_captured_call_event(tiny):
    body = json.dumps({"messages": HI, "max_tokens": 60, "stream": True, **FORCED}).encode()
    got = events(ask(tiny, "POST", CHAT, body, {"content-type": "application/json"})[2])
    expected = events(captured("smollm2-tool-forced-stream")[2])
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        assert ours | {"model": ""} == theirs | {"model": ""}
    assert got[-2]["choices"][0] == expected[-2]["choices"][0], "what ended it is free"


def test_an_answer_that_ends_by_itself_spends_a_token_without_text(tiny):
    body = {"messages": HI, "stream": True, "stream_options": USAGE}
    got = events(ask(tiny, "POST", CHAT, json.dumps(body).encode(), {"content-type": "application/json"})[2])
    expected = events(captured("smollm2-chat-stream-usage")[2])
    assert got[-3]["choices"] == expected[-3]["choices"]
    assert got[-3]["choices"][0]["delta"] == {}


def test_an_engine_that_dies_says_so_inside_the_stream_as_captured(tiny):
    tiny.fail("error_event:after=2,count=1")
    body = json.dumps({"prompt": "the cat", "max_tokens": 9, "stream": True}).encode()
    got = ask(tiny, "POST", TEXT, body, {"content-type": "application/json"})[2]
    assert got.split(b"\n\n")[-3:] == captured("stream-engine-killed")[2].split(b"\n\n")[-3:]


def test_an_engine_that_dies_answers_a_whole_request_as_captured(tiny):
    status, _, expected = captured("nonstream-engine-killed")
    tiny.fail(f"oom:count=1,message={json.loads(expected)['error']['message']}")
    got = ask(tiny, "POST", CHAT, json.dumps({"messages": HI}).encode(), {"content-type": "application/json"})
    assert (got[0], json.loads(got[2])) == (status, json.loads(expected))


def test_a_terminated_engine_ends_its_streams_as_captured():
    with EngineSim(model="tiny-llama", served_model=["tiny"], decode_rate=50) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = json.dumps({"prompt": "the cat", "max_tokens": 2000, "stream": True})
        connection.request("POST", TEXT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.readline()
        server.process.terminate()
        got = events(b"data: " + response.read().partition(b"data: ")[2])
        connection.close()
    expected = events(captured("stream-sigterm")[2])
    assert got[-1] == expected[-1] == "data: [DONE]"
    assert b'"finish_reason":"abort","stop_reason":null' in captured("stream-sigterm")[2]
    assert got[-2] | {"model": ""} == expected[-2] | {"model": ""}


def families(text: str) -> dict[str, set[tuple[str, ...]]]:
    """Metric name -> the label names it comes with."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, labels in re.findall(r"^(vllm:\w+)\{([^}]*)\}", text, re.MULTILINE):
        found.setdefault(name, set()).add(tuple(sorted(re.findall(r"(\w+)=", labels))))
    return found


def test_metrics_have_vllm_s_names_types_labels_and_buckets(tiny):
    tiny.ask("POST", CHAT, {"messages": HI, "max_tokens": 2})
    ours, theirs = tiny.ask("GET", "/metrics").decode(), (CAPTURES / "metrics.txt").read_text()
    mine, real = families(ours), families(theirs)
    for name, labels in mine.items():
        if name != "vllm:cache_config_info":
            assert real.get(name) == labels, name
    types = set(re.findall(r"^# TYPE (vllm:.*)$", ours, re.MULTILINE))
    assert types <= set(re.findall(r"^# TYPE (vllm:.*)$", theirs, re.MULTILINE))
    bounds = r'^vllm:{}_bucket\{{engine="0",le="([^"]+)",model_name="tiny"\}}'
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "iteration_tokens_total"):
        pattern = bounds.format(name)
        assert re.findall(pattern, ours, re.MULTILINE) == re.findall(pattern, theirs, re.MULTILINE)

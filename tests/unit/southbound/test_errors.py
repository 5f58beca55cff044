"""Errors in every engine's own words, and in none: each becomes one of the gateway's, keeps its status class, and tells no secrets."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.verdict import RefusalCode
from din_extproc.southbound.error_body import READ_BYTES, ParsedError, parse_error
from din_extproc.southbound.errors import NodeError, normalise_error, parse_retry_after
from din_extproc.southbound.wordings import WORDINGS

CAPTURES = Path(__file__).parents[2] / "captures"
TOO_LONG = ("context_length_exceeded", 400)
INVALID = ("invalid_request", 400)
NOT_SERVED = ("path_not_found", 404)
REFUSED = ("upstream_error", 401)
FAULT = ("upstream_error", 502)
CAPTURED = {
    "llamacpp/err-404": (*NOT_SERVED, None),
    "llamacpp/err-bad-json": (*INVALID, None),
    "llamacpp/err-bad-temp": (*INVALID, None),
    "llamacpp/err-bad-type": (*INVALID, None),
    "llamacpp/err-chat-on-embedding-model": (*NOT_SERVED, None),
    "llamacpp/err-context": (*TOO_LONG, None),
    "llamacpp/err-context-stream": (*TOO_LONG, None),
    "llamacpp/err-embeddings-long": (*TOO_LONG, None),
    "llamacpp/err-embeddings-off": (*NOT_SERVED, None),
    "llamacpp/err-missing-messages": (*INVALID, None),
    "llamacpp/err-n-too-many": (*INVALID, None),
    "llamacpp/err-rerank-off": (*NOT_SERVED, None),
    "llamacpp/err-unauthorized": (*REFUSED, None),
    "ollama/err-404": (*NOT_SERVED, None),
    "ollama/err-bad-json": (*INVALID, None),
    "ollama/err-context": (*TOO_LONG, None),
    "ollama/err-messages-type": (*INVALID, None),
    "ollama/err-openai-option-type": (*INVALID, None),
    "ollama/err-openai-unknown-model": ("model_not_found", 404, None),
    "ollama/err-option-type": (*INVALID, None),
    "ollama/err-tools": (*INVALID, None),
    "ollama/err-unknown-model": ("model_not_found", 404, None),
    "vllm/err-404": (*NOT_SERVED, None),
    "vllm/err-405": (*NOT_SERVED, None),
    "vllm/err-bad-json": (*INVALID, "9"),
    "vllm/err-bad-max-tokens": (*INVALID, "max_tokens"),
    "vllm/err-bad-messages": (*INVALID, "messages"),
    "vllm/err-bad-temp-range": (*INVALID, "temperature"),
    "vllm/err-bad-temp-type": (*INVALID, "temperature"),
    "vllm/err-chat-on-pooling": (*NOT_SERVED, None),
    "vllm/err-content-type": (*INVALID, None),
    "vllm/err-context-completions": (*TOO_LONG, "max_tokens"),
    "vllm/err-context-maxtokens": (*TOO_LONG, "max_tokens"),
    "vllm/err-context-prompt": (*TOO_LONG, "input_tokens"),
    "vllm/err-context-prompt-stream": (*TOO_LONG, "input_tokens"),
    "vllm/err-embeddings-context": (*TOO_LONG, "input_tokens"),
    "vllm/err-embeddings-unsupported": (*NOT_SERVED, None),
    "vllm/err-empty-messages": (*INVALID, None),
    "vllm/err-image": (*INVALID, None),
    "vllm/err-missing-messages": (*INVALID, "messages"),
    "vllm/err-rerank-bad": (*INVALID, "documents"),
    "vllm/err-stream-options-without-stream": (*INVALID, "stream_options"),
    "vllm/err-tools-not-enabled": (*INVALID, None),
    "vllm/err-unauthorized": (*REFUSED, None),
    "vllm/err-unknown-model": ("model_not_found", 404, None),
    "vllm/nonstream-engine-killed": (*FAULT, None),
}


def captured(name: str) -> tuple[int, bytes]:
    head, _, body = (CAPTURES / f"{name}.txt").read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")
    return int(head.split()[1]), body


def normalised(engine: str, status: int, body: object, asked_s: int | None = None) -> NodeError:
    return normalise_error(engine, status, parse_error(body if isinstance(body, bytes) else json.dumps(body).encode()), asked_s)


def code(engine: str, status: int, body: object) -> tuple[str, int]:
    found = normalised(engine, status, body)
    return found.code.code, found.status


def openai(message: str, status: int = 400, type_: str = "BadRequestError") -> dict:
    return {"error": {"message": message, "type": type_, "param": None, "code": status}}


# Captures


def test_every_captured_error_is_in_the_table():
    names = [f"{file.parent.name}/{file.stem}" for file in CAPTURES.glob("*/*.txt") if file.read_bytes().startswith(b"HTTP/")]
    assert {name for name in names if captured(name)[0] >= 400} == CAPTURED.keys()


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_error_has_the_right_code_status_and_parameter(name):
    status, body = captured(name)
    found = normalised(name.partition("/")[0], status, body)
    assert (found.code.code, found.status, found.param) == CAPTURED[name]
    assert found.message


# Other engines, word for word as their sources have them

SGLANG = "The input (4500 tokens) is longer than the model's context length (4096 tokens)."
SGLANG_SUM = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5096 tokens: 1096 tokens "
    "from the input messages and 4000 tokens for the completion. Please reduce the number of tokens in the input messages."
)
TGI = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 1000 `max_new_tokens`"
TRT = "Prompt length (5000) exceeds maximum input length (2048). Set log level to info and check TRTGptModel logs for how it is set"
IN_TRITON = (
    "in ensemble 'ensemble', Executor failed process requestId 7 due to the following error: Encountered an error when fetching new "
    f"request: {TRT}"
)


@pytest.mark.parametrize(
    ("engine", "status", "body"),
    [
        (
            "vllm",
            400,
            openai("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"),
        ),
        ("vllm", 400, {"object": "error", "message": "This model's maximum context length is 4096 tokens. However,", "code": 400}),
        ("vllm", 400, openai("The decoder prompt (length 8357) is longer than the maximum model length of 8192. Make sure that")),
        ("vllm", 400, openai("'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 8192")),
        ("sglang", 400, {"object": "error", "message": SGLANG, "type": "BadRequestError", "param": None, "code": 400}),
        ("sglang", 400, openai(SGLANG_SUM)),
        ("tgi", 422, {"error": TGI, "error_type": "validation"}),
        (
            "tgi",
            422,
            {"error": "Input validation error: `inputs` must have less than 1024 tokens.", "error_type": "validation"},
        ),
        ("ollama", 400, {"error": "the input length exceeds the context length"}),
        ("ollama", 500, {"error": "input length exceeds maximum context length"}),
        ("ollama", 400, {"error": "prompt too long; exceeded max context length by 12 tokens"}),
        ("tensorrt_llm", 400, {"object": "error", "message": TRT, "type": "BadRequestError", "param": None, "code": 400}),
        ("tensorrt_llm", 400, openai("The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)")),
        ("triton", 500, {"error": IN_TRITON}),
        ("vllm", 400, openai("litellm.ContextWindowExceededError: litellm.BadRequestError: This model's maximum context length is")),
        ("vllm", 400, {"error": {"message": "too long", "code": "context_length_exceeded"}}),
        ("llamacpp", 500, openai("input is too large to process. increase the physical batch size", 500, "server_error")),
    ],
)
def test_a_context_that_is_too_short_is_reported_in_one_code_whoever_says_it(engine, status, body):
    assert code(engine, status, body) == TOO_LONG
    assert code("llamacpp", status, body) == TOO_LONG, "behind a pool that says another engine, too"


def test_a_parameter_of_the_wrong_type_is_the_client_s_fault_with_ollama_too():
    assert code("ollama", 500, {"error": 'option "temperature" must be of type float32'}) == ("invalid_request", 400)


@pytest.mark.parametrize(
    "message",
    [
        "Invalid message: 'This model's maximum context length is 4096 tokens.'",
        "Unknown role 'maximum context length'",
        "messages[0].content: the input length exceeds the context length, he said",
        "1 validation error:\n  {'type': 'list_type', 'loc': 'body.messages', 'input': 'Context Window exceeded'}",
    ],
)
def test_a_prompt_that_is_quoted_in_an_error_is_not_taken_for_one(message):
    for engine in WORDINGS:
        assert code(engine, 400, openai(message)) == INVALID


@pytest.mark.parametrize(
    ("engine", "status", "body"),
    [
        ("vllm", 500, openai("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB", 500)),
        ("sglang", 500, openai("torch.OutOfMemoryError: CUDA out of memory.", 500)),
        ("tgi", 424, {"error": "Request failed during generation: Server error: CUDA out of memory.", "error_type": "generation"}),
        (
            "tgi",
            424,
            {"error": "Server error: Not enough memory to handle 4096 prefill tokens.", "error_type": "generation"},
        ),
        ("ollama", 500, {"error": "model requires more system memory (5.6 GiB) than is available (4.1 GiB)"}),
        ("ollama", 500, {"error": "llama runner process has terminated: cudaMalloc failed: out of memory"}),
        ("triton", 500, {"error": "CUDA error: out of memory"}),
        ("llamacpp", 500, b"failed to allocate compute buffers"),
    ],
)
def test_a_node_without_memory_is_a_503_with_its_time(engine, status, body):
    found = normalised(engine, status, body)
    assert (found.code, found.status, found.retry_after_s) == (RefusalCode.INSUFFICIENT_GPU_CAPACITY, 503, 5)
    assert normalised(engine, status, body, asked_s=30).retry_after_s == 30


def test_a_request_that_speaks_of_memory_is_none():
    assert code("vllm", 400, openai("Unknown tool 'CUDA out of memory'")) == INVALID


@pytest.mark.parametrize(
    ("engine", "status", "body"),
    [
        ("vllm", 429, openai("slow down", 429)),
        ("tgi", 429, {"error": "Model is overloaded", "error_type": "overloaded"}),
        ("sglang", 503, openai("The request queue is full.", 503)),
        ("ollama", 503, {"error": "server busy, please try again.  maximum pending requests exceeded"}),
        ("triton", 503, {"error": "Exceeds maximum queue size"}),
        ("vllm", 429, b"<html><h1>Too many</h1></html>"),
    ],
)
def test_a_busy_node_is_distinguished_from_a_tenants_own_limit(engine, status, body):
    found = normalised(engine, status, body)
    assert (found.code.code, found.status, found.retry_after_s) == ("upstream_busy", 429, 1)
    assert normalised(engine, status, body, asked_s=7).retry_after_s == 7


@pytest.mark.parametrize(
    ("engine", "status", "body", "expected"),
    [
        ("ollama", 404, {"error": "model 'llama9' not found"}, ("model_not_found", 404)),
        ("ollama", 400, {"error": '"llama3" does not support embeddings'}, NOT_SERVED),
        ("triton", 400, {"error": "Request for unknown model: 'x' is not found"}, ("model_not_found", 404)),
        ("tgi", 424, {"error": "Request failed during generation: Server error: Unexpected", "error_type": "generation"}, FAULT),
        ("tgi", 422, {"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"}, INVALID),
        ("llamacpp", 503, openai("Loading model", 503, "unavailable_error"), ("upstream_error", 503)),
        ("vllm", 503, b"", ("upstream_error", 503)),
        ("vllm", 529, b"", ("upstream_error", 503)),
        ("vllm", 504, b"", ("upstream_timeout", 504)),
        ("vllm", 408, b"", ("upstream_timeout", 504)),
        ("vllm", 413, b"", ("request_too_large", 413)),
        ("vllm", 415, b"", ("unsupported_media", 415)),
        ("vllm", 409, b"", ("invalid_request", 409)),
        ("vllm", 418, b"", ("invalid_request", 418)),
        ("vllm", 599, b"", FAULT),
    ],
)
def test_the_rest_follows_the_status(engine, status, body, expected):
    assert code(engine, status, body) == expected


# What it is wrapped in


@pytest.mark.parametrize(
    "body",
    [
        {"error": "no such thing"},
        {"detail": "no such thing"},
        {"message": "no such thing"},
        {"errors": [{"message": "no such thing"}]},
        [{"error": {"message": "no such thing"}}],
        {"error": {"error": {"error": {"message": "no such thing"}}}},
        {"error": {"message": json.dumps({"error": {"message": "no such thing"}})}},
        {"error": {"message": "Error code: 400 - " + json.dumps({"error": {"message": json.dumps({"detail": "no such thing"})}})}},
        "no such thing",
        json.dumps({"error": {"message": "no such thing"}}),
    ],
)
def test_the_innermost_message_is_reported(body):
    assert parse_error(json.dumps(body).encode()).message == "no such thing"


def test_a_double_encoded_error_keeps_what_only_the_outside_says_and_prefers_the_inside():
    inner = {"error": {"message": "inner", "param": "body.temperature"}}
    found = parse_error(json.dumps({"error": {"message": f"Upstream: {json.dumps(inner)}", "type": "outer", "param": None}}).encode())
    assert found == ParsedError("inner", "outer", "", "temperature")


def test_what_fastapi_finds_names_its_field():
    found = parse_error(b'{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required"}]}')
    assert (found.message, found.param) == ("messages: Field required", "messages")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "ollama", "tgi"])
def test_a_404_of_an_engine_keeps_its_sentence(engine):
    found = normalised(engine, 404, openai("Response with id 'resp_1' not found.", 404, "invalid_request_error"))
    assert (found.status, found.message) == (404, "Response with id 'resp_1' not found.")


def test_braces_in_a_sentence_are_not_an_error_inside_it():
    message = "1 validation error: {'type': 'missing'} and {\"a\": 1}"
    assert parse_error(json.dumps(openai(message)).encode()).message == message


def test_our_own_body_is_known_as_such():
    found = parse_error(b'{"code":"trace_missing","type":"urn:din-extproc:error:trace_missing"}')
    assert (found.is_gateway_error, found.code) == (True, "trace_missing")


# What is no error body at all


PAGE = b"<html><head><title>502</title></head><body>nginx at 10.1.2.3</body></html>" + b"<!-- padding -->" * 5000


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (502, PAGE, FAULT),
        (503, b"", ("upstream_error", 503)),
        (403, b"", ("upstream_error", 403)),
        (500, b"\xff\xfe{\xc3", FAULT),
        (504, b"upstream request timeout", ("upstream_timeout", 504)),
        (429, PAGE, ("upstream_busy", 429)),
    ],
)
def test_no_json_keeps_its_class_and_shows_nothing_of_itself(status, body, expected):
    found = normalised("vllm", status, body)
    assert (found.code.code, found.status) == expected
    assert found.code.type == "server_error"
    assert len(found.message) < 100
    assert not {"<", "nginx", "10.1.2.3"} & set(found.message.split())


def test_a_sentence_about_a_request_is_short_clean_and_names_no_place_of_the_network():
    found = normalised("vllm", 400, openai("bad\r\n\x00value at http://10.0.0.7:8000/v1 and 10.0.0.8:8000 " + "x" * 5000))
    assert len(found.message) <= 1000
    assert found.message.startswith("bad \n value at (address) and (address) xxx")
    assert normalised("vllm", 500, openai("Traceback: /opt/engine.py", 500)).message == "The node answered with an error (500)."
    assert normalised("vllm", 400, b"model cannot do that\nTraceback").message == "model cannot do that"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("0", 1),
        ("0.3", 1),
        ("86400", 3600),
        ("Thu, 01 Jan 1970 00:16:47 GMT", 7),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 1),
        ("", None),
        ("soon", None),
        ("7 apples", None),
        ("Thu, 99 Jan 1970 00:16:47 GMT", None),
    ],
)
def test_a_time_is_seconds_or_a_date(text, seconds):
    assert parse_retry_after(text, wall=1000.0) == seconds


# Bounds


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 30_000 + b"]" * 30_000,
        b'{"error":' * 7_000 + b"1" + b"}" * 7_000,
        json.dumps({"error": "{" * 60_000}).encode(),
        json.dumps({"error": '{"error":' * 6_000}).encode(),
        b'{"error":"' + b"x" * READ_BYTES + b'"}',
    ],
)
def test_a_bomb_is_an_error_like_any_other(body):
    assert normalised("vllm", 400, body).code is RefusalCode.INVALID_REQUEST


names = st.text() | st.sampled_from(["error", "message", "type", "code", "param", "detail", "loc", "msg"])
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(names, inner)
)


@given(st.integers(400, 599), json_values.map(lambda value: json.dumps(value).encode()) | st.binary())
def test_whatever_comes_is_an_error_with_a_status_of_its_class_or_of_its_meaning(status, body):
    found = normalised("vllm", status, body)
    assert 400 <= found.status < 600
    assert found.message
    assert len(found.message) <= 1000
    found.message.encode()


def test_a_context_error_inside_other_errors_is_found_at_any_depth():
    context = "This model's maximum context length is 40960 tokens"
    inner = json.dumps({"error": {"message": context}})
    wrapped = {"error": {"code": "error", "message": "generic failure", "value": {"error_message": inner}}}
    found = parse_error(json.dumps(wrapped).encode())
    assert found.message == context
    assert parse_error(json.dumps({"message": "generic failure", "value": 5}).encode()).message == "generic failure"


def test_an_error_that_is_reported_shows_neither_addresses_nor_files_but_paths_of_the_api():
    error_text = "failed at http://10.1.2.3:8000/x 10.0.0.7:22 [fd00::1]:80 gpu-1.internal:8000 in /root/secret/key.pem; see /v1/models"
    message = parse_error(json.dumps({"error": {"message": error_text}}).encode()).message
    assert message == "failed at (address) (address) (address) (address) in (path); see /v1/models"

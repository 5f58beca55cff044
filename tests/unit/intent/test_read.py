import gzip
import json
import zlib

import pytest

from din_extproc.domain.request import Operation, Priority, RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode, error_body
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.intent.splice import splice_values

LIMIT = 4 << 20
GAUGE = TokenCalibrator(media_tokens=500)


def reading(body, path="/v1/chat/completions", *, method="POST", limit=LIMIT, **headers):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_request(RequestHead(method, path, named), body, lambda _model: GAUGE, limit)


def intent(body, path="/v1/chat/completions", **headers):
    found = reading(body, path, **headers)
    assert isinstance(found, ParsedRequest), found
    return found.intent


def chat(*messages, **fields):
    return {"model": "m", "messages": list(messages), **fields}


def user(content):
    return {"role": "user", "content": content}


def refusal(found, code=RefusalCode.INVALID_REQUEST, param=None):
    assert isinstance(found, Refusal), found
    assert found.code is code
    assert found.param == param
    return found


HELLO = chat(user("hello"))


def test_a_chat_is_read_with_its_headers():
    headers = {"x-task-tier": "extraction", "x-din-priority": "batch", "x-din-timeout-ms": "1500", "x-din-model-version": ">=2025.3,<2026"}
    headers |= {"x-din-budget-tokens": "4000", "x-din-budget-cost": "0.02"}
    found = intent(chat(user("hello"), stream=True, max_tokens=7, n=3, stream_options={"include_usage": True}), **headers)
    assert found.operation is Operation.CHAT
    assert (found.model, found.stream, found.wants_usage, found.output_tokens) == ("m", True, True, 21)
    assert (found.task_tier, found.priority, found.timeout_ms, found.version) == ("extraction", Priority.BATCH, 1500, ">=2025.3,<2026")
    assert (found.budget_tokens, found.budget_cost) == (4000, 20_000_000)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "", "abc", "٣", "9999999999", "nan"])
def test_a_timeout_is_a_positive_whole_number(value):
    assert refusal(reading(HELLO, x_din_timeout_ms=value), param="x-din-timeout-ms")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("tokens", "0"),
        ("tokens", "1.5"),
        ("tokens", ""),
        ("cost", ""),
        ("cost", "-1"),
        ("cost", "1e9"),
        ("cost", "0.02 USD"),
        ("cost", "٣"),
    ],
)
def test_a_budget_is_a_number_of_tokens_or_an_amount_of_money(header, value):
    assert refusal(reading(HELLO, **{f"x_din_budget_{header}": value}), param=f"x-din-budget-{header}")


@pytest.mark.parametrize("value", ["", "urgent", "CRITICAL", "critical,batch"])
def test_a_priority_is_one_of_three_words(value):
    assert refusal(reading(HELLO, x_din_priority=value), param="x-din-priority")


def test_models_are_listed_and_looked_up_without_a_body():
    for path, name in (("/v1/models", ""), ("/v1/models/a/b", "a/b")):
        found = reading(b"", path, method="GET").intent
        assert (found.operation, found.model, found.prompt_tokens) == (Operation.MODELS, name, 0)


@pytest.mark.parametrize(
    "content",
    [
        [
            {"type": "image", "image": "data:image/png;base64,iVBOR" + "A" * 5000},
            {"type": "input_audio", "input_audio": {"data": "UklGR" * 1000, "format": "wav"}},
            {"type": "text", "text": "hi"},
        ],
        [{"type": "vendor_thing", "x": 1}, {"type": "other", "blob": "A" * 9000}, {"type": "text", "text": "hi"}],
        ["hi", {"type": "image_url", "image_url": {"url": "data:" + "A" * 9000}}, {}, None, 3],
    ],
)
def test_unknown_parts_pass_and_cost_a_bounded_constant(content):
    body = json.dumps(chat(user(content))).encode()
    found = reading(body)
    assert found.body == body
    assert 1000 <= found.intent.prompt_tokens < 1050
    assert found.intent.estimate.fixed == 1000


def test_nulls_count_nothing_and_tool_calls_count():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": None}}]
    body = chat(
        user("x"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "y", "tool_calls": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
        tools=None,
        stop=None,
        stream_options=None,
    )
    few = intent(body).prompt_tokens
    assert 0 < few < 80
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Paris " * 100})
    some = intent(body).prompt_tokens
    assert some > few + 80
    body["tools"] = [{"type": "function", "function": {"name": "f", "description": "Looks up the weather. " * 50, "parameters": {}}}]
    assert intent(body).prompt_tokens > some + 150


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_the_model_thought_before_counts_once(field):
    def tokens(**fields) -> int:
        return intent(chat(user("x"), {"role": "assistant", "content": "y", **fields}, user("z"))).prompt_tokens

    thought = "so it is " * 100
    assert tokens(**{field: thought}) > tokens() + 200
    assert tokens(reasoning_content=thought, reasoning=thought) == tokens(**{field: thought})


def test_documents_for_a_chat_count():
    assert intent(chat(user("x"), documents=[{"text": "so it is " * 100}])).prompt_tokens > 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 312_500}},
        {"type": "input_audio", "input_audio": {"data": "UklGRiQA" * 312_500, "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64," + "JVBERi0x" * 312_500}},
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "tool_result"])
def test_media_cost_a_constant_and_not_their_bytes(part, role):
    words = {"type": "text", "text": "twenty words of text " * 5}
    parts = [words, {"type": "tool_result", "content": [part]}] if role == "tool_result" else [words, part]
    found = intent(chat({"role": role, "content": parts}))
    assert 500 < found.prompt_tokens < 600


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ([15339, 1917], 2, 2),
        ([[1, 2, 3], [4]], 4, 4),
        ([[1, 2, 3], []], 3, 3),
        ([], 0, 0),
        ([[]], 0, 0),
        (["a", ""], 1, 40),
        ("a", 1, 20),
        ([1, "a"], 1, 40),
        (["a", [1, 2, 3]], 3, 40),
        ([{"text": "hello"}, {"image": "data:" + "A" * 9000}], 500, 560),
        (None, 0, 0),
        ({"a": "b"}, 0, 20),
        (7, 0, 0),
    ],
)
def test_embedding_inputs_count_as_what_they_are(value, low, high):
    body = json.dumps({"model": "e", "input": value}).encode()
    found = reading(body, "/v1/embeddings")
    assert low <= found.intent.prompt_tokens <= high
    assert found.body == body
    assert found.intent.output_tokens == 0


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("once upon a time", 1),
        (["once", "upon"], 2),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        (["a", [1]], 2),
        ([[1, 2]], 1),
        (["a"], 1),
        (None, 1),
    ],
)
def test_completion_prompts_come_in_four_shapes_and_each_has_an_answer(value, prompts):
    found = intent({"model": "m", "prompt": value, "max_tokens": 5}, "/v1/completions")
    assert (found.output_tokens, found.answers, found.output_each) == (5 * prompts, prompts, 5)
    assert found.prompt_tokens < 60
    without = intent({"model": "m", "prompt": value, "n": 3}, "/v1/completions")
    assert (without.output_tokens, without.answers, without.output_each) == (None, 3 * prompts, None)


def test_a_rerank_counts_its_query_and_its_documents():
    small = intent({"model": "r", "query": "panda", "documents": ["hi"]}, "/v1/rerank").prompt_tokens
    large = intent({"model": "r", "query": "panda", "documents": ["the giant panda " * 50, {"text": "a bear " * 50}]}, "/v1/rerank")
    assert large.prompt_tokens > small + 200


def test_responses_and_anthropic_messages_are_read():
    found = intent({"model": "m", "input": "hello", "instructions": "be brief " * 20, "max_output_tokens": 9}, "/v1/responses")
    assert (found.operation, found.output_tokens) == (Operation.RESPONSES, 9)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "word " * 100}]}, {"type": "function_call_output", "output": "x"}]
    assert intent({"model": "m", "input": items}, "/v1/responses").prompt_tokens > 80
    blocks = [{"type": "tool_use", "input": {"city": "Paris"}}, {"type": "thinking", "thinking": "hm " * 100}]
    found = intent({"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": [user(blocks)]}, "/v1/messages")
    assert found.output_tokens == 3
    assert found.prompt_tokens > 60


@pytest.mark.parametrize("lone", ["\\ud83d", "\\ude00", "\\ud83d\\ud83d", "\\uD83D tail"])
def test_half_a_surrogate_pair_in_text_is_forwarded_as_sent(lone):
    body = f'{{"model":"m","user":"u{lone}","messages":[{{"role":"user","content":"cut {lone}"}},'.encode()
    body += f'{{"role":"assistant","tool_calls":[{{"function":{{"arguments":"{lone}"}}}}]}}]}}'.encode()
    found = reading(body)
    assert found.body == body
    assert splice_values(found.body, found.outline, {"model": b'"other"'}) == body.replace(b'"m"', b'"other"')
    error_body(RefusalCode.INTERNAL_ERROR, found.intent.model, trace_id="")


@pytest.mark.parametrize("model", ["m\\ud83d", "\\ude00", "\\ud83d\\ud83d\\ude00"])
def test_half_a_surrogate_pair_in_the_model_is_refused(model):
    assert refusal(reading(f'{{"model":"{model}","messages":[]}}'.encode()), param="model")


@pytest.mark.parametrize(
    "fields",
    [
        b'"temperature":NaN',
        b'"max_tokens":Infinity',
        b'"x":-Infinity',
        b'"max_tokens":1e999',
        b'"max_completion_tokens":1e999',
        b'"max_tokens":' + b"9" * 5000,
        b'"max_tokens":2e12',
    ],
)
def test_numbers_that_are_none_are_refused(fields):
    assert refusal_code(reading(b'{"model":"m",%b,"messages":[]}' % fields)) is RefusalCode.INVALID_REQUEST


def refusal_code(found):
    assert isinstance(found, Refusal)
    return found.code


@pytest.mark.parametrize(
    "deep",
    [
        b"[" * 20_000 + b"]" * 20_000,
        b"[" * 600 + b"]" * 600,
        b'{"properties":' * 1500 + b"{}" + b"}" * 1500,
    ],
)
@pytest.mark.parametrize("place", [b'"x":%b,"messages":[]', b'"messages":[{"role":"user","content":%b}]', b'"messages":[],"tools":[%b]'])
def test_very_deep_json_is_refused(deep, place):
    found = reading(b'{"model":"m",%b}' % (place % deep))
    assert refusal_code(found) is RefusalCode.INVALID_REQUEST
    assert "deep" in found.message


def test_moderately_deep_schemas_pass():
    schema = {"type": "string"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    assert intent(chat(user("x"), tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])).prompt_tokens > 100


@pytest.mark.parametrize("coding", ["gzip", "GZIP", " gzip ", "x-gzip"])
def test_gzip_is_decoded_and_says_so(coding):
    body = json.dumps(HELLO).encode()
    found = reading(gzip.compress(body), content_encoding=coding)
    assert found.decoded
    assert found.body == body
    assert found.intent == reading(body).intent
    assert not reading(body, content_encoding="identity").decoded


def test_gzip_in_several_members_is_one_body():
    body = json.dumps(HELLO).encode()
    assert reading(gzip.compress(body[:9]) + gzip.compress(body[9:]), content_encoding="gzip").body == body
    assert refusal_code(reading(gzip.compress(b" ") * 100 + gzip.compress(body), content_encoding="gzip")) is RefusalCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not gzip",
        gzip.compress(b"{}", mtime=0)[:-3],
        gzip.compress(b"{}", mtime=0) + b"junk",
        b"\x1f\x8b" + b"\0" * 30,
        zlib.compress(b"{}"),
    ],
)
def test_corrupt_gzip_is_refused(body):
    assert refusal(reading(body, content_encoding="gzip"), param="content-encoding")


@pytest.mark.parametrize("coding", ["zstd", "br", "deflate", "gzip, gzip", "gzip,br", "*"])
def test_other_codings_are_unsupported(coding):
    assert refusal(reading(HELLO, content_encoding=coding), RefusalCode.UNSUPPORTED_MEDIA, "content-encoding")


def test_a_decompression_bomb_is_cut_off():
    assert refusal(reading(gzip.compress(b" " * (64 << 20)), content_encoding="gzip"), RefusalCode.REQUEST_TOO_LARGE)
    assert refusal(reading(b" " * (LIMIT + 1)), RefusalCode.REQUEST_TOO_LARGE)


def test_unknown_fields_pass_untouched():
    body = (
        b'{"model":"alias","chat_template_kwargs":{"enable_thinking":false},"stream":true,"stream_options":{"step_usage_chunks":true},'
        b'"seed":9007199254740993,"temperature":0.10,"store":false,"messages":[{"role":"user","content":"x"}]}'
    )
    assert reading(body).body == body


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(b"true", True), (b"false", False), (b"null", False), (b'"true"', False), (b"1", False), (b"[true]", False)],
)
def test_only_the_boolean_true_streams(stream, expected):
    body = b'{"model":"m","stream":%b,"stream_options":{"include_usage":true},"messages":[]}' % stream
    found = reading(body)
    assert found.intent.stream is expected
    assert found.body == body


def test_an_accept_header_does_not_make_a_stream():
    assert not intent(HELLO, accept="text/event-stream").stream


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(b"null", False), (b"{}", False), (b'{"include_usage":true}', True), (b'{"include_usage":"true"}', False), (b"true", False)],
)
def test_usage_is_wanted_by_the_boolean_true(options, wanted):
    assert intent(b'{"model":"m","messages":[],"stream_options":%b}' % options).wants_usage is wanted


def test_usage_wanted_and_not_wanted_at_once_is_refused():
    body = b'{"model":"m","messages":[],"stream_options":{"include_usage":true,"include_usage":false}}'
    assert refusal(reading(body), param="stream_options")


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"max_completion_tokens": 4000}, 4000),
        ({"max_tokens": 10, "max_completion_tokens": 4000}, 4000),
        ({"max_completion_tokens": 4000, "max_tokens": 10}, 4000),
        ({"max_tokens": 10, "max_completion_tokens": None}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 0}, 10),
        ({"max_tokens": 10, "max_completion_tokens": "x"}, 10),
        ({"max_tokens": 10, "max_completion_tokens": -5}, 10),
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 10.5}, None),
        ({"max_tokens": 10.0}, 10),
        ({"max_tokens": 10, "n": 4}, 40),
        ({"max_tokens": 10, "n": None}, 10),
        ({"max_tokens": 10, "n": 0}, 10),
        ({"max_tokens": 10**12, "n": 10**12}, 10**12),
        ({"n": 4}, None),
        ({"max_tokens": 10, "n": 2, "best_of": 5}, 50),
        ({"max_tokens": 10, "n": 2, "best_of": 1}, 20),
        ({"max_tokens": 10, "n_cmpl": 3}, 30),
        ({"max_tokens": 10, "n_predict": 120}, 120),
        ({"max_tokens": 10, "max_completion_tokens": 20, "num_predict": 15}, 20),
        ({"max_tokens": 10, "max_new_tokens": 40, "n": 2}, 80),
        ({"max_tokens": 10, "n_predict": "many"}, 10),
        ({"max_tokens": -1, "n_predict": 120}, None),
        ({"n_predict": 1}, None),
    ],
)
def test_the_effective_output(fields, output):
    assert intent(chat(user("x"), **fields)).output_tokens == output


@pytest.mark.parametrize(
    ("path", "fields", "most", "least"),
    [
        ("/v1/chat/completions", {"max_tokens": 10, "max_completion_tokens": 400}, 400, 400),
        ("/v1/chat/completions", {"max_tokens": 400, "max_completion_tokens": 10}, 10, 10),
        ("/v1/chat/completions", {"max_tokens": 5000, "n": 2}, 10_000, 5000),
        ("/v1/chat/completions", {"max_tokens": 5000, "n_predict": 7}, 5000, 7),
        ("/v1/completions", {"prompt": "x", "max_tokens": 400, "max_completion_tokens": 1}, 400, 1),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 400}, 400, 1),
        ("/v1/completions", {"prompt": "x", "max_completion_tokens": 1}, None, None),
        ("/v1/completions", {"prompt": ["x"] * 40, "max_tokens": 400}, 16_000, 400),
        ("/v1/completions", {"prompt": ["x"] * 40, "max_tokens": 400, "n": 2, "best_of": 3}, 48_000, 400),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3, "n_predict": 9}, 9, 3),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3, "max_completion_tokens": 9}, 9, 3),
        ("/v1/embeddings", {"input": ["a", "b"], "max_tokens": 9, "n": 4}, 0, 0),
    ],
)
def test_what_any_engine_may_give_is_reserved_and_what_all_engines_need_must_fit(path, fields, most, least):
    found = intent({"model": "m", "messages": [], **fields}, path)
    assert (found.output_tokens, found.output_each) == (most, least)


LONG, SHORT = "the giant panda eats bamboo " * 40, "hello"
CHINESE = "分布式推理网络把许多显卡节点连成一个整体。" * 20


@pytest.mark.parametrize(
    ("path", "body", "alone"),
    [
        ("/v1/embeddings", {"input": [SHORT] * 150 + [LONG] + [SHORT] * 49}, {"input": LONG}),
        ("/v1/embeddings", {"input": ["x" * 500, CHINESE, "y" * 300]}, {"input": CHINESE}),
        ("/v1/embeddings", {"input": [[1] * 5, [2] * 300, [], [3]]}, {"input": [2] * 300}),
        ("/v1/embeddings", {"input": [SHORT, [7] * 9000, LONG]}, {"input": [[7] * 9000]}),
        ("/v1/embeddings", {"input": [{"text": SHORT}, {"text": LONG}, SHORT]}, {"input": LONG}),
        ("/v1/rerank", {"query": "which bear", "documents": [SHORT] * 200 + [LONG]}, {"query": "which bear", "documents": [LONG]}),
        ("/v1/rerank", {"query": "q", "documents": [{"text": LONG}, {"text": SHORT}]}, {"query": "q", "documents": [{"text": LONG}]}),
        ("/v1/completions", {"prompt": [LONG] * 4}, {"prompt": LONG}),
        ("/v1/completions", {"prompt": [[5] * 90, [6] * 30]}, {"prompt": [5] * 90}),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_several_inputs_cost_their_sum_and_the_longest_has_to_fit(path, body, alone, ascii_only):
    every = intent(json.dumps({"model": "m", **body}, ensure_ascii=ascii_only).encode(), path).estimate
    one = intent({"model": "m", **alone}, path).estimate
    assert one.longest is None
    assert every.tokens > one.tokens
    assert (every.longest.tokens, every.longest.fixed) == (pytest.approx(one.tokens, abs=10), one.fixed)


def test_a_query_is_read_again_with_every_document():
    def tokens(query, documents):
        return intent({"model": "r", "query": query, "documents": documents}, "/v1/rerank").prompt_tokens

    once = tokens(LONG, [SHORT]) - tokens("q", [SHORT])
    assert once > 100
    assert tokens(LONG, [SHORT] * 50) - tokens("q", [SHORT] * 50) == pytest.approx(50 * once, rel=0.1)
    assert tokens(LONG, [{"text": SHORT}] * 50) - tokens("q", [{"text": SHORT}] * 50) == pytest.approx(50 * once, rel=0.1)


def test_none_of_several_inputs_without_separate_counts_is_too_long():
    many = {"model": "m", "input": [{"text": "word"}] * 5000}
    assert intent(many, "/v1/embeddings").estimate.longest.tokens == 0
    images = {"model": "m", "input": [{"image": "A" * 9000}] * 3}
    assert intent(images, "/v1/embeddings").estimate.longest.tokens == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","messages":[{"role":"user","content":"' + b"SECRET " * 700_000 + b'"},]}', None),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"m","messages":"SECRET"}', "messages"),
        (b'{"model":"m","messages":{"SECRET":1}}', "messages"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"","messages":[]}', "model"),
        (b'{"model":7,"messages":[]}', "model"),
        (b'{"model":null,"messages":[]}', "model"),
        (b'{"model":["SECRET"],"messages":[]}', "model"),
        (b'{"model":"a\\nSECRET","messages":[]}', "model"),
        (b'{"model":"\\u0000","messages":[]}', "model"),
        (b'{"model":"' + b"x" * 257 + b'","messages":[]}', "model"),
        (b'{"model":"a","messages":[],"model":"b"}', "model"),
        (b'{"model":"a","messages":[],"messages":[1]}', "messages"),
        (b'["SECRET"]', None),
        (b'"hello SECRET"', None),
        (b"", None),
        (b'\xef\xbb\xbf{"model":"m","messages":[]}', None),
        ('{"model":"SECRET"}'.encode("utf-16"), None),
        (b"model=SECRET", None),
    ],
)
def test_a_bad_body_is_refused_shortly_and_without_its_text(body, param):
    found = refusal(reading(body, limit=8 << 20), param=param)
    answer = error_body(found.code, found.message, trace_id="t", param=found.param)
    assert len(answer) < 2000
    assert b"SECRET" not in answer


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"]
)
def test_json_with_parameters_is_json(content_type):
    assert intent(HELLO, content_type=content_type).model == "m"


@pytest.mark.parametrize(
    "content_type", ["text/plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_content_types_are_refused(content_type):
    assert refusal(reading(HELLO, content_type=content_type), param="content-type")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [["hi"]],
        [None, 1, True, {}],
        [{"role": "user"}],
        [{"content": {"type": "text", "text": "x"}}],
        [{"content": 7}],
        [user([[[[[["deep"]]]]]])],
        [user([{"type": "tool_result", "content": [{"content": [{"content": [{"content": [{"content": "x"}]}]}]}]}])],
        [{}] * 10_000,
        [user([{}] * 10_000)],
        [user(["x"] * 10_000)],
    ],
)
def test_odd_messages_are_the_engines_business(messages):
    body = json.dumps(chat(*messages)).encode()
    assert reading(body).body == body


def test_ascii_escapes_and_utf8_give_the_same_size():
    text = "分布式推理网络把许多显卡节点连成一个整体。" * 50
    plain = intent(json.dumps(chat(user(text)), ensure_ascii=False).encode())
    escaped = intent(json.dumps(chat(user(text))).encode())
    assert plain.estimate == escaped.estimate


def test_a_number_in_quotes_counts_as_engines_count_it():
    assert intent(chat(user("hello"), max_tokens="2", n="300")).output_tokens == 600
    assert intent(chat(user("hello"), max_tokens="many", n=2)).output_tokens is None


@pytest.mark.parametrize(
    ("spelled", "output"),
    [('"1\\u0030"', 10), ('"1_0"', 10), ('"+7"', 7), ('" 7 "', 7), ('"007"', 7), ('"1e3"', 1000)]
    + [(text, None) for text in ('"5 tokens"', '"1abc"', '"1-1"', '"1 0"', '"1x\\ud83d"', '""', '"inf"', '"0x1"', '"1e"')],
)
def test_a_limit_in_quotes_is_a_number_or_the_engines_business(spelled, output):
    body = f'{{"model":"m","messages":[],"max_tokens":{spelled}}}'.encode()
    assert intent(body).output_tokens == output


@pytest.mark.parametrize("n", ['"2x"', '"1-1"', '"2 choices"', "1e400"])
def test_choices_that_are_no_number_are_the_engines_business(n):
    assert intent(f'{{"model":"m","messages":[],"max_tokens":3,"n":{n}}}'.encode()).output_tokens == 3


@pytest.mark.parametrize("content_type", ["application/json, application/json", "application/json,APPLICATION/JSON", "application/json"])
def test_a_content_type_that_comes_twice_with_one_value_counts_once(content_type: str) -> None:
    assert isinstance(reading(HELLO, content_type=content_type), ParsedRequest)


def test_two_different_content_types_are_refused() -> None:
    assert refusal(reading(HELLO, content_type="application/json, text/plain"), param="content-type")


def test_background_responses_are_refused_and_foreground_ones_pass() -> None:
    asked = {"model": "m", "input": "hello", "store": True}
    assert refusal(reading({**asked, "background": True}, "/v1/responses"), param="background")
    for background in (False, None):
        assert isinstance(reading({**asked, "background": background}, "/v1/responses"), ParsedRequest)


SCREENSHOT = "data:image/png;base64," + "iVBORw0KGgo" * 40_000


@pytest.mark.parametrize(
    "item",
    [
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": SCREENSHOT}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "input_image", "image_url": SCREENSHOT}},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": SCREENSHOT}]},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": SCREENSHOT}]},
        {"type": "image_generation_call", "id": "i", "result": SCREENSHOT},
    ],
)
def test_a_picture_in_a_tool_s_output_costs_a_constant(item) -> None:
    found = reading({"model": "m", "input": [{"role": "user", "content": "look"}, item]}, "/v1/responses")
    assert (found.prompt.media, found.intent.estimate.fixed) == (1, 500)
    assert found.intent.prompt_tokens < 550


def test_a_tool_s_output_that_is_an_object_of_text_counts_as_text() -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": {"answer": "word " * 4000}}
    assert intent({"model": "m", "input": [item]}, "/v1/responses").prompt_tokens > 3000


@pytest.mark.parametrize(
    ("source", "media"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "word " * 20_000}, 0),
        ({"type": "content", "content": [{"type": "text", "text": "word " * 20_000}]}, 0),
        ({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0" * 20_000}, 1),
        ({"type": "url", "url": "https://example.org/a.pdf"}, 1),
    ],
)
def test_a_text_document_counts_as_text_and_any_other_as_a_medium(source, media) -> None:
    part = {"type": "document", "source": source}
    found = reading({"model": "m", "messages": [user([part])], "max_tokens": 5}, "/v1/messages")
    assert found.prompt.media == media
    assert (found.intent.prompt_tokens > 15_000) == (not media)


@pytest.mark.parametrize(
    ("path", "fields", "longest", "total"),
    [
        ("/v1/embeddings", {"input": "word " * 3000, "truncate_prompt_tokens": 512}, 512, 512),
        ("/v1/embeddings", {"input": ["word " * 3000] * 3, "truncate_prompt_tokens": 512}, 512, 1536),
        ("/v1/embeddings", {"input": "a word", "truncate_prompt_tokens": 512}, 20, 20),
        ("/v1/rerank", {"query": "q", "documents": ["word " * 3000, "b"], "truncate_prompt_tokens": 100}, 100, 200),
    ],
)
def test_a_prompt_that_the_engine_is_asked_to_cut_counts_as_what_is_left(path, fields, longest, total) -> None:
    found = intent({"model": "m", **fields}, path)
    assert (found.estimate.longest or found.estimate).tokens <= longest
    assert found.prompt_tokens <= total + 7
    assert found.truncates is False
    assert found.estimate.features == (), "there is nothing to learn from it"


@pytest.mark.parametrize(
    ("path", "fields", "truncates"),
    [
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": -1}, True),
        ("/v1/responses", {"input": "x", "truncation": "auto"}, True),
        ("/v1/responses", {"input": "x", "truncation": "disabled"}, False),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": None}, False),
    ],
)
def test_cutting_to_the_context_is_asked_for_by_these_words(path, fields, truncates) -> None:
    assert intent({"model": "m", **fields}, path).truncates is truncates

"""OpenAI's words to Ollama's own and back."""

import json

import pytest

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.ollama import OLLAMA
from tests.support.dialects import OK, ask, asked, streamed, text_of

CHAT, TEXT, VECTORS = Operation.CHAT, Operation.COMPLETIONS, Operation.EMBEDDINGS
HELLO = [{"role": "user", "content": "hello"}]


def test_sampling_goes_into_options_under_ollamas_names():
    path, body, _ = ask(
        OLLAMA,
        CHAT,
        messages=HELLO,
        max_completion_tokens=9,
        temperature=0.5,
        repetition_penalty=1.1,
        stop="x",
        seed=7,
        user="u",
        stream=False,
    )
    assert path == "/api/chat"
    assert body == {
        "model": "m",
        "messages": HELLO,
        "stream": False,
        "shift": False,
        "truncate": False,
        "options": {"num_predict": 9, "temperature": 0.5, "repeat_penalty": 1.1, "stop": ["x"], "seed": 7},
    }


def test_the_newer_limit_of_a_chat_wins_wherever_it_stands_and_completions_have_none():
    for fields in ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_completion_tokens": 9, "max_tokens": 5}):
        assert ask(OLLAMA, CHAT, messages=HELLO, **fields)[1]["options"] == {"num_predict": 9}
        assert ask(OLLAMA, TEXT, prompt="x", **fields).param == "max_completion_tokens"
        _, body, dropped = ask(OLLAMA, TEXT, prompt="x", drop=True, **fields)
        assert (body["options"], dropped) == ({"num_predict": 5}, ("max_completion_tokens",))
    assert ask(OLLAMA, CHAT, messages=HELLO, max_completion_tokens=0, max_tokens=5)[1]["options"] == {"num_predict": 5}
    assert "set the same option" in ask(OLLAMA, CHAT, messages=HELLO, guided_json={"a": 1}, response_format={"type": "json_object"}).message


def test_formats_become_the_schema_or_json():
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(OLLAMA, CHAT, messages=HELLO, response_format=wanted)[1]["format"] == schema
    assert ask(OLLAMA, CHAT, messages=HELLO, response_format={"type": "json_object"})[1]["format"] == "json"
    assert "format" not in ask(OLLAMA, CHAT, messages=HELLO, response_format={"type": "text"})[1]


def test_images_stand_beside_the_text_and_must_be_in_the_request():
    def message(url):
        return [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]}]

    _, body, _ = ask(OLLAMA, CHAT, messages=message("data:image/png;base64,aGk="))
    assert body["messages"] == [{"role": "user", "content": "see", "images": ["aGk="]}]
    assert ask(OLLAMA, CHAT, messages=message("https://x/y.png")).param == "messages"


def test_a_tools_result_names_the_tool_whose_call_it_answers():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    _, body, _ = ask(OLLAMA, CHAT, messages=history, tools=[{"type": "function"}])
    assert body["messages"][1]["tool_calls"] == [{"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert body["messages"][2] == {"role": "tool", "content": "2", "tool_name": "add", "tool_call_id": "c1"}
    assert "tools" not in ask(OLLAMA, CHAT, messages=HELLO, tools=[{}], tool_choice="none")[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 2), ("logit_bias", {"1": 2}), ("tool_choice", "required"), ("guided_regex", "a+"), ("min_tokens", 3), ("anything", True)],
)
def test_an_unsupported_parameter_is_refused_or_dropped_and_named(name, value):
    refusal = ask(OLLAMA, CHAT, messages=HELLO, **{name: value})
    assert isinstance(refusal, Refusal)
    assert refusal.param == name
    _, body, dropped = ask(OLLAMA, CHAT, messages=HELLO, drop=True, **{name: value})
    assert dropped == (name,)
    assert f"'{name}'" not in str(body)


@pytest.mark.parametrize(
    ("name", "value"), [("n", 1), ("logit_bias", {}), ("tool_choice", "auto"), ("n", None), ("parallel_tool_calls", True)]
)
def test_what_asks_for_nothing_is_left_out_without_a_word(name, value):
    assert ask(OLLAMA, CHAT, messages=HELLO, **{name: value})[2] == ()


def test_completions_and_embeddings_have_their_own_paths():
    path, body, _ = ask(OLLAMA, TEXT, prompt=["once"], max_tokens=3, stream=True)
    assert (path, body["prompt"], body["raw"], body["stream"]) == ("/api/generate", "once", True, True)
    path, body, _ = ask(OLLAMA, VECTORS, input=["a", "b"], dimensions=8, encoding_format="base64")
    assert (path, body) == ("/api/embed", {"model": "m", "input": ["a", "b"], "truncate": False, "dimensions": 8})
    assert ask(OLLAMA, VECTORS, input=[1, 2]).param == "input"
    assert ask(OLLAMA, TEXT, prompt=["a", "b"]).param == "prompt"


def test_a_whole_chat_becomes_openais():
    body = {"message": {"role": "assistant", "content": "hi", "thinking": "hm"}, "done": True, "done_reason": "length"}
    made = json.loads(OLLAMA.translate_answer(asked(), OK, json.dumps({**body, "prompt_eval_count": 3, "eval_count": 2}).encode()))
    assert made["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None, "reasoning_content": "hm"}
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_tool_calls_have_text_arguments_and_an_id():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    body = json.dumps({"message": {"content": "", "tool_calls": [call]}, "done": True, "done_reason": "stop"}).encode()
    choice = json.loads(OLLAMA.translate_answer(asked(), OK, body))["choices"][0]
    made = {"id": "call_id1_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert (choice["finish_reason"], choice["message"]["content"], choice["message"]["tool_calls"]) == ("tool_calls", None, [made])
    events = streamed(OLLAMA, asked(), body)
    assert events[1]["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **made}]}
    assert events[2]["choices"][0]["finish_reason"] == "tool_calls"


def test_lines_become_events_with_role_text_end_usage_and_done():
    lines = [b'{"message":{"role":"assistant","content":"a"},"done":false}\n', b'{"message":{"content":" b"},"done":false}\n']
    last = b'{"message":{"content":""},"done":true,"done_reason":"stop","prompt_eval_count":1,"eval_count":2}\n'
    events = streamed(OLLAMA, asked(), *lines, last)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "a b"
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("line", [b'{"error":"the runner is gone"}\n', b"nonsense\n", b"[]\n", b'{"done":"no"}\n', b"\xff\n"])
def test_an_error_in_the_stream_is_reported_in_band_and_nothing_follows_it(line):
    events = streamed(OLLAMA, asked(), b'{"message":{"content":"a"}}\n', line, b'{"message":{"content":"b"}}\n')
    assert events[-2]["error"]["code"] == "upstream_error"
    assert events[-1] == "[DONE]"
    assert text_of(events) == "a"


def test_a_stream_that_breaks_off_says_no_end_of_its_own():
    assert "[DONE]" not in streamed(OLLAMA, asked(), b'{"message":{"content":"a"}}\n')


def test_embeddings_as_numbers_and_as_base64():
    body = b'{"embeddings":[[0.5,1.0]],"prompt_eval_count":2}'
    made = json.loads(OLLAMA.translate_answer(asked(VECTORS), OK, body))
    assert made["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
    assert made["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert json.loads(OLLAMA.translate_answer(asked(VECTORS, encoding_format="base64"), OK, body))["data"][0]["embedding"] == "AAAAPwAAgD8="


def test_a_number_that_base64_cant_hold_is_no_embedding():
    body = b'{"embeddings":[[1e39,0.5]],"prompt_eval_count":2}'
    assert OLLAMA.translate_answer(asked(VECTORS, encoding_format="base64"), OK, body) is None
    assert json.loads(OLLAMA.translate_answer(asked(VECTORS), OK, body))["data"][0]["embedding"] == [1e39, 0.5]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"error":"x"}', b'{"done":true,"message":3}', b"\xff"])
def test_an_answer_that_is_none_is_none(body):
    assert OLLAMA.translate_answer(asked(), OK, body) is None

"""Clients of Anthropic's Messages API in front of engines that speak OpenAI's chat completions."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.request import Operation
from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.engines import find_dialect, openai_operations
from din_extproc.southbound.messages import messages_over_chat
from tests.support.dialects import OK, ask, asked

PLAIN = messages_over_chat({})
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USAGE = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}


def chat_of(engine: str = "", **fields: Any) -> dict[str, Any]:
    dialect = find_dialect(engine, "openai", Operation.MESSAGES) if engine else PLAIN
    path, body, _ = ask(dialect, Operation.MESSAGES, **{"messages": HELLO, "max_tokens": 9, **fields})
    assert path == "/v1/chat/completions"
    return body


def chunks(*deltas: dict[str, Any], reason: str = "stop", usage: dict[str, Any] | None = USAGE, done: bool = True) -> bytes:
    content: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    content.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    content += [{"choices": [], "usage": usage}] if usage else []
    events = [*map(json.dumps, content), *(["[DONE]"] if done else [])]
    return b"".join(f"data: {event}\n\n".encode() for event in events)


def events_of(*parts: bytes) -> list[dict[str, Any]]:
    translator = PLAIN.create_translator(asked(Operation.MESSAGES))
    whole = b"".join([*map(translator.feed, parts), translator.end()])
    events = []
    for event in whole.split(b"\n\n")[:-1]:
        name, _, data = event.partition(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def test_a_message_becomes_a_chat_with_openais_names():
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
    made = chat_of(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        stop_sequences=["x"],
        temperature=0.5,
        metadata={"user_id": "u1"},
        tools=tools,
        tool_choice=choice,
        thinking={"type": "disabled"},
        stream=True,
    )
    assert made == {
        "model": "m",
        "messages": [{"role": "system", "content": "a\nb"}, *HELLO],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "user": "u1",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat_of(tools=tools, tool_choice={"type": "any"})["tool_choice"] == "required"


def test_calls_their_results_and_images_keep_their_place():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [{"type": "text", "text": "rain"}]}
    made = chat_of(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "look"}, image, linked]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
    )["messages"]
    urls = [part["image_url"]["url"] for part in made[0]["content"] if part["type"] == "image_url"]
    assert urls == ["data:image/png;base64,AA==", "https://x/y.png"]
    function = {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert made[1:] == [
        {"role": "assistant", "content": "so", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]


def test_each_engine_is_asked_by_its_own_names():
    assert chat_of("tgi")["max_tokens"] == 9
    assert ask(find_dialect("openai", "openai", Operation.MESSAGES), Operation.MESSAGES, messages=HELLO, top_k=5).param == "top_k"
    assert [find_dialect(name, "openai", Operation.MESSAGES) for name in ("vllm", "ollama", "llamacpp")] == [None] * 3
    assert find_dialect("anthropic", "native", Operation.MESSAGES) is None
    assert all(Operation.MESSAGES in (openai_operations(name) or ()) for name in ("openai", "azure_openai", "tgi", "tensorrt_llm"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice"),
    ],
)
def test_what_openai_has_not_is_refused(fields, param):
    refused = ask(PLAIN, Operation.MESSAGES, **{"messages": HELLO, **fields})
    assert isinstance(refused, Refusal)
    assert refused.param == param


def test_what_may_be_dropped_is_reported():
    assert ask(PLAIN, Operation.MESSAGES, messages=HELLO, drop=True, thinking={"type": "enabled"})[2] == ("thinking",)


@pytest.mark.parametrize(
    ("message", "reason", "content", "stop_reason"),
    [
        ({"content": "Hi"}, "stop", [{"type": "text", "text": "Hi"}], "end_turn"),
        ({"content": "Hi"}, "length", [{"type": "text", "text": "Hi"}], "max_tokens"),
        ({"content": None, "refusal": "No"}, "stop", [{"type": "text", "text": "No"}], "refusal"),
        (
            {"content": "", "reasoning_content": "hm", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"a":1}'}}]},
            "stop",
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"a": 1}},
            ],
            "tool_use",
        ),
    ],
)
def test_a_completion_becomes_a_message(message, reason, content, stop_reason):
    body = json.dumps({"choices": [{"message": message, "finish_reason": reason}], "usage": USAGE}).encode()
    made = json.loads(PLAIN.translate_answer(asked(Operation.MESSAGES), OK, body) or b"")
    assert (made["type"], made["role"], made["content"], made["stop_reason"]) == ("message", "assistant", content, stop_reason)
    assert made["usage"] == {"input_tokens": 15, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5, "output_tokens": 7}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"choices":[]}', b'{"choices":[{"message":{"tool_calls":[{"function":{"arguments":"x"}}]}}]}']
)
def test_what_is_no_completion_is_no_message(body):
    assert PLAIN.translate_answer(asked(Operation.MESSAGES), OK, body) is None


def test_texts_and_parallel_calls_are_blocks_of_their_own():
    second = {**CALL, "index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}
    pieces = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"city":', '"Paris"}')]
    deltas = [{"role": "assistant", "content": ""}, {"content": "Let"}, {"content": " me"}]
    deltas += [{"tool_calls": [call]} for call in (CALL, *pieces, second)]
    made = events_of(chunks(*deltas, reason="tool_calls"))
    assert [event["type"] for event in made] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    opened = [event["content_block"] for event in made if event["type"] == "content_block_start"]
    assert [(block["type"], block.get("id")) for block in opened] == [("text", None), ("tool_use", "c1"), ("tool_use", "c2")]
    input_deltas = [(event["index"], event["delta"].get("partial_json")) for event in made if event["type"] == "content_block_delta"]
    assert input_deltas[2:] == [(1, '{"city":'), (1, '"Paris"}'), (2, "{}")]
    assert made[-2]["delta"]["stop_reason"] == "tool_use"
    assert made[-2]["usage"]["input_tokens"] == 15


def test_an_ending_without_mark_is_one_and_no_ending_is_none():
    whole = chunks({"content": "Hi"}, usage=None, done=False)
    assert [event["type"] for event in events_of(whole)[-2:]] == ["message_delta", "message_stop"]
    cut = whole[: whole.rindex(b"data:")]
    assert events_of(cut)[-1]["type"] == "content_block_delta", "the filter that reads the answer ends it with an error"
    assert events_of(cut + b"data: [DONE]\n\n")[-1]["type"] == "content_block_delta"


@pytest.mark.parametrize("broken", [b"data: {\n\n", b'data: {"error":{"message":"out of memory"}}\n\n', b'data: {"error":"no"}\n\n'])
def test_an_error_in_the_stream_is_anthropics_and_the_end(broken):
    made = events_of(chunks({"content": "Hi"}, done=False)[:60] + b"\n\n" + broken, broken)
    assert [event["type"] for event in made].count("error") == 1
    assert made[-1]["error"]["type"] == "api_error"


@given(places=st.lists(st.integers(min_value=0, max_value=2000), max_size=20))
def test_the_same_events_come_wherever_the_bytes_are_cut(places):
    data = chunks({"content": "é終"}, {"content": ' "b\\"'}, {"tool_calls": [CALL]}, reason="tool_calls")
    edges = sorted({0, len(data), *(place % len(data) for place in places)})
    parts = [data[start:end] for start, end in pairwise(edges)]
    assert events_of(*parts) == events_of(data)


@given(parts=st.lists(st.binary(max_size=60) | st.sampled_from([b"\n\n", b"data: ", b"[DONE]", b"{}", b'{"choices":[{}]}']), max_size=12))
def test_any_bytes_become_events_and_any_body_a_message_or_none(parts):
    assert all("type" in event for event in events_of(*parts))
    assert isinstance(PLAIN.translate_answer(asked(Operation.MESSAGES), OK, b"".join(parts)), bytes | None)

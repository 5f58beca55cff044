"""OpenAI's chats to Anthropic's Messages API and back."""

import json

import pytest

from din_extproc.domain.request import Operation
from din_extproc.southbound.anthropic import ANTHROPIC
from tests.support.anthropic_answers import ANSWER, CALL_ANSWER, encode_events, stream_events
from tests.support.dialects import OK, ask, asked, streamed, text_of

CHAT = Operation.CHAT
HELLO = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"location": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}]
TEXT_STREAM = encode_events(stream_events(ANSWER))
CALL_STREAM = encode_events(stream_events(CALL_ANSWER))


def body_of(**fields):
    return ask(ANTHROPIC, CHAT, **{"messages": HELLO, **fields})[1]


def test_a_chat_becomes_a_message_with_anthropics_names():
    fields = {"max_completion_tokens": 9, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop": "x", "user": "u1"}
    path, body, dropped = ask(ANTHROPIC, CHAT, messages=HELLO, stream=True, **fields)
    assert (path, dropped) == ("/v1/messages", ())
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 0.5,
        "top_p": 0.9,
        "stop_sequences": ["x"],
        "stream": True,
        "metadata": {"user_id": "u1"},
    }
    assert body_of()["max_tokens"] == 4096


@pytest.mark.parametrize(
    ("name", "value"), [("n", 2), ("temperature", 1.5), ("seed", 3), ("logit_bias", {"1": 1}), ("response_format", {"type": "json_object"})]
)
def test_what_anthropic_has_not_is_refused_or_dropped(name, value):
    assert ask(ANTHROPIC, CHAT, messages=HELLO, **{name: value}).param == name
    assert ask(ANTHROPIC, CHAT, messages=HELLO, drop=True, **{name: value})[2] == (name,)


def test_system_and_developer_messages_are_the_system_prompt():
    made = body_of(messages=[{"role": "system", "content": "a"}, *HELLO, {"role": "developer", "content": [{"type": "text", "text": "b"}]}])
    assert (made["system"], [turn["role"] for turn in made["messages"]]) == ("a\nb", ["user"])


def test_parallel_calls_and_their_results_are_one_turn_each():
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": '{"location": "x"}'}} for name in ("c1", "c2")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": "rain"} for name in ("c1", "c2")]
    turns = body_of(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results, *HELLO], tools=TOOLS)[
        "messages"
    ]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == [
        {"type": "tool_use", "id": name, "name": "get_weather", "input": {"location": "x"}} for name in ("c1", "c2")
    ]
    rain = [{"type": "text", "text": "rain"}]
    assert turns[2]["content"] == [
        {"type": "tool_result", "tool_use_id": "c1", "content": rain},
        {"type": "tool_result", "tool_use_id": "c2", "content": rain},
        {"type": "text", "text": "hi"},
    ]
    calls[0]["function"]["arguments"] = "no object"
    assert ask(ANTHROPIC, CHAT, messages=[{"role": "assistant", "tool_calls": calls}]).param == "messages"


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ("auto", {"type": "auto"}),
        ("required", {"type": "any"}),
        ("none", {"type": "none"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"type": "tool", "name": "get_weather"}),
    ],
)
def test_tools_and_their_choice_have_anthropics_form(choice, made):
    body = body_of(tools=TOOLS, tool_choice=choice)
    assert body["tools"] == [{"name": "get_weather", "description": "d", "input_schema": PARAMETERS}]
    assert body["tool_choice"] == made
    single = body_of(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)["tool_choice"]
    assert single == (made if choice == "none" else {**made, "disable_parallel_tool_use": True})
    assert ask(ANTHROPIC, CHAT, messages=HELLO, tools=[{"type": "web_search"}]).param == "tools"


def test_images_are_blocks_by_address_or_by_content():
    def parts(url):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    (block,) = body_of(messages=parts("data:image/png;base64,aGk="))["messages"][0]["content"]
    assert block == {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    (block,) = body_of(messages=parts("https://x/y.png"))["messages"][0]["content"]
    assert block["source"] == {"type": "url", "url": "https://x/y.png"}
    assert ask(ANTHROPIC, CHAT, messages=parts("ftp://x")).param == "messages"


@pytest.mark.parametrize("messages", [3, [3], [{"role": "user", "content": 3}], [{"role": "system", "content": [{"type": "image_url"}]}]])
def test_malformed_messages_are_refused(messages):
    assert ask(ANTHROPIC, CHAT, messages=messages).param == "messages"


def test_a_whole_answer_is_a_chat_completion_with_all_input_tokens():
    made = json.loads(ANTHROPIC.translate_answer(asked(), OK, json.dumps(ANSWER).encode()))
    (choice,) = made["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello there!", "stop")
    tokens = {"prompt_tokens": 30, "completion_tokens": 6, "total_tokens": 36}
    assert made["usage"] == {**tokens, "prompt_tokens_details": {"cached_tokens": 15}}
    for body in (b"no json", b'{"type":"error"}', b"[]", b'{"type":"message","content":3}'):
        assert ANTHROPIC.translate_answer(asked(), OK, body) is None


def test_a_tool_use_is_a_tool_call():
    made = json.loads(ANTHROPIC.translate_answer(asked(), OK, json.dumps(CALL_ANSWER).encode()))
    (choice,) = made["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [(call["id"], json.loads(call["function"]["arguments"])) for call in choice["message"]["tool_calls"]] == [
        ("toolu_1", {"location": "Paris"}),
        ("toolu_2", {}),
    ]


@pytest.mark.parametrize(
    ("reason", "made"), [("max_tokens", "length"), ("stop_sequence", "stop"), ("refusal", "content_filter"), ("pause_turn", "stop")]
)
def test_stop_reasons_have_openais_names(reason, made):
    answer = {**ANSWER, "stop_reason": reason}
    assert json.loads(ANTHROPIC.translate_answer(asked(), OK, json.dumps(answer).encode()))["choices"][0]["finish_reason"] == made
    assert streamed(ANTHROPIC, asked(), encode_events(stream_events(answer)))[-3]["choices"][0]["finish_reason"] == made


def test_a_stream_is_chunks_with_usage_at_the_end():
    events = streamed(ANTHROPIC, asked(), TEXT_STREAM)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "Hello there!"
    whole = json.loads(ANTHROPIC.translate_answer(asked(), OK, json.dumps(ANSWER).encode()))
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert (events[-2]["usage"], events[-1]) == (whole["usage"], "[DONE]")


def test_streamed_tool_calls_join_to_the_whole_ones():
    deltas = [event["choices"][0]["delta"] for event in streamed(ANTHROPIC, asked(), CALL_STREAM)[:-2]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    joined = ["".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index) for index in (0, 1)]
    assert [json.loads(text) for text in joined] == [{"location": "Paris"}, {}]
    assert [piece["id"] for piece in pieces if "id" in piece] == ["toolu_1", "toolu_2"]


@pytest.mark.parametrize("stream", [TEXT_STREAM, CALL_STREAM], ids=["text", "calls"])
def test_a_stream_cut_anywhere_gives_the_same(stream):
    whole = streamed(ANTHROPIC, asked(), stream)
    for at in range(len(stream)):
        assert streamed(ANTHROPIC, asked(), stream[:at], stream[at:]) == whole
    assert streamed(ANTHROPIC, asked(), *(stream[at : at + 1] for at in range(len(stream)))) == whole


@pytest.mark.parametrize(
    "event",
    [
        b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',
        b"no json",
        b'{"type":"message_delta","usage":3}',
        b"{}",
    ],
)
def test_an_error_in_a_stream_ends_it(event):
    events = streamed(ANTHROPIC, asked(), TEXT_STREAM[: TEXT_STREAM.index(b"event: ping")], b"data: " + event + b"\n\n", TEXT_STREAM)
    assert events[-2]["error"]["code"] == "upstream_error"
    assert (events[-1], len(events)) == ("[DONE]", 3)


def test_a_stream_without_its_end_has_no_end():
    assert "[DONE]" not in streamed(ANTHROPIC, asked(), TEXT_STREAM[: TEXT_STREAM.index(b"event: message_stop")])

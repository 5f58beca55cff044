"""OpenAI's and Anthropic's own Python SDKs through a real Envoy to a server of Anthropic's Messages API."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.anthropic_server import AnthropicServer
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server() -> Iterator[AnthropicServer]:
    with AnthropicServer() as running:
        yield running


@pytest.fixture(scope="module")
def stack(server: AnthropicServer) -> Iterator[Stack]:
    pools = {"claude": {"model": "claude", "engine": "anthropic", "nodes": [node("a", server.address, max_seq_len=200_000)]}}
    with Stack({"pools": pools, "tenants": [tenant("acme")], "health": {"breaker": False}}) as running:
        yield running


@pytest.fixture
def gpt(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key_of("acme"), max_retries=0) as client:
        yield client


def test_chats_are_answered_whole_and_streamed_and_settled_exactly(stack: Stack, gpt: openai.OpenAI, server: AnthropicServer) -> None:
    before = stack.all_accounted()["counts"]
    whole = gpt.chat.completions.create(model="claude", messages=says("hi"), max_tokens=50)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello there!", "stop")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (30, 6, 15)
    chunks = list(gpt.chat.completions.create(model="claude", messages=says("hi"), max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    after = stack.settled(sum(before["outcomes"].values()) + 2)["counts"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 60
    assert after["completion_tokens"] - before["completion_tokens"] == 12
    path, headers, _ = server.seen[-1]
    assert path == "/v1/messages"
    assert {name.lower(): value for name, value in headers.items()}["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize("stream", [True, False])
def test_parallel_tool_calls_reach_the_client(gpt: openai.OpenAI, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "claude", "messages": says("weather?"), "tools": TOOLS, "max_tokens": 50}
    if stream:
        with gpt.chat.completions.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = gpt.chat.completions.create(**asked).choices[0].message
    calls: list[Any] = list(message.tool_calls or ())
    assert [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("toolu_1", "get_weather", {"location": "Paris"}),
        ("toolu_2", "get_time", {}),
    ]


def test_errors_are_the_gateway_s(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model="claude", messages=says("too long"), max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as busy:
        gpt.chat.completions.create(model="claude", messages=says("overloaded"), max_tokens=5)
    assert (busy.value.status_code, busy.value.code) == (429, "upstream_busy")


def test_a_client_of_messages_passes(stack: Stack) -> None:
    with anthropic.Anthropic(base_url=stack.url, api_key=key_of("acme"), max_retries=0) as client:
        answer = client.messages.create(model="claude", max_tokens=5, messages=says("hi"))
    assert (answer.content[0].type, answer.usage.cache_read_input_tokens) == ("text", 15)

"""OpenAI's and Anthropic's own Python SDKs, each against hosted APIs of both kinds: TLS servers that answer as the providers document."""

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from tests.support.certificates import Authority
from tests.support.providers import PIECES, AnthropicProvider, Provider
from tests.support.stack import Stack, key_of, tenant

pytestmark = pytest.mark.e2e

ENGINES = ("openai", "azure_openai", "anthropic")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"location": {"type": "string"}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
MESSAGE_TOOLS: list[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TEXTS = {"openai": "".join(PIECES), "azure_openai": "".join(PIECES), "anthropic": "Hello there!"}
USAGES = {"openai": (9, 4, 3), "azure_openai": (9, 4, 3), "anthropic": (30, 15, 6)}
"""Tokens of the prompt, those of them that were cached, and of the answer."""
PATHS = {
    "openai": "/v1/chat/completions",
    "azure_openai": "/openai/deployments/ours/chat/completions?api-version=2024-10-21",
    "anthropic": "/v1/messages",
}
FAILURES = {"rate limit": 429, "no credit": 502}
OVERLOADED = {"openai": 503, "azure_openai": 503, "anthropic": 429}


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, dict[str, Provider]]]:
    folder = tmp_path_factory.mktemp("providers")
    authority = Authority(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("provider", "localhost").values())
    providers = {
        "openai": Provider(context, "sk-openai"),
        "azure_openai": Provider(context, "azure-key", ("api-key", "")),
        "anthropic": AnthropicProvider(context, "sk-ant"),
    }
    bases = {"openai": "/v1", "azure_openai": "/openai/deployments/ours", "anthropic": ""}
    with ExitStack() as exits:
        pools = {}
        for engine, provider in providers.items():
            exits.enter_context(provider)
            (folder / engine).write_text(next(iter(provider.credentials)))
            account = {
                "id": f"{engine}-account",
                "url": f"https://localhost:{provider.port}{bases[engine]}",
                "credential": {"file": str(folder / engine)},
                "ca": str(authority.file),
                "max_seq_len": 200_000,
            }
            if engine == "azure_openai":
                account["api_version"] = "2024-10-21"
            pools[engine] = {"model": engine, "served_model": "theirs", "engine": engine, "nodes": [account]}
        config = {"pools": pools, "tenants": [tenant("acme")], "health": {"breaker": False}, "envoy": {"retry": {"attempts": 0}}}
        yield exits.enter_context(Stack(config)), providers


@pytest.fixture
def gpt(site: tuple[Stack, dict[str, Provider]]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site[0].url}/v1", api_key=key_of("acme"), max_retries=0) as client:
        yield client


@pytest.fixture
def claude(site: tuple[Stack, dict[str, Provider]]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=site[0].url, api_key=key_of("acme"), max_retries=0) as client:
        yield client


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", ["hi", "slow"])
def test_openais_sdk_gets_whole_and_streamed_answers_and_usage(site: Any, gpt: openai.OpenAI, engine: str, prompt: str) -> None:
    whole = gpt.chat.completions.create(model=engine, messages=says(prompt), max_tokens=50)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (TEXTS[engine], "stop")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    reported = (whole.usage.prompt_tokens, whole.usage.prompt_tokens_details.cached_tokens, whole.usage.completion_tokens)
    assert reported == USAGES[engine]
    chunks = list(gpt.chat.completions.create(model=engine, messages=says(prompt), max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXTS[engine]
    assert chunks[-1].choices[0].finish_reason == "stop"
    path, headers, body = site[1][engine].seen[-1]
    assert (path, body["model"]) == (PATHS[engine], "theirs")
    assert key_of("acme") not in str(headers)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", ["hi", "slow"])
def test_anthropics_sdk_gets_whole_and_streamed_answers_and_usage(site: Any, claude: anthropic.Anthropic, engine: str, prompt: str) -> None:
    whole = claude.messages.create(model=engine, messages=says(prompt), max_tokens=50, system="Be short.")
    assert [block.text for block in whole.content if block.type == "text"] == [TEXTS[engine]]
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(model=engine, messages=says(prompt), max_tokens=50) as stream:
        assert "".join(stream.text_stream) == TEXTS[engine]
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    for usage in (whole.usage, final.usage):
        cached = usage.cache_read_input_tokens or 0
        reported = (usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached, usage.output_tokens)
        assert reported == USAGES[engine]
    path, _, body = site[1][engine].seen[-1]
    assert (path, body["model"]) == (PATHS[engine], "theirs")


def test_every_answer_is_charged_by_the_providers_usage(site: Any, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    stack, _ = site
    for engine in ENGINES:
        before = stack.all_accounted()["counts"]
        for stream in (False, True):
            answers = gpt.chat.completions.create(model=engine, messages=says("hi"), max_tokens=50, stream=stream)
            claude_message = claude.messages.create(model=engine, messages=says("hi"), max_tokens=50, stream=stream)
            if stream:
                list(answers)
                list(claude_message)
        after = stack.settled(sum(before["outcomes"].values()) + 4)["counts"]
        charged = (after["prompt_tokens"] - before["prompt_tokens"], after["completion_tokens"] - before["completion_tokens"])
        assert charged == (4 * USAGES[engine][0], 4 * USAGES[engine][2])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stream", [True, False])
def test_openais_sdk_gets_parallel_calls(gpt: openai.OpenAI, engine: str, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": engine, "messages": says("weather?"), "tools": CHAT_TOOLS, "max_tokens": 50}
    if stream:
        with gpt.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = gpt.chat.completions.create(**asked).choices[0]
    calls: list[Any] = list(choice.message.tool_calls or ())
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"location": "Paris"}),
        ("get_time", {}),
    ]
    assert choice.finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    turns: list[Any] = [*says("hi"), choice.message.model_dump(exclude_none=True), *results]
    assert gpt.chat.completions.create(model=engine, messages=turns, tools=CHAT_TOOLS, max_tokens=50).choices


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stream", [True, False])
def test_anthropics_sdk_gets_parallel_calls(claude: anthropic.Anthropic, engine: str, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": engine, "messages": says("weather?"), "tools": MESSAGE_TOOLS, "max_tokens": 50}
    if stream:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("get_weather", {"location": "Paris"}), ("get_time", {})]
    assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    turns: list[Any] = [*says("hi"), {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert claude.messages.create(model=engine, messages=turns, tools=MESSAGE_TOOLS, max_tokens=50).stop_reason == "end_turn"


def pictures_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return media type and base64 data of each picture that a provider got."""
    found = []
    for part in body["messages"][-1]["content"]:
        if part["type"] == "image_url":
            kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
            found.append((kind, data))
        elif part["type"] == "image":
            found.append((part["source"]["media_type"], part["source"]["data"]))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_pictures_of_both_sdks_reach_every_provider_in_its_own_form(
    site: Any, gpt: openai.OpenAI, claude: anthropic.Anthropic, engine: str
) -> None:
    picture: list[Any] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    ]
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    same: list[Any] = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    whole = gpt.chat.completions.create(model=engine, messages=[{"role": "user", "content": picture}], max_tokens=50)
    assert whole.choices[0].message.content == TEXTS[engine]
    claude_message = claude.messages.create(model=engine, messages=[{"role": "user", "content": same}], max_tokens=50)
    assert [block.text for block in claude_message.content if block.type == "text"] == [TEXTS[engine]]
    assert [pictures_of(body) for _, _, body in site[1][engine].seen[-2:]] == [[("image/png", PIXEL)]] * 2


def test_anthropics_sdk_counts_tokens_where_the_provider_does(site: Any, claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model="anthropic", messages=says("hi")).input_tokens == 14
    path, _, body = site[1]["anthropic"].seen[-1]
    assert (path, body["model"]) == ("/v1/messages/count_tokens", "theirs")
    with pytest.raises(anthropic.BadRequestError, match="does not serve"):
        claude.messages.count_tokens(model="openai", messages=says("hi"))


@pytest.mark.parametrize("engine", ENGINES)
def test_errors_of_the_request_are_the_sdks_own(gpt: openai.OpenAI, claude: anthropic.Anthropic, engine: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model=engine, messages=says("too long"), max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError) as also:
        claude.messages.create(model=engine, messages=says("too long"), max_tokens=5)
    assert "prompt is too long: 210000 tokens" in str(also.value)
    assert "org-secret" not in f"{refused.value} {also.value}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", ["overloaded", *FAILURES])
def test_failures_of_the_provider_are_reported_by_the_gateway(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, engine: str, prompt: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as failed:
            gpt.chat.completions.create(model=engine, messages=says(prompt), max_tokens=5, stream=stream)
        with pytest.raises(anthropic.APIStatusError) as also:
            claude.messages.create(model=engine, messages=says(prompt), max_tokens=5, stream=stream)
        for each in (failed.value, also.value):
            assert each.status_code == FAILURES.get(prompt, OVERLOADED[engine]), each
            reported = f"{each.response.headers} {each.response.text}"
            assert not any(word in reported for word in ("org-secret", "req_theirs", "openai-organization", "billing", "quota"))
            assert each.response.headers.get("x-ratelimit-remaining-requests") != "7"
            assert each.response.headers.get("anthropic-ratelimit-requests-remaining") != "7"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_that_ends_early_ends_with_the_sdks_own_error(gpt: openai.OpenAI, claude: anthropic.Anthropic, engine: str) -> None:
    with pytest.raises(openai.APIError):
        list(gpt.chat.completions.create(model=engine, messages=says("cut"), max_tokens=50, stream=True))
    events = claude.messages.create(model=engine, messages=says("cut"), max_tokens=50, stream=True)
    with pytest.raises(anthropic.APIError):
        list(events)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_connection_that_breaks_off_is_no_complete_answer(gpt: openai.OpenAI, claude: anthropic.Anthropic, engine: str) -> None:
    cut_off = "peer closed connection|Connection error"
    with pytest.raises(Exception, match=cut_off):
        list(gpt.chat.completions.create(model=engine, messages=says("drop"), max_tokens=50, stream=True))
    with pytest.raises(Exception, match=cut_off):
        list(claude.messages.create(model=engine, messages=says("drop"), max_tokens=50, stream=True))

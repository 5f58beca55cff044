"""Anthropic's and OpenAI's own Python SDKs through a real Envoy: answers, refusals, and streams that break off or carry an error."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.test_node_errors import Parrot
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG: list[Any] = [{"role": "user", "content": "word " * 4000}]
STREAM = "text/event-stream"
START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 1},
    },
}
BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi "}}
CREATED = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "object": "response", "status": "in_progress"}}
TEXT_DELTA = {
    "type": "response.output_text.delta",
    "sequence_number": 1,
    "item_id": "i",
    "output_index": 0,
    "content_index": 0,
    "delta": "Hi",
}
CONTEXT = {"error": {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens).", "code": 400}}


def stream_of(*events: dict[str, Any]) -> bytes:
    return b"".join(
        (f"event: {event['type']}\n".encode() if "type" in event else b"") + b"data: " + json.dumps(event).encode() + b"\n\n"
        for event in events
    )


@pytest.fixture(scope="module")
def parrot() -> Iterator[Parrot]:
    with Parrot() as running:
        yield running


@pytest.fixture(scope="module")
def stack(parrot: Parrot) -> Iterator[Stack]:
    with ExitStack() as exits:
        sim = exits.enter_context(EngineSim(model="good", decode_rate=2000.0, prefill_rate=1e6))
        pools = {
            "good": {"model": "good", "engine": "vllm", "nodes": [node("good", sim.address, max_seq_len=2048)]},
            "scripted": {"model": "scripted", "engine": "vllm", "nodes": [node("scripted", parrot.address)]},
            "dead": {"model": "dead", "engine": "vllm", "nodes": [node("dead", f"127.0.0.1:{free_port()}")]},
        }
        tenants = [tenant("acme"), tenant("small", models=("good",), rpm=1)]
        yield exits.enter_context(Stack({"pools": pools, "tenants": tenants, "health": {"breaker": False}}))


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key=key_of("acme"), max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key_of("acme"), max_retries=0) as client:
        yield client


def test_anthropic_s_sdk_gets_a_message_and_its_limits(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.with_raw_response.create(model="good", max_tokens=5, messages=HELLO)
    message = reply.parse()
    assert (message.type, message.usage.output_tokens) == ("message", 5)
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.headers["x-din-trace-id"]
    assert int(reply.headers["anthropic-ratelimit-tokens-remaining"]) > 0
    with claude.messages.stream(model="good", max_tokens=5, messages=HELLO) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("asked", "error", "kind", "words"),
    [
        ({"model": "nowhere"}, anthropic.NotFoundError, "not_found_error", "does not exist"),
        (
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        ({"model": "dead"}, anthropic.InternalServerError, "overloaded_error", "No node could be reached"),
    ],
)
def test_anthropic_s_sdk_raises_its_own_errors(
    claude: anthropic.Anthropic, asked: dict[str, Any], error: type[Exception], kind: str, words: str
) -> None:
    with pytest.raises(error) as raised:
        claude.messages.create(**{"model": "good", "max_tokens": 5, "messages": HELLO, **asked})
    body: Any = getattr(raised.value, "body", None)
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert words in body["error"]["message"]
    assert body["request_id"] == getattr(raised.value, "request_id", None)


def test_anthropic_s_sdk_gets_errors_of_keys_and_limits(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        claude.with_options(api_key="sk-ant-none").messages.create(model="good", max_tokens=5, messages=HELLO)
    assert "authentication_error" in str(wrong.value)
    small = claude.with_options(api_key=key_of("small"))
    small.messages.create(model="good", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.RateLimitError) as limited:
        small.messages.create(model="good", max_tokens=5, messages=HELLO)
    assert 0 < int(limited.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("events", [[START, BLOCK, *[TEXT] * 7], [START, BLOCK, TEXT, CONTEXT]], ids=["cut", "error"])
def test_anthropic_s_sdk_raises_at_a_stream_that_breaks_off_or_carries_an_error(
    claude: anthropic.Anthropic, parrot: Parrot, events: list[dict[str, Any]]
) -> None:
    parrot.answers(200, stream_of(*events), chunked=True, content_type=STREAM)
    with pytest.raises(anthropic.APIError):
        list(claude.messages.create(model="scripted", max_tokens=50, messages=HELLO, stream=True))
    with pytest.raises(anthropic.APIError), claude.messages.stream(model="scripted", max_tokens=50, messages=HELLO) as stream:
        stream.get_final_message()


@pytest.mark.parametrize("events", [[CREATED, TEXT_DELTA], [CREATED, TEXT_DELTA, CONTEXT]], ids=["cut", "error"])
def test_openai_s_sdk_raises_at_a_response_that_breaks_off_or_carries_an_error(
    gpt: openai.OpenAI, parrot: Parrot, events: list[dict[str, Any]]
) -> None:
    parrot.answers(200, stream_of(*events), chunked=True, content_type=STREAM)
    with pytest.raises(openai.APIError):
        list(gpt.responses.create(model="scripted", input="hello", stream=True))


def test_openai_s_sdk_raises_when_one_of_two_choices_is_cut(gpt: openai.OpenAI, parrot: Parrot) -> None:
    def chunk(index: int, finish: str | None) -> dict[str, Any]:
        return {"id": "c", "choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": finish}]}

    parrot.answers(200, stream_of(chunk(0, ""), chunk(1, ""), chunk(0, "stop")), chunked=True, content_type=STREAM)
    with pytest.raises(openai.APIError, match="before the answer was complete"):
        list(gpt.chat.completions.create(model="scripted", messages=HELLO, n=2, stream=True))

"""The modelled Ollama beside a real Ollama 0.17: the same statuses, media types, keys and types for every captured exchange."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.lua_filter import capture
from tests.support.servers import EngineSim

pytestmark = pytest.mark.e2e

CAPTURES = Path(__file__).parent.parent / "captures" / "ollama"
HELLO = [{"role": "user", "content": "Say hello."}]
FEW = {"num_predict": 3}
CHAT, TEXT, OPENAI = "/api/chat", "/api/generate", "/v1/chat/completions"
# capture -> path and body of the request behind it
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO, "stream": False, "options": FEW}),
    "chat-stream": (CHAT, {"messages": HELLO, "options": FEW}),
    "generate": (TEXT, {"prompt": "Hello", "raw": True, "stream": False, "options": FEW}),
    "generate-stream": (TEXT, {"prompt": "Hello", "raw": True, "options": FEW}),
    "openai-chat": (OPENAI, {"messages": HELLO, "max_tokens": 3}),
    "openai-chat-stream": (OPENAI, {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}),
    "err-context": (CHAT, {"messages": [{"role": "user", "content": "word " * 600}], "truncate": False}),
    "err-unknown-model": (CHAT, {"model": "nope", "messages": HELLO}),
}
PAGES = {"tags": "/api/tags", "ps": "/api/ps", "version": "/api/version"}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="smollm2", api="ollama", max_model_len=256, decode_rate=1000.0) as running:
        yield running


def documents(body: bytes) -> list[dict[str, Any]]:
    """One, or those of a stream; of equal ones in a row the first."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.strip() not in (b"", b"data: [DONE]")]
    return [json.loads(line) for line in lines]


def shape(value: Any) -> Any:
    """Keys and types; a list's are those of its first member."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def holds(theirs: Any, ours: Any) -> bool:
    """Whether what the real one has is there, with its types; OpenAI's objects may hold more."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(name in ours and holds(each, ours[name]) for name, each in theirs.items())
    if isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        return holds(theirs[0], ours[0])
    return bool(theirs == ours)


def ask(engine: EngineSim, path: str, body: dict[str, Any] | None) -> httpx.Response:
    with httpx.Client(base_url=engine.url, verify=False) as client:
        return client.get(path) if body is None else client.post(path, json={"model": "smollm2", **body})


@pytest.mark.parametrize("name", [*ASKED, *PAGES])
def test_an_exchange_looks_as_it_does_with_the_real_one(engine, name):
    path, body = ASKED[name] if name in ASKED else (PAGES[name], None)
    reply = ask(engine, path, body)
    headers, captured = capture(CAPTURES / f"{name}.txt")
    media = headers["content-type"].partition(";")[0]
    assert (str(reply.status_code), reply.headers["content-type"].partition(";")[0]) == (headers[":status"], media)
    theirs, ours = [[shape(each) for each in documents(recorded)] for recorded in (captured, reply.content)]
    if path == OPENAI:
        assert all(any(holds(each, other) for other in ours) for each in theirs)
    else:
        assert [each for at, each in enumerate(ours) if each not in ours[:at]] == [
            each for at, each in enumerate(theirs) if each not in theirs[:at]
        ]


def test_vectors_have_its_shape():
    headers, body = capture(CAPTURES / "embed.txt")
    with EngineSim(model="smollm2", api="ollama", runner="pooling", dimensions=8) as engine:
        reply = ask(engine, "/api/embed", {"input": ["a", "b"]})
    assert (str(reply.status_code), shape(reply.json())) == (headers[":status"], shape(json.loads(body)))

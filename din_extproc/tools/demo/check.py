"""The client of `demo --check`: it sends requests and checks the answers, with nothing but what any client can read."""

import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from din_extproc.tools.demo.plan import CHAT_ALIAS, EMBEDDING_MODEL, TRIAL_RPM, DemoPlan
from din_extproc.tools.http_client import OutsideClient, OutsideResponse

_TRIES = 6
_TIMEOUT_S = 60.0
_JSON = {"content-type": "application/json"}
_LIMIT_HEADERS = tuple(f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in ("requests", "tokens"))


class DemoCheckFailed(Exception):  # noqa: N818 - the name says what happened
    """A check failed; the message says what was received instead."""


class DemoClient:
    """Runs the checks, each a method that returns a summary or raises `DemoCheckFailed`. An async context manager."""

    def __init__(self, plan: DemoPlan, end_node: Callable[[str], Awaitable[None]]) -> None:
        """`end_node` kills the node with that id."""
        self._plan = plan
        self._end_node = end_node
        self._client = OutsideClient(plan.url, plan.key.text, _TIMEOUT_S)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.__aexit__(kind, error, trace)

    def checks(self) -> tuple[tuple[str, Callable[[], Awaitable[str]]], ...]:
        """Return title and check in order; the last one kills a node."""
        return (
            ("a chat answer, with the node, trace and limit headers", self.chat),
            ("a stream, its tokens counted", self.stream),
            ("a stream whose client asked for usage", self.stream_with_usage),
            ("embeddings", self.embeddings),
            ("an unknown model is 404", self.unknown_model),
            ("a wrong key is 401", self.wrong_key),
            ("over the limit is 429, with its headers", self.over_limit),
            ("a node dies: the other one answers", self.node_dies),
        )

    async def chat(self) -> str:
        """Check a complete answer."""
        reply = await self._post_chat()
        _expect(reply, 200)
        answer = _decode_json(reply)
        text = answer["choices"][0]["message"]["content"]
        _require(bool(text), "the answer is empty")
        _require(answer["usage"]["completion_tokens"] > 0, "no completion tokens in usage")
        for name in ("x-din-node-id", "x-din-trace-id", "x-din-model-version", *_LIMIT_HEADERS):
            _require(name in reply.headers, f"the header {name} is missing")
        return f"{reply.headers['x-din-node-id']}: {text.strip()[:60]!r}"

    async def stream(self) -> str:
        """Check a stream without `stream_options`."""
        events = await self._stream({})
        _require(events[-1] == "[DONE]", "the stream has no end marker")
        chunks = [json.loads(event) for event in events[:-1]]
        _require(all(chunk["choices"] for chunk in chunks), "a usage-only event reached a client that did not ask for it")
        tokens = sum(1 for chunk in chunks if chunk["choices"][0]["delta"].get("content"))
        _require(tokens > 0, "no tokens in the stream")
        return f"{tokens} tokens in {len(events)} events"

    async def stream_with_usage(self) -> str:
        """Check a stream with usage: once, at the end, and correct."""
        events = await self._stream({"stream_options": {"include_usage": True}})
        chunks = [json.loads(event) for event in events[:-1]]
        usages = [chunk["usage"] for chunk in chunks if not chunk["choices"] and chunk.get("usage")]
        _require(len(usages) == 1, f"{len(usages)} usage events instead of one")
        tokens = sum(1 for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content"))
        counted = usages[0]["completion_tokens"]
        # A token may have no text (the end of the sequence, half a character).
        _require(tokens <= counted, f"{tokens} tokens came, usage says {counted}")
        return f"usage says {counted} tokens, {tokens} had text"

    async def embeddings(self) -> str:
        """Check embeddings: a vector per text."""
        reply = await self._post("/v1/embeddings", {"model": EMBEDDING_MODEL, "input": ["a node", "a gateway"]})
        _expect(reply, 200)
        vectors = [item["embedding"] for item in _decode_json(reply)["data"]]
        _require(len(vectors) == 2 and len(vectors[0]) > 0, "not two vectors")  # noqa: PLR2004 - two texts
        return f"{len(vectors[0])} dimensions from {reply.headers.get('x-din-node-id')}"

    async def unknown_model(self) -> str:
        """Check the refusal of an unknown model."""
        return _expect_refusal(await self._post_chat(model="no-such-model"), 404, "model_not_found")

    async def wrong_key(self) -> str:
        """Check the refusal of an unknown key."""
        return _expect_refusal(await self._post_chat(key="din_demo_wrong"), 401, "invalid_api_key")

    async def over_limit(self) -> str:
        """Check the refusal of requests over the limit."""
        replies = [await self._post_chat(key=self._plan.trial_key.text, max_tokens=1) for _ in range(TRIAL_RPM + 1)]
        statuses = [reply.status for reply in replies]
        _require(statuses == [200] * TRIAL_RPM + [429], f"the statuses {statuses}")
        reply = replies[-1]
        refusal = _expect_refusal(reply, 429, "rate_limit_exceeded")
        _require(int(reply.headers.get("retry-after", "0")) >= 1, "retry-after is missing or 0")
        for name in _LIMIT_HEADERS:
            _require(name in reply.headers, f"the header {name} is missing")
        return f"{refusal}, retry after {reply.headers['retry-after']} s"

    async def node_dies(self) -> str:
        """Kill the node that answered last; the other one has to answer every further request."""
        first = (await self._post_chat(max_tokens=4)).headers.get("x-din-node-id", "")
        chat_nodes = {node.id for node in self._plan.nodes if not node.embeds}
        _require(first in chat_nodes, f"{first!r} is none of the chat nodes")
        await self._end_node(first)
        answered = set()
        for _ in range(_TRIES):
            reply = await self._post_chat(max_tokens=4)
            _expect(reply, 200)
            answered.add(reply.headers.get("x-din-node-id"))
        _require(answered == chat_nodes - {first}, f"answers came from {answered}")
        return f"{first} is gone, {_TRIES} of {_TRIES} answers came from {', '.join(sorted(chat_nodes - {first}))}"

    async def _post_chat(self, *, model: str = CHAT_ALIAS, key: str = "", max_tokens: int = 24) -> OutsideResponse:
        body = {"model": model, "messages": [{"role": "user", "content": "Say hello to the world."}], "max_tokens": max_tokens}
        return await self._post("/v1/chat/completions", body, key)

    async def _stream(self, more: Mapping[str, Any]) -> list[str]:
        messages = [{"role": "user", "content": "Tell a short story."}]
        reply = await self._post(
            "/v1/chat/completions", {"model": CHAT_ALIAS, "messages": messages, "max_tokens": 32, "stream": True, **more}
        )
        _expect(reply, 200)
        _require(reply.headers.get("content-type", "").startswith("text/event-stream"), "the answer is no event stream")
        return [event.removeprefix("data:").strip() for event in reply.body.decode().split("\n\n") if event.startswith("data:")]

    async def _post(self, path: str, body: Mapping[str, Any], key: str = "") -> OutsideResponse:
        headers = {**_JSON, **({"authorization": f"Bearer {key}"} if key else {})}
        reply = await self._client.send("POST", path, headers, json.dumps(body).encode())
        _require(not reply.failure, reply.failure)
        return reply


def _decode_json(reply: OutsideResponse) -> Any:
    try:
        return json.loads(reply.body)
    except ValueError:
        raise DemoCheckFailed(f"{reply.status}, and no JSON: {reply.body[:200]!r}") from None


def _require(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - the condition of a check
    if not condition:
        raise DemoCheckFailed(otherwise)


def _expect(reply: OutsideResponse, status: int) -> None:
    _require(reply.status == status, f"{reply.status} instead of {status}: {reply.body[:300].decode(errors='replace')}")


def _expect_refusal(reply: OutsideResponse, status: int, code: str) -> str:
    _expect(reply, status)
    error = _decode_json(reply)["error"]
    _require(error["code"] == code, f"the code {error['code']!r} instead of {code!r}")
    return f"{status} {code}"

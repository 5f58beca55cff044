"""The requests that every engine gets behind the gateway, and the outcome of each in one word.

Rule: a step checks what a client sees, never the engine's own format.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx
from msgspec import Struct

from tests.support.sdk_matrix import TOOLS
from tests.support.stack import Stack, events

HELLO = [{"role": "user", "content": "Count from one to ten, please."}]


class Subject(Struct):
    """An engine under test. A name is that of a model; "": it has none of that kind."""

    title: str
    chat: str
    vectors: str
    ranks: str
    end: Callable[[], None] | None = None
    """Kills the chat engine while it answers; None: it must not be killed."""
    faults: Callable[[str], None] | None = None
    """Sets faults at a modelled engine, which is killed within its answer in this way."""
    chats: bool = True
    """Whether it chats; without a chat template it completes text."""
    tool_choice: str = "required"
    """Whether a tool call can be required."""


class StepClient:
    """Sends requests to one engine through the gateway."""

    def __init__(self, stack: Stack, subject: Subject) -> None:
        self.stack = stack
        self.subject = subject

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with self.stack.client() as client:
            return client.post(path, json=body)

    def generation(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Return path and body of a generation: a chat, or the same text to complete."""
        body = {"model": self.subject.chat, "max_tokens": 12, **fields}
        if self.subject.chats:
            return "/v1/chat/completions", {"messages": HELLO, **body}
        (message,) = body.pop("messages", HELLO)
        return "/v1/completions", {"prompt": message["content"], **body}

    def ask(self, **fields: Any) -> httpx.Response:
        return self.post(*self.generation(**fields))

    def chat(self) -> str:
        answer = self.ask().json()
        if not text_of(answer["choices"][0]):
            return str(answer)
        counted = answer.get("usage", {}).get("completion_tokens")
        return ("ok" if 0 < counted <= 12 else str(answer)) if counted is not None else "ok, no tokens reported"

    def stream(self) -> str:
        reply = self.ask(stream=True)
        parts = events(reply.text)
        whole = "".join(text_of(event["choices"][0]) for event in parts if event["choices"])
        return "ok" if whole and reply.text.rstrip().endswith("[DONE]") and not any(event.get("usage") for event in parts) else reply.text

    def tools(self) -> str:
        if not self.subject.chats:
            return "no chat"
        reply = self.ask(tools=TOOLS, tool_choice=self.subject.tool_choice, max_tokens=100)
        if reply.status_code != 200:
            return refused(reply)
        message = reply.json()["choices"][0]["message"]
        if not message.get("tool_calls"):
            return "no call"
        call = message["tool_calls"][0]["function"]
        return "ok" if call["name"] == "weather" and "city" in json.loads(call["arguments"]) else str(call)

    def embeddings(self) -> str:
        if not self.subject.vectors:
            return "no model"
        answer = self.post("/v1/embeddings", {"model": self.subject.vectors, "input": ["a", "b"]}).json()
        return "ok" if len(answer["data"]) == 2 and len(answer["data"][0]["embedding"]) > 4 else str(answer)

    def rerank(self) -> str:
        if not self.subject.ranks:
            return "no model"
        body = {"model": self.subject.ranks, "query": "panda", "documents": ["hi", "a panda is a bear", "a car"], "top_n": 2}
        reply = self.post("/v1/rerank", body)
        if reply.status_code != 200:
            return refused(reply)
        answer = reply.json()
        return "ok" if len(answer["results"]) == 2 and "relevance_score" in answer["results"][0] else str(answer)

    def context(self) -> str:
        reply = self.ask(messages=[{"role": "user", "content": "word " * 6000}])
        return "it fits" if reply.status_code == 200 else refused(reply)

    def parameter(self) -> str:
        return refused(self.ask(temperature="warm"))

    def cancel(self) -> str:
        path, body = self.generation(max_tokens=500, stream=True)
        before = self._cancelled()
        self._fault("drip:ms=20,bytes=20")
        with self.stack.client() as client, client.stream("POST", path, json=body) as reply:
            next(reply.iter_bytes())
        self._fault("")
        self.stack.eventually(lambda: not self.stack.status()["exchanges"]["open"], "the slot is free again")
        try:
            self.stack.eventually(lambda: self._cancelled() > before, "it is reported as cancelled")
        except AssertionError:
            return "not reported as cancelled"
        return "ok"

    def _cancelled(self) -> int:
        return int(self.stack.status()["counts"]["outcomes"].get("client_cancelled", 0))

    def killed(self) -> str:
        if self.subject.end is None and self.subject.faults is None:
            return "not ours to kill"
        self._fault("reset:after=30")
        path, body = self.generation(max_tokens=500, stream=True)
        got = b""
        try:
            with self.stack.client() as client, client.stream("POST", path, json=body) as reply:
                for part in reply.iter_bytes():
                    if not got and self.subject.end is not None:
                        self.subject.end()
                    got += part
        except httpx.RemoteProtocolError:
            return "ok" if b"[DONE]" not in got else "a good end was made up"
        finally:
            self._fault("")
        is_reported = b"upstream_truncated" in got or reply.status_code == 502  # it died before Envoy had sent anything on
        return "ok" if is_reported else got[-200:].decode()

    def _fault(self, fault: str) -> None:
        if self.subject.faults is not None:
            self.subject.faults(fault)


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of one choice: of a message, of a delta, or of a completion."""
    return (choice.get("message") or choice.get("delta") or choice).get("content", choice.get("text")) or ""


def refused(reply: httpx.Response) -> str:
    """Return the refusal's status and code."""
    return f"{reply.status_code} {reply.json()['error']['code']}"


def outcome(step: Callable[[StepClient], str], step_client: StepClient) -> str:
    """Return the outcome of a step; a fault is one of the outcomes."""
    try:
        return step(step_client)
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"[:200]


STEPS: dict[str, tuple[Callable[[StepClient], str], tuple[str, ...]]] = {
    "chat": (StepClient.chat, ("ok",)),
    "stream": (StepClient.stream, ("ok",)),
    "tools": (StepClient.tools, ("ok", "no call", "400 invalid_request")),
    "embeddings": (StepClient.embeddings, ("ok", "no model")),
    "rerank": (StepClient.rerank, ("ok", "no model")),
    "over-long context": (StepClient.context, ("400 context_length_exceeded", "it fits")),
    "bad parameter": (StepClient.parameter, ("400 invalid_request",)),
    "cancel": (StepClient.cancel, ("ok",)),
    "killed mid-stream": (StepClient.killed, ("ok", "not ours to kill")),
}
"""The steps, each with its correct outcomes. Small models have no template for tools: they call none, or Ollama says so."""

"""Real engines behind a real Envoy: llama.cpp with package-shipped weights, and any vLLM that is running. What a client sees, as a table.

Rule: the outcome of every step is the same as over the modelled engines (`tests/e2e/test_engines.py`), or the exit code is 1.
Run: python -m tests.real_engines [--vllm 127.0.0.1:8000=MODEL] [--vllm-pooling 127.0.0.1:8001=MODEL]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
from msgspec import Struct

from din_extproc.roles.split import SplitOptions, split
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.sdk_matrix import TOOLS
from tests.servers import LlamaServer
from tests.stack import Stack, events, key_of, node, tenant

HELLO = [{"role": "user", "content": "Count from one to ten, please."}]


class Subject(Struct):
    """An engine to be asked. A name is that of a model; "": it has none of that kind."""

    title: str
    chat: str
    vectors: str
    ranks: str
    end: Callable[[], None] | None = None
    """Kills the engine that chats; None: it is not ours to kill."""


class Asker:
    """Asks one engine through the gateway."""

    def __init__(self, stack: Stack, subject: Subject) -> None:
        self._stack = stack
        self._subject = subject

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with self._stack.client() as client:
            return client.post(path, json=body)

    def ask(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": self._subject.chat, "messages": HELLO, "max_tokens": 12, **fields})

    def chat(self) -> str:
        answer = self.ask().json()
        return "ok" if answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] == 12 else str(answer)

    def stream(self) -> str:
        reply = self.ask(stream=True)
        told = events(reply.text)
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in told if event["choices"])
        return "ok" if said and reply.text.rstrip().endswith("[DONE]") and not any(event.get("usage") for event in told) else reply.text

    def tools(self) -> str:
        message = self.ask(tools=TOOLS, tool_choice="required", max_tokens=100).json()["choices"][0]["message"]
        if not message.get("tool_calls"):
            return "no call"
        call = message["tool_calls"][0]["function"]
        return "ok" if call["name"] == "weather" and "city" in json.loads(call["arguments"]) else str(call)

    def embeddings(self) -> str:
        if not self._subject.vectors:
            return "no model"
        answer = self.post("/v1/embeddings", {"model": self._subject.vectors, "input": ["a", "b"]}).json()
        return "ok" if len(answer["data"]) == 2 and len(answer["data"][0]["embedding"]) > 4 else str(answer)

    def rerank(self) -> str:
        if not self._subject.ranks:
            return "no model"
        body = {"model": self._subject.ranks, "query": "panda", "documents": ["hi", "a panda is a bear", "a car"], "top_n": 2}
        answer = self.post("/v1/rerank", body).json()
        return "ok" if len(answer["results"]) == 2 and "relevance_score" in answer["results"][0] else str(answer)

    def context(self) -> str:
        reply = self.ask(messages=[{"role": "user", "content": "word " * 6000}])
        return f"{reply.status_code} {reply.json()['error']['code']}"

    def parameter(self) -> str:
        reply = self.ask(temperature="warm")
        return f"{reply.status_code} {reply.json()['error']['code']}"

    def split(self) -> str:
        settings = load(self._stack.config_file, {})
        assert isinstance(settings, Settings), str(settings)
        options = SplitOptions(url=self._stack.url, key=key_of("acme"), model=self._subject.chat, tokens=(1, 20, 100, 500), repeats=1)
        found = split(settings, options)
        print("\n".join(found.lines()), file=sys.stderr)
        return "ok" if found.sound and [each.tokens for each in found.splits] == [1, 20, 100, 500] else found.verdict

    def cancel(self) -> str:
        body = {"model": self._subject.chat, "messages": HELLO, "max_tokens": 500, "stream": True}
        with self._stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_bytes())
        self._stack.eventually(lambda: not self._stack.status()["exchanges"]["open"], "the slot is free again")
        return "ok" if self._stack.status()["counts"]["outcomes"].get("client_cancelled") else "not told as cancelled"

    def killed(self) -> str:
        if self._subject.end is None:
            return "not ours to kill"
        body = {"model": self._subject.chat, "messages": HELLO, "max_tokens": 500, "stream": True}
        got = b""
        try:
            with self._stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
                for part in reply.iter_bytes():
                    if not got:
                        self._subject.end()
                    got += part
        except httpx.RemoteProtocolError:
            return "ok" if b"[DONE]" not in got else "a good end was made up"
        return "ok" if b"upstream_truncated" in got else got[-200:].decode()


STEPS: dict[str, tuple[Callable[[Asker], str], tuple[str, ...]]] = {
    "chat": (Asker.chat, ("ok",)),
    "stream": (Asker.stream, ("ok",)),
    "tools": (Asker.tools, ("ok", "no call")),
    "embeddings": (Asker.embeddings, ("ok", "no model")),
    "rerank": (Asker.rerank, ("ok", "no model")),
    "over-long context": (Asker.context, ("400 context_length_exceeded",)),
    "bad parameter": (Asker.parameter, ("400 invalid_request",)),
    "split of 1 to 500 tokens": (Asker.split, ("ok",)),
    "cancel": (Asker.cancel, ("ok",)),
    "killed mid-stream": (Asker.killed, ("ok", "not ours to kill")),
}
"""Each with the outcomes that are right. Small models have no template for tools, so they call none."""


def main() -> int:
    """Ask all of them."""
    parser = argparse.ArgumentParser(description="Ask real engines through the gateway.")
    parser.add_argument("--vllm", default="", metavar="ADDRESS=MODEL", help="a vLLM that runs")
    parser.add_argument("--vllm-pooling", default="", metavar="ADDRESS=MODEL", help="a vLLM that runs with --runner pooling")
    given = parser.parse_args()
    began = time.monotonic()
    wrong = []
    with ExitStack() as exits:
        pools: dict[str, Any] = {}
        subjects = [_llamacpp(exits, pools)]
        if given.vllm:
            chat, pooled = _vllm(given.vllm, pools), _vllm(given.vllm_pooling, pools)
            subjects.append(Subject("vLLM", chat, pooled, pooled))
        stack = exits.enter_context(Stack({"pools": pools, "tenants": [tenant("acme")]}))
        rows = [["step", *(subject.title for subject in subjects)], ["---"] * (1 + len(subjects))]
        for step, (ask, right) in STEPS.items():
            found = [_outcome(ask, Asker(stack, subject)) for subject in subjects]
            rows.append([step, *found])
            wrong += [f"{step}: {each}" for each in found if each not in right]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"{time.monotonic() - began:.0f} s", *wrong, sep="\n")
    return int(bool(wrong))


def _llamacpp(exits: ExitStack, pools: dict[str, Any]) -> Subject:
    servers = {
        "chat": exits.enter_context(LlamaServer("--ctx", "2048", "--parallel", "2", alias="chat")),
        "vectors": exits.enter_context(LlamaServer("--ctx", "512", "--parallel", "1", "--embedding", "--pooling", "mean", alias="vectors")),
        "ranks": exits.enter_context(LlamaServer("--ctx", "512", "--parallel", "1", "--rerank", alias="ranks")),
    }
    for name, server in servers.items():
        pools[name] = {"model": name, "engine": "llamacpp", "nodes": [node(name, server.address, max_seq_len=100_000)]}
    return Subject("llama.cpp", "chat", "vectors", "ranks", servers["chat"].end)


def _vllm(told: str, pools: dict[str, Any]) -> str:
    address, _, model = told.partition("=")
    if model:
        name = f"vllm-{len(pools)}"
        pools[name] = {"model": model, "engine": "vllm", "nodes": [node(name, address, max_seq_len=100_000)]}
    return model


def _outcome(ask: Callable[[Asker], str], asker: Asker) -> str:
    try:
        return ask(asker)
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"[:200]


if __name__ == "__main__":
    sys.exit(main())

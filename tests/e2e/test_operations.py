"""Operations beside chats and embeddings, through a real Envoy: each reaches a node that has it, and is charged as the table says."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest

from din_extproc.domain.request import BUILT_IN, Metering, Operation
from din_extproc.tools.verify.sample_body import build_body, content_type
from tests.support.engine_fleet import EngineFleet
from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e

HELLO = [{"role": "user", "content": "hello there, who are you?"}]
GENERATE = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "hello there"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
POOL = {
    "/v1/score": {"text_1": "a cat", "text_2": ["a dog", "a cat"]},
    "/score": {"text_1": "a cat", "text_2": "a dog"},
    "/pooling": {"input": "hello there"},
    "/classify": {"input": ["hello", "there"]},
    "/rerank": {"query": "cat", "documents": ["a dog", "a cat"]},
    "/v2/rerank": {"query": "cat", "documents": ["a dog", "a cat"]},
}
CASES = [*(("chats", *each) for each in GENERATE.items()), *(("vectors", *each) for each in POOL.items())]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with EngineFleet({"g": {"model": "g"}, "p": {"model": "p", "runner": "pooling"}}) as running:
        yield dict(running.members)


@pytest.fixture(scope="module")
def stack(engines, own_node) -> Iterator[Stack]:
    pools = {
        "chats": {"model": "g", "engine": "vllm", "operations": ["generate", "transcribe"], "nodes": [node("g-1", engines["g"].address)]},
        "vectors": {"model": "p", "engine": "vllm", "operations": "pooling", "nodes": [node("p-1", engines["p"].address)]},
        "own": {"model": "o", "engine": "sglang", "operations": ["/v1/moderations"], "nodes": [node("o-1", own_node)]},
        "other": {"model": "t", "engine": "tensorrt_llm", "nodes": [node("t-1", engines["p"].address)]},
    }
    operations = {"/v1/moderations": {"engines": ["sglang"], "paths": ["/moderations"], "prompt": ["input"], "metering": "prompt"}}
    aliases = {"own": {"model": "o"}, "chats": {"model": "g"}, "vectors": {"model": "p"}, "other": {"model": "t"}}
    with Stack({"operations": operations, "aliases": aliases, "pools": pools, "tenants": [tenant("acme")]}) as running:
        yield running


class OwnNode(BaseHTTPRequestHandler):
    """A node with an operation that is not built in: it counts the words of the input."""

    seen: ClassVar[list[tuple[str, bytes]]] = []

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, body))
        words = len(json.loads(body)["input"].split())
        self._answer({"flagged": False, "usage": {"prompt_tokens": words, "total_tokens": words}})

    def _answer(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_about: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def own_node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OwnNode) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def of_trace(seen: list[dict[str, Any]], reply: httpx.Response) -> list[dict[str, Any]]:
    """Return what an engine saw of an exchange."""
    return [each for each in seen if dict(each["headers"]).get("x-din-trace-id") == reply.headers["x-din-trace-id"]]


@pytest.mark.parametrize(("alias", "path", "body"), CASES)
def test_an_operation_reaches_its_node_with_the_engines_name_and_is_metered(stack, engines, alias, path, body):
    operation = BUILT_IN[path]
    with stack.client() as client:
        reply = client.post(path, json={"model": alias, **body})
    assert reply.status_code == 200, reply.text
    _, seen = engines["g" if alias == "chats" else "p"].seen()
    [asked] = of_trace(seen, reply)
    assert asked["path"] == operation.value
    assert json.loads(asked["body"]) == {"model": "g" if alias == "chats" else "p", **body}
    prompt, output = stack.cost(reply)
    reported = (reply.json().get("usage") or {}).get("prompt_tokens", 0)
    assert (prompt, output) == (reported, 0)
    assert (prompt > 0) is (operation.spec.metering is Metering.PROMPT)


@pytest.mark.parametrize("path", ["/v1/moderations", "/moderations"])
def test_an_operation_of_the_configuration_s_own_reaches_the_engine_that_it_names(stack, path):
    with stack.client() as client:
        reply = client.post(path, json={"model": "own", "input": "four words are here"})
        refused = client.post(path, json={"model": "chats", "input": "four words are here"})
    assert (reply.status_code, reply.headers["x-din-node-id"]) == (200, "o-1"), reply.text
    asked, body = OwnNode.seen[-1]
    assert (asked, json.loads(body)) == ("/v1/moderations", {"model": "o", "input": "four words are here"})
    assert stack.cost(reply) == (4, 0)
    assert (refused.status_code, refused.json()["detail"]) == (400, "The model `chats` does not serve /v1/moderations.")


@pytest.mark.parametrize("operation", [Operation.TRANSCRIPTIONS, Operation.TRANSLATIONS])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "stream"])
def test_a_form_reaches_its_node_with_the_engines_name_and_is_metered_by_its_length(stack, engines, operation, whole):
    body = build_body(operation, "chats", 3, stream=not whole)
    with stack.client() as client:
        reply = client.post(operation.value, content=body, headers={"content-type": content_type(operation)})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"] == {"type": "duration", "seconds": 1}
    _, seen = engines["g"].seen()
    [asked] = of_trace(seen, reply)
    assert asked["body"] == build_body(operation, "g", 3, stream=not whole)
    assert stack.cost(reply) == (10, 0)


def test_a_form_of_25_mib_passes_and_a_larger_one_is_refused(stack, engines):
    operation = Operation.TRANSCRIPTIONS
    body = build_body(operation, "chats", 3)
    at = body.rindex(b"data") + 8
    large = body[:at] + bytes(25 << 20) + body[at:]
    with stack.client() as client:
        headers = {"content-type": content_type(operation)}
        replies = [client.post(operation.value, content=each, headers=headers) for each in (large, large + bytes(1 << 20))]
    assert [reply.status_code for reply in replies] == [200, 413], replies[0].text
    assert replies[0].json()["usage"]["seconds"] == (25 << 20) // 8_000 + 2
    assert replies[1].json()["code"] == "request_too_large"


def test_a_malformed_form_is_refused_and_reaches_no_node(stack, engines):
    with stack.client() as client:
        body = build_body(Operation.TRANSCRIPTIONS, "chats", 3)[:-6]
        reply = client.post(Operation.TRANSCRIPTIONS.value, content=body, headers={"content-type": content_type(Operation.TRANSCRIPTIONS)})
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert "part 3 is not closed by the boundary" in reply.json()["detail"]
    _, seen = engines["g"].seen()
    assert of_trace(seen, reply) == []


@pytest.mark.parametrize("operation", [Operation.TOKENIZE, Operation.SCORE, Operation.COUNT_TOKENS, Operation.SPEECH])
def test_a_pool_whose_engine_lacks_an_operation_never_gets_it(stack, engines, operation):
    with stack.client() as client:
        body = {"model": "other", "messages": HELLO, "input": "a", "prompt": "a", "text_1": "a", "text_2": "b"}
        reply = client.post(operation.value, json=body)
    assert reply.status_code in {400, 404}, reply.text
    _, seen = engines["p"].seen()
    assert of_trace(seen, reply) == []


def test_a_prompt_longer_than_every_context_is_still_counted(stack):
    with stack.client() as client:
        reply = client.post("/tokenize", json={"model": "chats", "prompt": "word " * 40_000})
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] >= 40_000
    assert stack.cost(reply) == (0, 0)

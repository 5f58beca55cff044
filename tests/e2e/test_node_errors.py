"""Nodes that answer with errors, through the real Envoy: whatever they write, the client gets the one error body, and pays nothing."""

import contextlib
import gzip
import json
import socketserver
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Self

import httpx
import pytest

from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, node, tenant
from tests.unit.southbound.test_errors import CAPTURED, CAPTURES, PAGE

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"


class Parrot:
    """A node that answers everything with the same bytes, and closes."""

    def __init__(self) -> None:
        parrot = self

        class Cage(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                if self.rfile.readline() == b"":
                    return  # a connection that was opened and not used
                lines = iter(lambda: self.rfile.readline().strip().decode("latin-1"), "")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                self.rfile.read(int(headers.get("content-length", 0)))
                parrot.traces.append(headers.get("x-din-trace-id", ""))
                with contextlib.suppress(OSError):
                    self.wfile.write(parrot.says)
                    while parrot.is_endless:
                        self.wfile.write(b"4\r\nmore\r\n" * 1000)

        self.says = b""
        self.traces: list[str] = []
        """The trace id of each request."""
        self.is_endless = False
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Cage)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def answers(self, status: int, body: bytes, *, chunked: bool = False, **headers: str) -> None:
        """From now on. Without a `content_type` there is none."""
        lines = [f"HTTP/1.1 {status} Told", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        if chunked:
            parts = [body[at : at + 4096] for at in range(0, len(body), 4096)]
            lines.append("transfer-encoding: chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            lines.append(f"content-length: {len(body)}")
        self.says = "\r\n".join([*lines, "connection: close", "", ""]).encode() + body

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def parrot() -> Iterator[Parrot]:
    with Parrot() as bird:
        yield bird


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(scope="module")
def stack(parrot, sim) -> Iterator[Stack]:
    captured = dict.fromkeys(("vllm", "llamacpp", "ollama"), parrot.address)
    addresses = {**captured, "liar": parrot.address, "m": sim.address, "nobody": f"127.0.0.1:{free_port()}"}
    translated = {"native": parrot.address, "nobody-native": f"127.0.0.1:{free_port()}"}
    ollama = {"engine": "ollama", "api": "native"}
    config = {
        "pools": {
            **{model: {"model": model, **ollama, "nodes": [node(f"node-{model}", address)]} for model, address in translated.items()},
            **{
                model: {"model": model, "engine": model if model in captured else "vllm", "nodes": [node(f"node-{model}", address)]}
                for model, address in addresses.items()
            },
        },
        "tenants": [tenant("acme"), tenant("trial", tpm=10_000, rpm=1000), tenant("single", rpm=1)],
        "health": {"breaker": False, "probe": False},
        "envoy": {
            "retry": {"attempts": 1},
            "health_check": False,
            "outlier": {"consecutive_connect_failures": 1000},
        },
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(sim) -> Iterator[None]:
    sim.forget()
    yield
    sim.fail("")


def ask(model: str = "vllm", **fields) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def ours(reply: httpx.Response, status: int, code: str) -> dict:
    """The one error body, complete and consistent."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert (body["code"], body["error"]["code"], body["status"]) == (code, code, status)
    assert body["type"] == f"urn:din-extproc:error:{code}"
    assert body["trace_id"] == reply.headers["x-din-trace-id"]
    assert (body["instance"], body["detail"]) == (PATH, body["error"]["message"])
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers.get("content-length", len(reply.content))) == len(reply.content), "a correct content-length, or chunks"
    assert "content-encoding" not in reply.headers
    assert {"x-din-exec-time-ms", "x-ratelimit-remaining-tokens"} <= reply.headers.keys()
    return body


@contextlib.contextmanager
def accounted(stack: Stack, exchanges: int = 1) -> Iterator[SimpleNamespace]:
    """What the exchanges inside the block came to. Afterwards no slot is taken."""
    stack.eventually(lambda: not stack.status()["exchanges"]["open"], "nothing is open")
    before = stack.all_accounted()["counts"]
    accounts = SimpleNamespace()
    yield accounts
    after = stack.settled(sum(before["outcomes"].values()) + exchanges)["counts"]
    changed = {name: count - before["outcomes"].get(name, 0) for name, count in after["outcomes"].items()}
    accounts.outcomes = {name: count for name, count in changed.items() if count}
    accounts.tokens = sum(after[f"{kind}_tokens"] - before[f"{kind}_tokens"] for kind in ("prompt", "completion"))
    stack.eventually(lambda: stack.redis_keys(":lease:") == [], "every slot is free")


@pytest.mark.parametrize("status", [101, 301, 302, 304, 307, 308])
def test_a_node_sends_no_client_elsewhere(stack, parrot, status):
    """A client that follows a redirection takes the prompt along."""
    parrot.answers(status, b"", location="http://127.0.0.1:1/steal")
    with accounted(stack) as accounts:
        reply = stack.chat(ask())
    ours(reply, 502, "upstream_error")
    assert "location" not in reply.headers
    assert accounts.outcomes == {"upstream_error": 1}


def test_a_node_that_claims_more_tokens_than_can_be_is_not_believed(stack, parrot):
    usage = {"prompt_tokens": 1_000_000_000, "completion_tokens": 1_000_000_000_000}
    answer = {"object": "chat.completion", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage}
    parrot.answers(200, json.dumps(answer).encode(), content_type="application/json")
    with accounted(stack) as accounts:
        assert stack.chat(ask()).json()["usage"] == usage
    assert accounts.outcomes == {"completed": 1}
    assert 0 < accounts.tokens < 100


def test_every_captured_error_is_retold_and_the_connection_goes_on(stack, parrot):
    with accounted(stack, len(CAPTURED)) as accounts, stack.client() as client:
        for name, (code, status, param) in CAPTURED.items():
            head, _, body = (CAPTURES / f"{name}.txt").read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")
            parrot.answers(int(head.split()[1]), body, content_type="application/json", server="engine")
            engine = name.partition("/")[0]
            answer = client.post(PATH, json=ask(engine, stream="stream" in name))
            assert ours(answer, status, code)["error"]["param"] == param
            assert answer.headers["x-din-node-id"] == f"node-{engine}"
    assert accounts.tokens == 0
    assert accounts.outcomes["client_error"] > accounts.outcomes["upstream_error"] > 0


DETAIL = json.dumps({"detail": "no such field"}).encode()


@pytest.mark.parametrize(
    ("status", "body", "more", "expected"),
    [
        (502, PAGE, {"content_type": "text/html"}, (502, "upstream_error")),
        (502, PAGE, {"content_type": "text/html", "chunked": True}, (502, "upstream_error")),
        (503, b"", {}, (503, "upstream_error")),
        (403, b"", {}, (403, "upstream_error")),
        (500, b'{"error":"\xff\xfe"', {"content_type": "application/json"}, (502, "upstream_error")),
        (504, b"upstream request timeout", {"content_type": "text/plain"}, (504, "upstream_timeout")),
        (429, PAGE, {"content_type": "text/html", "retry_after": "Thu, 01 Jan 2099 00:00:00 GMT"}, (429, "upstream_busy")),
        (400, gzip.compress(DETAIL, mtime=0), {"content_type": "application/json", "content_encoding": "gzip"}, (400, "invalid_request")),
        (400, DETAIL, {"content_type": "application/json", "content_encoding": "br"}, (400, "invalid_request")),
        (400, DETAIL, {"content_type": "application/json", "chunked": True}, (400, "invalid_request")),
    ],
)
def test_whatever_a_node_writes_its_class_is_kept_and_nothing_else_of_it_shows(stack, parrot, status, body, more, expected):
    parrot.answers(status, body, **more)
    with accounted(stack), stack.client() as client:
        answer = client.post(PATH, json=ask())
        client_error = ours(answer, *expected)
        assert len(answer.content) < 1000
        assert "nginx" not in answer.text
        if body == DETAIL or "gzip" in more.values():
            assert client_error["detail"] == ("no such field" if more.get("content_encoding") != "br" else "The request is malformed")
        if expected[0] in (429, 503):
            assert answer.headers["retry-after"] == ("3600" if expected[0] == 429 else "1")
        parrot.answers(400, DETAIL)
        assert client.post(PATH, json=ask()).json()["detail"] == "no such field", "the next one on the same connection"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_web_page_that_calls_itself_a_good_answer_is_a_502_that_costs_nothing(stack, parrot, chunked):
    parrot.answers(200, PAGE, content_type="text/html", chunked=chunked)
    with accounted(stack, 2) as accounts, stack.client() as client:
        answer = client.post(PATH, json=ask(stream=chunked))
        body = answer.json()
        assert (answer.status_code, body["status"], body["code"]) == (502, 502, "upstream_error")
        assert body["trace_id"] == answer.headers["x-din-trace-id"]
        assert answer.headers["content-type"] == "application/json"
        parrot.answers(400, DETAIL)
        assert client.post(PATH, json=ask()).json()["detail"] == "no such field", "the next one on the same connection"
    assert (accounts.outcomes.get("upstream_error"), accounts.tokens) == (1, 0)


def test_a_translation_that_fails_is_a_502_and_nothing_of_the_engines_own_words_shows(stack, parrot):
    arguments = b"[" * 10_000 + b"]" * 10_000
    deep = b'{"message":{"content":"own words","tool_calls":[{"function":{"arguments":%b}}]},"done":true}' % arguments
    parrot.answers(200, deep, content_type="application/json")
    with accounted(stack, 2) as accounts:
        ours(stack.chat(ask("native")), 502, "upstream_error")
        parrot.answers(200, b'{"message":{"content":"hi"}}\n' + deep, content_type="application/x-ndjson")
        streamed = stack.chat(ask("native", stream=True))
    assert accounts.outcomes == {"upstream_error": 2}
    assert "own words" not in streamed.text
    assert '"upstream_error"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_an_answer_that_is_too_large_to_be_translated_is_a_502_with_the_reason_in_the_log(stack, parrot):
    parrot.answers(200, b'{"done":true,"message":{"content":"%b"}}' % (b"x" * (33 << 20)), content_type="application/json")
    with accounted(stack) as accounts:
        answer = stack.chat(ask("native"))
    body = answer.json()
    assert (answer.status_code, body["status"], body["code"]) == (502, 502, "upstream_error")
    assert "larger than the gateway holds" in body["detail"]
    assert (accounts.outcomes, accounts.tokens) == ({"upstream_error": 1}, 0)

    def logged() -> list[str]:
        return [json.loads(line)["code"] for line in stack.log("sidecar").splitlines() if body["trace_id"] in line]

    stack.eventually(lambda: logged() == ["answer_too_large"], "it is logged")


def test_envoys_own_answers_name_the_path_that_the_client_asked_for(stack):
    with stack.client() as client:
        assert client.post(PATH, json=ask("nobody-native")).json()["instance"] == PATH
        assert client.post("/v1/chat/completions?key=secret", json=ask("nobody")).json()["instance"] == PATH


def test_an_error_that_never_ends_is_not_waited_for(stack, parrot):
    parrot.answers(500, b"", chunked=True, content_type="text/plain")
    parrot.says = parrot.says.removesuffix(b"0\r\n\r\n")
    parrot.is_endless = True
    try:
        with accounted(stack) as accounts:
            ours(stack.chat(ask()), 502, "upstream_error")
    finally:
        parrot.is_endless = False
    assert (accounts.outcomes, accounts.tokens) == ({"upstream_error": 1}, 0)


def test_a_nodes_429_is_not_tried_elsewhere_costs_nothing_and_is_no_limit_of_the_tenant(stack, parrot):
    parrot.answers(429, b'{"error":{"message":"quota"}}', content_type="application/json", retry_after="7")
    with accounted(stack) as accounts:
        body = ours(busy := stack.chat(ask(max_tokens=3000), tenant_name="trial"), 429, "upstream_busy")
    assert parrot.traces.count(busy.headers["x-din-trace-id"]) == 1
    assert (busy.headers["retry-after"], busy.headers["retry-after-ms"], body["error"]["type"]) == ("7", "7000", "server_error")
    assert (accounts.outcomes, accounts.tokens) == ({"upstream_busy": 1}, 0)
    after = stack.chat(ask("m"), tenant_name="trial")
    assert int(after.headers["x-ratelimit-remaining-tokens"]) > 9_000, "the reservation came back"
    own = [stack.chat(ask("m"), tenant_name="single") for _ in range(2)][1].json()["error"]
    assert (own["code"], own["type"]) == ("rate_limit_exceeded", "rate_limit_error")


def test_a_node_without_memory_is_a_503_with_its_time_and_asked_again_when_it_has_some(stack, sim):
    sim.fail("oom:count=1")
    with accounted(stack) as accounts:
        out = stack.chat(ask("m"))
        body = ours(out, 503, "insufficient_gpu_capacity")
        assert int(out.headers["retry-after"]) >= 1
        assert "GiB" not in out.text, "how large the node is concerns nobody"
    assert (accounts.outcomes, accounts.tokens) == ({"upstream_error": 1}, 0)
    assert body["error"]["message"]
    assert stack.chat(ask("m")).status_code == 200


def test_what_the_gateways_of_nodes_and_envoy_itself_say_passes_as_it_is(stack, parrot):
    error_body = {"type": "urn:din-extproc:error:trace_missing", "code": "trace_missing", "detail": "as the node's agent says it"}
    parrot.answers(400, json.dumps(error_body).encode(), content_type="application/json")
    assert stack.chat(ask()).json() == error_body
    unreachable = stack.chat(ask("nobody"))
    assert (unreachable.status_code, unreachable.json()["code"]) == (503, "no_healthy_node")
    assert unreachable.json()["detail"] == "No node could be reached"


def test_who_asks_for_problem_json_gets_it(stack, parrot):
    parrot.answers(400, DETAIL)
    reply = stack.chat(ask(), headers={"accept": "application/problem+json"})
    assert (reply.status_code, reply.headers["content-type"], reply.json()["detail"]) == (400, "application/problem+json", "no such field")


def test_an_error_in_a_stream_that_has_begun_stays_in_band(stack, sim):
    sim.fail("error_event:after=2")
    reply = stack.chat(ask("m", stream=True))
    assert reply.status_code == 200
    assert '"error"' in reply.text


def test_a_good_answer_costs_no_further_message(stack, sim, parrot):
    def sent() -> int:
        return sum(stack.envoy_stats("http.din.ext_proc.stream_msgs_sent").values())

    before = sent()
    assert stack.chat(ask("m")).status_code == 200
    good = sent() - before
    parrot.answers(400, DETAIL)
    assert stack.chat(ask()).status_code == 400
    assert (good, sent() - before - good) == (3, 4)


def test_a_usage_that_can_not_be_is_replaced_by_the_estimate_and_costs_the_node_trust(stack, parrot):
    def trust() -> float:
        rows = httpx.get(f"{stack.admin_url}/nodes").json()["nodes"]
        return next(row["trust"] for row in rows if row["node"]["id"] == "node-liar")

    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 120_000, "completion_tokens": 1, "total_tokens": 120_001}
    parrot.answers(200, json.dumps({"choices": [choice], "usage": usage}).encode(), content_type="application/json")
    assert trust() == 1.0
    with stack.client() as client:
        reply = client.post(PATH, json=ask("liar"))
    assert (reply.status_code, reply.json()["usage"]) == (200, usage)
    assert 0 < sum(stack.cost(reply)) < 100
    stack.eventually(lambda: trust() < 1.0, "the node is trusted less")

"""What clients choose freely: no series of metrics, no line of a log, no place in a URL that is written down."""

import json
import random
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
SECRET = "sk-live-SECRETSECRETSECRET"


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=5000.0) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    config = {"pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}}, "tenants": [tenant("acme")]}
    with Stack(config) as running:
        yield running


def series(stack: Stack) -> set[str]:
    """Every series on the metrics page, without its value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    samples = [line for line in lines if line and not line.startswith("#")]
    for line in samples:
        float(line.rpartition(" ")[2])
    return {line.rpartition(" ")[0] for line in samples}


def odd(draw: random.Random) -> str:
    return "".join(draw.choice('abc\u4f60\n"\\{}= 💥') for _ in range(draw.randint(1, 2000)))


def test_names_that_clients_make_up_add_no_series(stack):
    draw = random.Random(7)
    with stack.client() as client:

        def round_of_requests(count: int) -> None:
            for _ in range(count):
                body = {"model": odd(draw), "messages": [{"role": "user", "content": "x"}], "user": odd(draw)}
                reply = client.post(PATH, json=body, headers={"x-request-id": f"{draw.random()}"})
                assert reply.status_code in {400, 404}, reply.text
            assert client.post(PATH, content=b"{").status_code == 400
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "user": odd(draw)}
            assert client.post(PATH, json=body).status_code == 200

        assert client.post(PATH, json={"model": "unknown", "messages": []}).status_code == 404
        round_of_requests(20)
        stack.settled(23)
        stack.eventually(lambda: any(each.startswith("din_node_running{") for each in series(stack)), "the node's own page was read")
        before = series(stack)
        round_of_requests(200)
        stack.settled(23 + 202)
        after = series(stack)
    assert after == before


@pytest.mark.parametrize("path", [f"/v1/models?api_key={SECRET}", f"{PATH}?key={SECRET}", f"/nowhere?token={SECRET}"])
def test_a_key_in_a_query_is_written_down_nowhere(stack, engine, path):
    with stack.client() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        reply = client.get(path) if "models" in path else client.post(path, json=body)
    output = reply.text + str(reply.headers) + stack.log("sidecar") + stack.log("envoy") + json.dumps(stack.status())
    assert SECRET not in output
    assert SECRET not in str([request["path"] for request in engine.seen()[1]])


@pytest.mark.parametrize(
    "line",
    [
        "traceparent: 00-00000000000000000000000000000000-0000000000000000-00",
        "traceparent: 00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
        "traceparent: nonsense",
        "tracestate: " + "a=" + "b" * 8000,
        'x-request-id: a{"level":"ERROR"}',
        "x-din-trace-id: a\x1b[2J b",
    ],
    ids=lambda line: line[:24],
)
def test_an_odd_trace_header_costs_nobody_an_answer_and_forges_no_line(stack, line):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "user": "\u001b[2J\n2026 ERROR"})
    head = [f"POST {PATH} HTTP/1.1", "host: g", f"authorization: Bearer {key_of('acme')}", "connection: close"]
    head += ["content-type: application/json", f"content-length: {len(body)}", line]
    reply = raw_request(stack.port, "\r\n".join([*head, "", body]).encode())
    no_http = "\x1b" in line
    assert reply.startswith(b"HTTP/1.1 400 " if no_http else b"HTTP/1.1 200 "), reply
    for entry in filter(None, stack.log("sidecar").splitlines()):
        assert json.loads(entry)["level"] in {"info", "warning"}, entry

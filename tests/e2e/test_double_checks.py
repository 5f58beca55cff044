"""Three nodes that are to be equals, one of which is not: double checks find it out, and no client notices them."""

import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.operating import Operator, admin_keys
from tests.support.servers import free_port
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
SOUND, LIE = [" Paris", "."], [" London", "."]
SAYS = {"gpu-1": SOUND, "gpu-2": LIE, "gpu-3": SOUND}


class Engine(BaseHTTPRequestHandler):
    """Says what its node says, with log probabilities to whoever asks for them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked)
        content = [{"token": token, "logprob": -0.01, "top_logprobs": []} for token in self.server.says]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "".join(self.server.says)}}
        if asked.get("logprobs"):
            choice["logprobs"] = {"content": content}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        self.reply({"id": "x", "object": "chat.completion", "model": asked["model"], "choices": [choice], "usage": usage})

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture(scope="module")
def engines():
    servers = {}
    for name, says in SAYS.items():
        servers[name] = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
        servers[name].says, servers[name].asked = says, []
        threading.Thread(target=servers[name].serve_forever, args=(0.05,), daemon=True).start()
    yield servers
    for server in servers.values():
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def stack(engines):
    door = free_port()
    section = {"http_address": f"127.0.0.1:{door}", "node_tokens_file": "tokens.yaml", "heartbeat_s": 1, "dead_after_s": 30}
    gateway = {"registry": section, "xds": {"address": f"127.0.0.1:{free_port()}"}, "workers": 2}
    config = {
        "pools": {"chat": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "dtype": "bf16"}},
        "tenants": [tenant("acme")],
        "verification": {"share": 1.0, "tokens_per_minute": 1_000_000},
        "audit": {"folder": "audit", "replica": "gw", "keys": {"k": {"file": "audit.key"}}, "flush_ms": 20},
    }
    running = Stack({}, gateway=gateway)
    tokens = {name: make_node_token(name, bytes([at]) * ENTROPY_BYTES) for at, name in enumerate(SAYS)}
    (running.folder / "tokens.yaml").write_text("".join(f'{name}: "{token.hash}"\n' for name, token in tokens.items()))
    (running.folder / "audit.key").write_text("an audit key of these tests, long enough")
    running.write(config)
    with running:
        for name, engine in engines.items():
            join(door, name, tokens[name].text, engine.server_address[1])
        yield running


def join(door: int, name: str, token: str, port: int) -> None:
    def say(path: str, body: dict) -> dict:
        headers = {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{door}/v1/nodes{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read())

    node = {"id": name, "address": f"127.0.0.1:{port}", "model": "m", "version": "1.0.0", "dtype": "bf16", "engine": "vllm"}
    lease = say("", {**node, "max_seq_len": 8192})["lease"]
    say(f"/{name}/heartbeat", {"lease": lease, "sequence": 1, "state": "ready"})


def nodes(stack) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/nodes", timeout=5) as reply:
        return {row["node"]["id"]: row for row in json.loads(reply.read())["nodes"]}


def ask(stack):
    deadline = time.monotonic() + 20
    while (reply := stack.chat(temperature=1.0)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    return reply


def test_the_odd_one_is_found_written_down_and_kept_out_and_clients_notice_nothing(stack, engines):
    asked = 0
    deadline = time.monotonic() + 60
    while nodes(stack)["gpu-2"]["state"] != "quarantined":
        assert time.monotonic() < deadline, (stack.status()["double_checks"], nodes(stack), stack.log("sidecar")[-2000:])
        reply = ask(stack)
        assert reply.status_code == 200, reply.text
        asked += 1
        first_choice = reply.json()["choices"][0]
        assert first_choice["message"]["content"] == "".join(SAYS[reply.headers["x-din-node-id"]])
        assert "logprobs" not in first_choice
        time.sleep(0.1)
    found = nodes(stack)
    assert found["gpu-2"]["trust"] < 0.5
    assert "answers differ" in found["gpu-2"]["reasons"][-1]
    assert {found[name]["state"] for name in ("gpu-1", "gpu-3")} == {"ready"}
    assert min(found[name]["trust"] for name in ("gpu-1", "gpu-3")) > 0.9
    assert "double check failed" in stack.log("sidecar")
    status = stack.settled(asked)
    assert status["double_checks"]["differ"] >= 3
    assert status["counts"]["prompt_tokens"] == 10 * asked, "double checks are nobody's requests"
    assert status["counts"]["completion_tokens"] == 2 * asked
    clients = [body for engine in engines.values() for body in engine.asked if body.get("temperature") == 1.0]
    checks = [body for engine in engines.values() for body in engine.asked if body.get("logprobs")]
    assert len(clients) == asked
    assert {(body["temperature"], body["stream"], body["model"]) for body in checks} == {(0, False, "m")}

    def written() -> list[dict]:
        lines = [line for file in (stack.folder / "audit").glob("gw-*.jsonl") for line in file.read_text().splitlines()]
        return [record for record in map(json.loads, lines) if record["kind"] == "mismatch"]

    stack.eventually(lambda: len(written()) >= 3, "mismatches are in the audit log")
    assert {(record["at_token"], record["tokens"]) for record in written()} == {(0, 2)}
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/metrics", timeout=5) as page:
        assert b'din_double_checks_total{din_agreement="differ"}' in page.read()


def test_a_listed_node_whose_answers_differ_loses_trust_and_is_kept_out_until_it_is_released(engines):
    listed = [node(name, f"127.0.0.1:{engine.server_address[1]}") for name, engine in engines.items()]
    config = {
        "pools": {"chat": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": listed}},
        "tenants": [tenant("acme")],
        "verification": {"share": 1.0, "tokens_per_minute": 1_000_000},
    }
    for engine in engines.values():
        engine.asked.clear()
    with Stack(config, admin_keys=admin_keys()) as stack:
        operator = Operator(stack)

        def found_out() -> bool:
            assert stack.chat(temperature=0, seed=7, max_tokens=100).status_code == 200
            return listed_nodes(operator)["gpu-2"]["state"] == "quarantined"

        stack.eventually(found_out, "the odd one is quarantined")
        rows = listed_nodes(operator)
        assert rows["gpu-2"]["trust"] < 0.5
        assert "answers differ" in rows["gpu-2"]["reasons"][-1]
        assert {rows[name]["state"] for name in ("gpu-1", "gpu-3")} == {"ready"}
        assert min(rows[name]["trust"] for name in ("gpu-1", "gpu-3")) > 0.9
        assert {stack.chat().headers["x-din-node-id"] for _ in range(8)} == {"gpu-1", "gpu-3"}
        checks = [body for engine in engines.values() for body in engine.asked if body.get("logprobs")]
        assert {(body["temperature"], body["seed"], body["max_tokens"]) for body in checks if "seed" in body} >= {(0, 7, 100)}

        def released() -> bool:  # a check that had begun before it was quarantined can still lower its trust
            assert operator.run("nodes", "release", "gpu-2").returncode == 0
            row = listed_nodes(operator)["gpu-2"]
            return (row["state"], row["trust"]) == ("ready", 1.0)

        stack.eventually(released, "it is released and trusted again")


def listed_nodes(operator: Operator) -> dict:
    return {row["node"]["id"]: row for row in operator.get("/nodes").json()["nodes"]}

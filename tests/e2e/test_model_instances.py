"""One engine with several models: its agent registers all of them, and each is served by its pool with a queue of its own."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.node_stack import NodeStack
from tests.support.servers import free_port
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e
TOKEN = make_node_token("gpu-1", bytes(ENTROPY_BYTES))


class Engine(BaseHTTPRequestHandler):
    """Lists `server.models` and answers for each of them; its metrics page tells each one's queue."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/metrics":
            queues = "".join(
                f'vllm:num_requests_waiting{{engine="0",model_name="{name}"}} {waiting}\n' for name, waiting in self.server.models.items()
            )
            self.reply(queues.encode(), "text/plain")
        else:
            self.reply(json.dumps({"object": "list", "data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": f"as {asked['model']}"}}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        self.reply(
            json.dumps({"id": "x", "object": "chat.completion", "model": asked["model"], "choices": [choice], "usage": usage}).encode()
        )

    def reply(self, data: bytes, kind: str = "application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.models = {"base": 4, "law": 1}
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    section = {"http_address": f"127.0.0.1:{free_port()}", "node_tokens_file": "tokens.yaml", "heartbeat_s": 0.2, "dead_after_s": 10}
    pools = {name: {"model": name, "engine": "vllm", "dtype": "bf16"} for name in ("base", "law", "tax")}
    running = Stack({}, gateway={"registry": section, "xds": {"address": f"127.0.0.1:{free_port()}"}})
    (running.folder / "tokens.yaml").write_text(f'gpu-1: "{TOKEN.hash}"\n')
    running.registry = section["http_address"]
    running.write({"pools": pools, "tenants": [tenant("acme")]})
    with running:
        yield running


def row(stack: Stack) -> dict:
    with urllib.request.urlopen(f"{stack.admin_url}/nodes", timeout=10) as reply:
        found = [each for each in json.loads(reply.read())["nodes"] if each["node"]["id"] == "gpu-1"]
    return found[0] if found else {"pools": [], "beat": None, "state": ""}


def answer(stack: Stack, model: str) -> tuple[int, str, str]:
    reply = stack.chat(model=model)
    content = reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else ""
    return reply.status_code, reply.headers.get("x-din-node-id", ""), content


def test_every_model_of_an_engine_is_served_with_its_own_queue_and_what_the_engine_unloads_is_not(stack, engine, tmp_path):
    (tmp_path / "token").write_text(TOKEN.text)
    address = f"127.0.0.1:{engine.server_address[1]}"
    agent = NodeStack(address, f"http://{stack.registry}", model="base", token_file=str(tmp_path / "token"))
    agent.config["engine"]["all_models"] = True
    with agent:
        stack.eventually(lambda: set(row(stack)["pools"]) == {"base", "law"}, lambda: f"both models are routed to: {row(stack)}")
        for model in ("base", "law"):
            stack.eventually(lambda model=model: answer(stack, model) == (200, "gpu-1", f"as {model}"), f"{model} is served")
        stack.eventually(lambda: bool(row(stack)["beat"]["instances"]), "queues by model")
        beat = row(stack)["beat"]
        assert {each["model"]: each["waiting"] for each in beat["instances"]} == {"base": 4, "law": 1}
        assert beat["waiting"] == 5
        assert answer(stack, "tax")[0] == 503
        engine.models = {"base": 0, "tax": 2}
        stack.eventually(lambda: set(row(stack)["pools"]) == {"base", "tax"}, lambda: f"another adapter was loaded: {row(stack)}")
        stack.eventually(lambda: answer(stack, "tax") == (200, "gpu-1", "as tax"), "it is served")
        assert answer(stack, "law")[0] == 503
        assert answer(stack, "base") == (200, "gpu-1", "as base")

"""The doctor at a running gateway: in health, with each part made sick in turn, and with parts missing."""

import json
import resource
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m") as running:
        yield running


def sections(engine: EngineSim, **more) -> dict:
    pools = {name: {"model": "m", "engine": "vllm", "nodes": [node(f"node-{name}", engine.address)]} for name in ("p", "second")}
    return {"pools": pools, "rules": [{"id": "all", "when": "always", "pool": "p"}], "tenants": [tenant("acme")], **more}


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    with Stack(sections(engine)) as running:
        yield running


def examined(
    stack: Stack, *options: str, change: Callable[[dict], None] = lambda _: None, files: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What the doctor says of this stack under its own din.yaml, or under one that was changed."""
    config = yaml.safe_load(stack.config_file.read_text())
    change(config)
    file = stack.folder / "examined.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "din_extproc", "doctor", "--config", str(file), *options]
    limit = None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, preexec_fn=limit)


def findings(run: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    """By what was looked at, those that are not ok before the others."""
    found = json.loads(run.stdout)
    assert all(each["change"] for each in found if each["verdict"] != "ok"), "what is not ok says what to change"
    assert run.returncode == any(each["verdict"] == "fail" for each in found)
    return {each["what"]: each for each in sorted(found, key=lambda each: each["verdict"] != "ok")}


def verdicts(run: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {what: each["verdict"] for what, each in findings(run).items() if each["verdict"] != "ok"}


CHECKS = {
    "din-extproc version", "timeouts", "envoy version", "buffer limit", "message timeout", "stream idle timeout", "pools",
    "nodes in Envoy", "models", "ext_proc streams", "workers' addresses", "configuration", "nodes", "redis version",
    "redis latency", "clock", "open files",
}  # fmt: skip


def test_a_gateway_in_health_passes_every_check(stack):
    assert stack.chat().status_code == 200
    healthy = findings(examined(stack, "--json"))
    assert healthy.keys() >= CHECKS
    assert {what: each for what, each in healthy.items() if each["verdict"] == "fail"} == {}


def test_differences_of_an_envoy_that_runs_with_another_file_are_reported(stack, engine):
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings)
    other = yaml.safe_load(render_envoy(settings))
    listener = other["static_resources"]["listeners"][0]
    listener["per_connection_buffer_limit_bytes"] = 1 << 20
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stream_idle_timeout"] = "5s"
    manager["http_filters"][-2]["typed_config"]["message_timeout"] = "0.200s"
    clusters = other["static_resources"]["clusters"]
    clusters[:] = [cluster for cluster in clusters if cluster["name"] != "second"]
    stack.envoy.terminate()
    stack.envoy.wait()
    try:
        stack.start_envoy(yaml.safe_dump(other))
        sick = findings(examined(stack, "--json"))
        wrong = {what: each["said"] for what, each in sick.items() if each["verdict"] == "fail"}
        assert wrong == {
            "buffer limit": "Envoy has 1.04858e+06 bytes, din.yaml says 3.362e+07",
            "message timeout": "Envoy has 0.2 s, din.yaml says 5",
            "stream idle timeout": "Envoy has 5 s, din.yaml says 600",
            "pools": "Envoy has no second",
            "nodes in Envoy": f"Envoy does not know node node-second ({engine.address}) of pool second",
        }
        assert all("render envoy.yaml again" in sick[what]["change"] for what in wrong)
    finally:
        stack.envoy.terminate()
        stack.envoy.wait()
        stack.start_envoy()


class OldRedis:
    """A server that says what a sick Redis says: old, evicting, slow, its clock off."""

    def __init__(self) -> None:
        class Talk(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline():
                    words = []
                    for _ in range(int(line[1:])):
                        self.rfile.readline()
                        words.append(self.rfile.readline().strip().upper())
                    self.wfile.write(answer(words))

        def answer(words: list[bytes]) -> bytes:
            match words[0]:
                case b"PING":
                    time.sleep(0.3)
                    return b"+PONG\r\n"
                case b"TIME":
                    seconds = b"%d" % (time.time() - 90)
                    return b"*2\r\n$%d\r\n%b\r\n$1\r\n0\r\n" % (len(seconds), seconds)
                case b"INFO":
                    text = b"redis_version:5.0.7\r\nmaxmemory:1000\r\nmaxmemory_policy:allkeys-lru\r\n"
                    return b"$%d\r\n%b\r\n" % (len(text), text)
                case _:
                    return b"+OK\r\n"

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"redis://127.0.0.1:{self.server.server_address[1]}/0"


def test_a_redis_that_is_old_slow_evicts_and_has_another_time(stack):
    sick = OldRedis()

    def there(config: dict) -> None:
        config["store"] = {"url": sick.url, "timeout_ms": 200}

    findings_by_name = findings(examined(stack, "--json", change=there, files=1024))
    sick.server.shutdown()
    sick.server.server_close()
    assert {
        what: findings_by_name[what]["verdict"] for what in ("redis version", "redis latency", "redis memory", "clock", "open files")
    } == {
        "redis version": "fail",
        "redis latency": "fail",
        "redis memory": "fail",
        "clock": "fail",
        "open files": "warn",
    }
    assert "Redis is -9" in findings_by_name["clock"]["said"]
    assert "synchronise the clocks" in findings_by_name["clock"]["change"]
    assert "noeviction" in findings_by_name["redis memory"]["change"]
    assert findings_by_name["configuration"]["verdict"] == "warn", "the sidecar runs with another file"


class OldEnvoy(BaseHTTPRequestHandler):
    """An administration port of an Envoy that is too old and on its way out."""

    def do_GET(self) -> None:
        page = {"/server_info": {"version": "abc/1.30.2/Clean/RELEASE/BoringSSL", "state": "DRAINING"}}.get(self.path, {})
        body = b"" if self.path.startswith("/stats") else json.dumps(page).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Counted by nothing."""


def test_an_envoy_that_is_too_old_and_knows_nothing_of_us(stack):
    with ThreadingHTTPServer(("127.0.0.1", 0), OldEnvoy) as old:
        threading.Thread(target=old.serve_forever, daemon=True).start()

        def there(config: dict) -> None:
            config["envoy"]["admin"] = f"127.0.0.1:{old.server_address[1]}"

        findings_by_name = findings(examined(stack, "--json", change=there))
        old.shutdown()
    wrong = {what for what, each in findings_by_name.items() if each["verdict"] == "fail"}
    assert wrong == {
        "envoy version",
        "envoy state",
        "buffer limit",
        "message timeout",
        "stream idle timeout",
        "pools",
        "workers",
        "nodes in Envoy",
    }
    assert findings_by_name["envoy version"]["said"] == "1.30.2"


def test_timeouts_in_the_wrong_order_and_a_file_that_is_not_in_use(stack, engine):
    def hasty(config: dict) -> None:
        config["store"]["timeout_ms"] = 4000

    assert verdicts(examined(stack, "--json", change=hasty))["timeouts"] == "fail"
    stack.write(sections(engine, aliases={"x": {"model": "nowhere"}}))
    stack.eventually(lambda: stack.status()["configuration"]["rejected_successor"] != "", "the file is refused")
    sick = verdicts(examined(stack, "--json", change=lambda config: config.pop("aliases")))
    assert sick["configuration"] == "fail"
    stack.write(sections(engine))
    stack.eventually(lambda: stack.status()["configuration"]["rejected_successor"] == "", "the file is good again")


def test_a_sidecar_that_answers_too_late_shows_in_what_envoy_counts_and_then_parts_are_missing(stack):
    stack.sidecar.send_signal(19)
    assert stack.chat().status_code == 503
    stack.sidecar.send_signal(18)
    stack.eventually(lambda: stack.chat().status_code == 200, "it answers again")
    late = findings(examined(stack, "--json"))
    assert late["ext_proc message_timeouts"]["verdict"] == "fail"
    assert "raise envoy.timeouts.message_ms" in late["ext_proc message_timeouts"]["change"]
    for part in (stack.envoy, stack.sidecar):
        part.kill()
        part.wait()
    stack.redis.end()
    sick = examined(stack)
    assert sick.returncode == 1
    assert sick.stderr == ""
    for word in ("✗ envoy: ", "✗ sidecar: ", "✗ redis: ", "start it", "3 fail"):
        assert word in sick.stdout, sick.stdout

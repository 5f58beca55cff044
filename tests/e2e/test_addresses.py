"""IPv6 and Unix sockets from end to end: the listener, every port of the sidecar, nodes that register, Redis."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.node_stack import NodeStack
from tests.support.servers import RedisServer
from tests.support.stack import Stack, events, key_of, tenant

pytestmark = pytest.mark.e2e


def free_six() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine_at(port: int, model: str) -> Iterator[None]:
    command = [sys.executable, "-m", "din_extproc", "engine-sim", "--host", "::1", "--port", str(port), "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as engine:
        try:
            assert engine.stdout.readline().startswith(b"LISTENING")
            yield
        finally:
            engine.terminate()


class Six(Stack):
    """Every port of the sidecar on IPv6; Envoy gets its nodes by xDS."""

    def __init__(self, redis: RedisServer, listener: int, tokens: str) -> None:
        self.http_port, self.admin_six = free_six(), free_six()
        sections = {
            "pools": {"p": {"model": "sim-model", "engine": "vllm", "dtype": "bf16"}},
            "tenants": [tenant("acme")],
            "envoy": {"listener": f"[::1]:{listener}"},
            "store": {"url": redis.unix_url},
        }
        gateway = {name: {"address": f"[::1]:{free_six()}"} for name in ("ext_proc", "access_log", "xds")}
        registry = {"address": f"[::1]:{free_six()}", "http_address": f"[::1]:{self.http_port}", "node_tokens_file": "tokens.yaml"}
        gateway |= {"admin": {"address": f"[::1]:{self.admin_six}"}, "registry": {**registry, "heartbeat_s": 0.3, "dead_after_s": 3}}
        super().__init__(sections, server=redis, gateway=gateway)
        (self.folder / "tokens.yaml").write_text(tokens)

    @property
    def admin_url(self) -> str:
        return f"http://[::1]:{self.admin_six}"


def test_a_node_joins_and_answers_with_every_port_on_ipv6_and_redis_on_a_unix_socket():
    listener, engine = free_six(), free_six()
    token = make_node_token("gpu-1", bytes(ENTROPY_BYTES))
    with RedisServer() as redis, engine_at(engine, "sim-model"), Six(redis, listener, f'gpu-1: "{token.hash}"\n') as stack:
        file = stack.folder / "gpu-1.token"
        file.write_text(token.text)
        with NodeStack(f"[::1]:{engine}", f"http://[::1]:{stack.http_port}", token_file=str(file)):
            headers = {"authorization": f"Bearer {key_of('acme')}"}
            with httpx.Client(base_url=f"http://[::1]:{listener}", headers=headers, verify=False, timeout=30) as client:
                body = {"model": "sim-model", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 8}
                replies = []

                def answered() -> bool:
                    replies.append(client.post("/v1/chat/completions", json=body))
                    return replies[-1].status_code == 200

                stack.eventually(answered, "an answer")
            assert replies[-1].headers["x-din-node-id"] == "gpu-1"
            assert len(events(replies[-1].text)) > 2
            stack.eventually(lambda: stack.status()["counts"]["outcomes"].get("completed") == 1, "it is settled")
            assert stack.status()["limits"]["shared"]
            for command in ("nodes", "doctor"):
                asked = subprocess.run(
                    [sys.executable, "-m", "din_extproc", command, "--config", stack.config_file, "--json"],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert asked.returncode == 0, asked.stdout + asked.stderr
                assert "gpu-1" in asked.stdout or command == "doctor"

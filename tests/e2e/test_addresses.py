"""IPv6 and Unix sockets from end to end: the listener, the nodes, where finished requests are told, Redis."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.servers import RedisServer
from tests.stack import Stack, events, key_of, node, tenant

pytestmark = pytest.mark.e2e


def free_six() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine_at(port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "din_extproc", "engine-sim", "--host", "::1", "--port", str(port), "--model", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as engine:
        try:
            assert engine.stdout.readline().startswith(b"LISTENING")
            yield
        finally:
            engine.terminate()


def test_a_stream_over_ipv6_with_redis_on_a_unix_socket():
    listener, told, engine = free_six(), free_six(), free_six()
    with RedisServer() as redis, engine_at(engine):
        config = {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("six", f"[::1]:{engine}")]}},
            "tenants": [tenant("acme")],
            "envoy": {"listener": f"[::1]:{listener}"},
            "store": {"url": redis.unix_url},
        }
        with Stack(config, server=redis, gateway={"access_log": {"address": f"[::1]:{told}"}}) as stack:
            headers = {"authorization": f"Bearer {key_of('acme')}"}
            with httpx.Client(base_url=f"http://[::1]:{listener}", headers=headers, verify=False, timeout=30) as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 8}
                reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-din-node-id"] == "six"
            assert len(events(reply.text)) > 2
            status = stack.settled(1)
            assert status["limits"]["shared"]
            assert status["counts"]["outcomes"] == {"completed": 1}

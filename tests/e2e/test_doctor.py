"""The doctor at a running gateway: in health, and with parts missing."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.servers import EngineSim
from tests.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with EngineSim(model="m") as engine:
        config = {"pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}}, "tenants": [tenant("acme")]}
        with Stack(config) as running:
            yield running


def examined(stack: Stack, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "din_extproc", "doctor", "--config", str(stack.config_file), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_gateway_in_health_and_then_without_envoy_redis_and_sidecar(stack):
    assert stack.chat().status_code == 200
    healthy = examined(stack, "--json")
    findings = json.loads(healthy.stdout)
    assert [each for each in findings if each["verdict"] == "wrong"] == [], healthy.stdout
    assert healthy.returncode == 0
    assert {"envoy version", "redis version", "clock", "buffer limit", "ext_proc streams", "pools", "nodes"} <= {
        each["what"] for each in findings
    }
    for part in (stack.envoy, stack.sidecar):
        part.kill()
        part.wait()
    stack.redis.end()
    sick = examined(stack)
    assert sick.returncode == 1
    assert sick.stderr == ""
    for word in ("✗ envoy: ", "✗ sidecar: ", "✗ redis: ", "start it", "3 wrong"):
        assert word in sick.stdout, sick.stdout

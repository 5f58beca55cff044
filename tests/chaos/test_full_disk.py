"""A disk with no room left for the audit log: requests go on or are refused, as the policy says, and the log says what it lacks."""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def sim() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=5000.0, prefill_rate=1e6) as server:
        yield server


@pytest.fixture(params=["drop_with_alarm", "refuse"])
def stack(request, sim) -> Iterator[Stack]:
    made = Stack({})
    (made.folder / "audit.key").write_text("an audit key of these tests\n")
    made.write(
        {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", sim.address)]}},
            "tenants": [tenant("acme")],
            "audit": {
                "folder": "audit",
                "replica": "gw",
                "keys": {"k": {"file": "audit.key"}},
                "flush_ms": 20,
                "on_full": request.param,
            },
        }
    )
    made.policy = request.param
    with made as running:
        yield running


@contextlib.contextmanager
def no_room(stack: Stack) -> Iterator[None]:
    """No file of the sidecar grows over a hundred bytes more than the audit log has; its own log does not either."""
    size = max(path.stat().st_size for path in (stack.folder / "audit").iterdir())
    before = resource.prlimit(stack.sidecar.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(stack.sidecar.pid, resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        yield
    finally:
        resource.prlimit(stack.sidecar.pid, resource.RLIMIT_FSIZE, before)


def audit(stack: Stack) -> dict:
    return stack.status()["audit"]


def verified(stack: Stack) -> tuple[int, dict]:
    command = [sys.executable, "-m", "din_extproc", "audit", "verify", "--config", str(stack.config_file), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, json.loads(ended.stdout)


def test_while_the_disk_is_full_the_policy_decides_and_afterwards_the_log_goes_on_and_says_what_it_lacks(stack):
    assert stack.chat().status_code == 200
    stack.settled(1)
    stack.eventually(lambda: audit(stack)["waiting"] == 0, "all is on disk")
    passed, refused = 1, 0
    with no_room(stack):
        while not audit(stack)["failing"]:
            passed += stack.chat().status_code == 200
            assert passed < 50, "nobody has noticed"
        for _ in range(10):
            reply = stack.chat()
            if stack.policy == "refuse":
                refused += 1
                assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "audit_unavailable", "1")
            else:
                passed += 1
                assert reply.status_code == 200
        assert (audit(stack)["dropped"] > 0) == (stack.policy == "drop_with_alarm")
        ready = httpx.get(f"{stack.admin_url}/readyz")
        expected = (503, "the audit log can't be written, `on_full: refuse`: [Errno 27]") if stack.policy == "refuse" else (200, "ready")
        assert (ready.status_code, ready.text[: len(expected[1])]) == expected
    stack.eventually(lambda: stack.chat().status_code == 200 and not audit(stack)["failing"], "it is written again")
    assert httpx.get(f"{stack.admin_url}/readyz").status_code == 200
    assert stack.status()["counts"]["faults"] == 0
    stack.eventually(lambda: not stack.status()["exchanges"]["open"] and stack.redis_keys(":lease:") == [], "every slot is free")
    stack.eventually(lambda: audit(stack)["waiting"] == 0, "all is on disk")
    code, report = verified(stack)
    lost = [finding for finding in report["findings"] if "not recorded" in finding["what"]]
    assert len(report["findings"]) == len(lost), "only records that could not be written are missing, and they are reported"
    assert (code, len(lost) > 0) == ((1, True) if stack.policy == "drop_with_alarm" else (0, False))

"""More than one worker: one socket each, shared limits, lessons for all, and nobody notices when one is replaced or dies."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, events, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=200.0, max_num_seqs=256, kv_tokens=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
        "tenants": [tenant("acme"), tenant("trial", rpm=5)],
    }
    with Stack(config, gateway={"workers": 2}) as running:
        yield running


def workers(stack: Stack) -> dict[int, psutil.Process]:
    """The worker processes by number."""
    found = {}
    for child in psutil.Process(stack.sidecar.pid).children():
        command = child.cmdline()
        if "--worker" in command:
            found[int(command[command.index("--worker") + 1])] = child
    return found


def fresh_request(stack: Stack, **fields):
    """A request on a connection of its own."""
    return stack.chat(**fields)


def test_every_worker_takes_requests_and_the_accounts_are_kept_in_one_place(stack):
    before = stack.status()["counts"]["sent"]
    replies = [fresh_request(stack) for _ in range(12)]
    assert [reply.status_code for reply in replies] == [200] * 12
    stack.eventually(lambda: stack.status()["counts"]["sent"] == before + 12, "both workers report")
    status = stack.settled(12)
    assert status["workers"] == {"configured": 2, "restarts": 0}
    assert status["exchanges"]["unknown"] == 0
    assert sorted(workers(stack)) == [0, 1]


def test_limits_are_one_for_all_workers(stack):
    statuses = [fresh_request(stack, tenant_name="trial").status_code for _ in range(8)]
    assert statuses == [200] * 5 + [429] * 3
    assert stack.status()["limits"]["replicas"] == 2, "the process that keeps the accounts takes no share"


def test_a_rolling_replacement_loses_no_request_and_no_stream(stack):
    before = workers(stack)
    stop, statuses = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            statuses.append(fresh_request(stack).status_code)

    asking = threading.Thread(target=keep_asking)
    with stack.client() as client, client.stream("POST", "/v1/chat/completions", json=long_stream()) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        asking.start()
        stack.sidecar.send_signal(signal.SIGUSR1)
        try:
            stack.eventually(
                lambda: sorted(now := workers(stack)) == [0, 1] and not {p.pid for p in now.values()} & {p.pid for p in before.values()},
                "two new workers",
            )
        finally:
            stop.set()
            asking.join()
        text = "\n".join(lines)
    assert text.rstrip().endswith("data: [DONE]")
    assert set(statuses) == {200}
    assert len(events(text)) > 100


def test_a_killed_worker_is_started_again_and_the_other_one_answers_meanwhile(stack):
    victim = workers(stack)[0]
    victim.kill()
    replies = [fresh_request(stack).status_code for _ in range(10)]
    assert replies.count(200) >= 8, replies
    stack.eventually(lambda: stack.status()["workers"]["restarts"] == 1 and len(workers(stack)) == 2, "a new worker")
    stack.eventually(lambda: [fresh_request(stack).status_code for _ in range(4)] == [200] * 4, "both sockets serve again")


def test_workers_end_with_the_process_that_started_them(engine):
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
        "tenants": [tenant("acme")],
    }
    stack = Stack(config, gateway={"workers": 2})
    try:
        stack.redis.start()
        stack.start_sidecar()
        orphans = list(workers(stack).values())
        assert len(orphans) == 2
        stack.sidecar.kill()
        stack.sidecar.wait()
        _gone, alive = psutil.wait_procs(orphans, timeout=30)
        assert not alive, [process.cmdline() for process in alive]
    finally:
        stack.stop()


def long_stream() -> dict:
    return {"model": "m", "stream": True, "max_tokens": 1200, "messages": [{"role": "user", "content": "tell"}], "ignore_eos": True}


def test_more_workers_without_a_socket_are_refused_at_start(tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text("version: 1\ngateway: { workers: 2, ext_proc: { address: '127.0.0.1:50051' } }\n")
    checked = subprocess.run([sys.executable, "-m", "din_extproc", "check", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "ext_proc.socket" in checked.stdout

"""What the gateway says of a node's time: without the time that a request waited in the gateway, and whole for streams."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=200.0, faults="latency:ms=300") as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    queueing = {**tenant("acme", max_streams=1), "queue": {"max_wait_ms": 3000, "size": 5}}
    with Stack({"pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}}, "tenants": [queueing]}) as running:
        yield running


def exchange(stack: Stack, trace_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = httpx.get(f"{stack.admin_url}/exchanges?trace={trace_id}").json()["exchanges"]
        return bool(found)

    stack.eventually(there, "the exchange is over")
    return found[0]


def test_time_in_the_queue_is_not_the_nodes(stack):
    first = threading.Thread(target=stack.chat, kwargs={"max_tokens": 100, "ignore_eos": True})
    first.start()
    stack.eventually(lambda: stack.status()["exchanges"]["open"] == 1, "the only slot is taken")
    reply = stack.chat(max_tokens=1)
    first.join()
    times = exchange(stack, reply.headers["x-din-trace-id"])
    assert times["waited_ms"] > 0
    reported_ms = int(reply.headers["x-din-exec-time-ms"])
    assert 300 <= reported_ms <= times["ended_ms"] - times["waited_ms"] + 1
    assert times["exec_ms"] <= times["ended_ms"] - times["waited_ms"]


def test_a_streams_head_tells_until_its_begin_and_the_exchange_tells_the_whole(stack):
    reply = stack.chat(max_tokens=40, ignore_eos=True, stream=True)
    times = exchange(stack, reply.headers["x-din-trace-id"])
    assert times["exec_ms"] > int(reply.headers["x-din-exec-time-ms"])
    assert times["exec_ms"] == pytest.approx(times["node_ended_ms"] - times["sent_ms"], abs=0.01)
    stack.eventually(lambda: f'"exec_ms":{times["exec_ms"]}' in stack.log("sidecar"), "the log has it")

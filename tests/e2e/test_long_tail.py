"""The slots that long requests may hold, counted over the workers of two replicas."""

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.servers import EngineSim, RedisServer
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
LONG = {"model": "m", "stream": True, "max_tokens": 4000, "messages": [{"role": "user", "content": "tell"}], "ignore_eos": True}


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Stack, ...]]:
    with ExitStack() as opened:
        engines = [opened.enter_context(EngineSim(model="m", decode_rate=20.0, max_num_seqs=64)) for _ in range(2)]
        nodes = [node(f"n{number}", engine.address, max_concurrency=4) for number, engine in enumerate(engines)]
        pool = {"model": "m", "engine": "vllm", "nodes": nodes, "long_tail": {"over_s": 30, "share": 0.25, "timeout_s": 600}}
        config = {"pools": {"p": pool}, "tenants": [tenant("acme")]}
        server = opened.enter_context(RedisServer())
        yield tuple(opened.enter_context(Stack(config, server=server, gateway={"workers": 2})) for _ in range(2))


def open_long(opened: ExitStack, stack: Stack) -> httpx.Response:
    """A long stream on a connection of its own, open until `opened` ends."""
    return opened.enter_context(opened.enter_context(stack.client()).stream("POST", "/v1/chat/completions", json=LONG))


def test_long_requests_hold_one_slot_of_each_node_whichever_worker_of_whichever_replica_takes_them(replicas):
    with ExitStack() as opened:
        replies = [open_long(opened, stack) for _ in range(5) for stack in replicas]
        passed = [reply for reply in replies if reply.status_code == 200]
        assert sorted(reply.headers["x-din-node-id"] for reply in passed) == ["n0", "n1"]
        refused = [reply for reply in replies if reply.status_code != 200]
        assert {(reply.status_code, int(reply.headers["retry-after"])) for reply in refused} == {(503, 1)}
        assert refused[0].read()
        assert refused[0].json()["error"]["code"] == "insufficient_gpu_capacity"
        assert {stack.chat().status_code for stack in replicas} == {200}, "short requests have the other slots"

    def passes_again() -> bool:
        with ExitStack() as again:
            return {open_long(again, stack).status_code for stack in replicas} == {200}

    replicas[0].eventually(passes_again, "the slots came back when the streams were closed")

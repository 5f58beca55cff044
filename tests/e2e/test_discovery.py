"""Nodes that are found by DNS: engines come and go behind one name while a real Envoy serves."""

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.dns_server import DnsServer
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e

NAME = "_http._tcp.vllm.inference.local"
MODEL = {"model": "m", "decode_rate": 2000.0, "max_num_seqs": 256, "kv_tokens": 1_000_000}


def publish(server: DnsServer, engines: list[EngineSim]) -> None:
    """Let the name have exactly these engines."""
    server.records[NAME] = {"SRV": [f"0 1 {engine.port} pod.local." for engine in engines]}


def node_id(engine: EngineSim) -> str:
    return f"p-127.0.0.1-{engine.port}"


@pytest.fixture(scope="module")
def server() -> Iterator[DnsServer]:
    with DnsServer() as running:
        running.records["pod.local"] = {"A": ["127.0.0.1"]}
        yield running


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineSim]]:
    with contextlib.ExitStack() as running:
        yield [running.enter_context(EngineSim(**MODEL)) for _ in range(3)]


@pytest.fixture(scope="module")
def stack(server, engines) -> Iterator[Stack]:
    publish(server, engines[:1])
    discover = {"dns": NAME, "server": server.address, "every_s": 0.2, "version": "1", "dtype": "bf16", "max_seq_len": 8192}
    pools = {"p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "discover": discover}}
    xds = {"address": f"127.0.0.1:{free_port()}"}
    with Stack({"pools": pools, "tenants": [tenant("acme")]}, gateway={"xds": xds, "workers": 2}) as running:
        running.eventually(lambda: running.chat().status_code == 200, "the first node is found")
        yield running


def shown(stack: Stack) -> set[str]:
    return {row["node"]["id"] for row in stack.status()["membership"]["nodes"]}


def used(stack: Stack, wanted: set[str]) -> None:
    """Wait until requests go to these nodes and to no other."""
    stack.eventually(lambda: {stack.chat().headers.get("x-din-node-id") for _ in range(2 * len(wanted) + 2)} == wanted, wanted)


def test_a_node_takes_requests_once_dns_has_it_and_none_once_dns_has_it_no_more(stack, server, engines):
    publish(server, engines[:2])
    used(stack, {node_id(engine) for engine in engines[:2]})
    assert shown(stack) == {node_id(engine) for engine in engines[:2]}
    publish(server, engines[1:2])
    used(stack, {node_id(engines[1])})
    assert shown(stack) == {node_id(engines[1])}


def test_the_last_good_answer_serves_while_the_name_does_not_exist_and_the_views_say_so(stack, server, engines):
    publish(server, engines[:1])
    used(stack, {node_id(engines[0])})
    gone = server.records.pop(NAME)
    stack.eventually(lambda: "NXDOMAIN" in stack.status()["discovery"]["p"]["problem"], "the failure is shown")
    assert stack.chat().headers["x-din-node-id"] == node_id(engines[0])
    assert "does not exist (NXDOMAIN); the last good answer stays in use" in stack.log("sidecar")
    server.records[NAME] = gone
    stack.eventually(lambda: not stack.status()["discovery"]["p"]["problem"], "it is found again")


def test_a_worker_that_starts_again_knows_the_nodes_that_were_found(stack, server, engines):
    publish(server, engines[:2])
    used(stack, {node_id(engine) for engine in engines[:2]})
    restarts = stack.status()["workers"]["restarts"]
    next(child for child in psutil.Process(stack.sidecar.pid).children() if "--worker" in child.cmdline()).kill()
    stack.eventually(lambda: stack.status()["workers"]["restarts"] > restarts, "a new worker")
    used(stack, {node_id(engine) for engine in engines[:2]})
    assert shown(stack) == {node_id(engine) for engine in engines[:2]}


def test_no_request_fails_when_all_nodes_of_a_pool_are_replaced_at_once(stack, server, engines):
    publish(server, engines[:1])
    used(stack, {node_id(engines[0])})
    for at in range(1, 7):
        new = engines[at % 2]
        publish(server, [new])
        replies = []
        while not replies or replies[-1].headers.get("x-din-node-id") != node_id(new):
            replies.append(stack.chat())
            assert replies[-1].status_code == 200, replies[-1].text


def test_no_request_fails_while_four_of_eight_nodes_are_replaced_one_by_one_under_load(stack, server):
    done, failed, served = threading.Event(), [], []

    def ask() -> None:
        with stack.client() as client:
            while not done.is_set():
                body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
                reply = client.post("/v1/chat/completions", json=body)
                if reply.status_code == 200:
                    served.append((time.monotonic(), reply.headers["x-din-node-id"]))
                else:
                    failed.append((reply.status_code, reply.text))

    def served_by(engine: EngineSim) -> bool:
        return any(node == node_id(engine) for _, node in list(served)[-200:])

    def idle(engine: EngineSim) -> bool:
        return not shown(stack) & {node_id(engine)} and engine.gauge("num_requests_running") == 0

    with contextlib.ExitStack() as running:
        pods = [running.enter_context(EngineSim(**MODEL)) for _ in range(8)]
        publish(server, pods)
        stack.eventually(lambda: shown(stack) == {node_id(pod) for pod in pods}, "all eight are found")
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                new = running.enter_context(EngineSim(**MODEL))
                old, pods = pods[0], [*pods[1:], new]
                publish(server, pods)
                stack.eventually(lambda new=new: served_by(new), "the new node serves")
                stack.eventually(lambda old=old: idle(old), "the old node has finished")
                old.stop()
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert failed == []
    assert len({node for _, node in served}) == 12

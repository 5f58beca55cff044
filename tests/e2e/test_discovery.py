"""Nodes that are found by DNS or in Kubernetes: engines come and go behind one name while a real Envoy serves."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.dns_server import DnsServer
from tests.support.kube_server import KubeServer, make_pod, make_slice
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, tenant
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e
_log = logging.getLogger(__name__)

NAME = "_http._tcp.vllm.inference.local"
MODEL = {"model": "m", "decode_rate": 2000.0, "max_num_seqs": 256, "kv_tokens": 1_000_000}


def publish(server: DnsServer, engines: list[EngineSim]) -> None:
    """Let the name have exactly these engines."""
    server.records[NAME] = {"SRV": [f"0 1 {engine.port} pod.local." for engine in engines]}


def node_id(engine: EngineSim, pool: str = "p") -> str:
    return f"{pool}-127.0.0.1-{engine.port}"


def make_config(server: DnsServer, **kubernetes: dict[str, str]) -> dict[str, Any]:
    """Return a configuration with the pool `p` of the DNS name, and a pool per Kubernetes source, whose model is `m-` and its name."""
    sources = {
        "p": {"dns": NAME, "server": server.address, "every_s": 0.2},
        **{pool: {"kubernetes": each} for pool, each in kubernetes.items()},
    }
    pools = {
        pool: {
            "model": "m" if pool == "p" else f"m-{pool}",
            "engine": "vllm",
            "scheduler": "round_robin",
            "discover": {**source, "version": "1", "dtype": "bf16", "max_seq_len": 8192},
        }
        for pool, source in sources.items()
    }
    return {"pools": pools, "tenants": [tenant("acme")]}


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
    with Stack(make_config(server), gateway={"xds": {"address": f"127.0.0.1:{free_port()}"}, "workers": 2}) as running:
        running.eventually(lambda: running.chat().status_code == 200, "the first node is found")
        yield running


def states(stack: Stack) -> dict[str, str]:
    return {row["node"]["id"]: row["state"] for row in stack.status()["membership"]["nodes"]}


def routed_nodes(stack: Stack) -> set[str]:
    return set(states(stack))


def used(stack: Stack, wanted: set[str], model: str = "m") -> None:
    """Wait until requests go to these nodes and to no other."""
    stack.eventually(lambda: {stack.chat(model=model).headers.get("x-din-node-id") for _ in range(2 * len(wanted) + 2)} == wanted, wanted)


def test_a_node_takes_requests_once_dns_has_it_and_none_once_dns_has_it_no_more(stack, server, engines):
    publish(server, engines[:2])
    used(stack, {node_id(engine) for engine in engines[:2]})
    assert routed_nodes(stack) == {node_id(engine) for engine in engines[:2]}
    publish(server, engines[1:2])
    used(stack, {node_id(engines[1])})
    assert routed_nodes(stack) == {node_id(engines[1])}


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
    assert routed_nodes(stack) == {node_id(engine) for engine in engines[:2]}


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


def replace_nodes(stack: Stack, publish_all: Callable[[list[EngineSim]], None], pool: str, model: str) -> tuple[list, set[str]]:
    """Replace four of eight nodes one by one under load. Return the failed requests and the nodes that served.

    The time from each change to the first answer of the new node is logged.
    """
    done, failed, served = threading.Event(), [], []

    def ask() -> None:
        with stack.client() as client:
            while not done.is_set():
                body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
                reply = client.post("/v1/chat/completions", json=body)
                if reply.status_code == 200:
                    served.append((time.monotonic(), reply.headers["x-din-node-id"]))
                else:
                    failed.append((reply.status_code, reply.text))

    def find_answer(engine: EngineSim) -> float | None:
        return next((at for at, node in list(served)[-500:] if node == node_id(engine, pool)), None)

    def idle(engine: EngineSim) -> bool:
        return node_id(engine, pool) not in routed_nodes(stack) and engine.gauge("num_requests_running") == 0

    with contextlib.ExitStack() as running:
        pods = [running.enter_context(EngineSim(**{**MODEL, "model": model})) for _ in range(8)]
        publish_all(pods)
        stack.eventually(lambda: {node_id(pod, pool) for pod in pods} <= routed_nodes(stack), "all eight are found")
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                new = running.enter_context(EngineSim(**{**MODEL, "model": model}))
                old, pods = pods[0], [*pods[1:], new]
                changed = time.monotonic()
                publish_all(pods)
                took_s = eventually(lambda new=new: find_answer(new), "the new node serves") - changed
                _log.info("pool %s: %.3f s from a change of the source to the first answer of the new node", pool, took_s)
                stack.eventually(lambda old=old: idle(old), "the old node has finished")
                old.stop()
        finally:
            done.set()
            for thread in threads:
                thread.join()
    return failed, {node for _, node in served}


def test_no_request_fails_while_four_of_eight_nodes_are_replaced_one_by_one_under_load(stack, server):
    failed, nodes = replace_nodes(stack, lambda engines: publish(server, engines), "p", "m")
    assert failed == [], stack.log("sidecar")[-4000:]
    assert len(nodes) == 12


@pytest.fixture
def cluster(stack, server) -> Iterator[KubeServer]:
    """An API server with a pool of its Service and one of its pods."""
    with KubeServer() as running:
        place = {"namespace": "inference", "port": "http", "kubeconfig": running.write_kubeconfig(stack.folder / "kubeconfig").name}
        stack.write(make_config(server, k={"service": "vllm", **place}, q={"selector": "app=vllm", **place}))
        stack.eventually(lambda: "k" in stack.status()["discovery"] and running.watching >= 2, "both are watched")
        yield running
        stack.write(make_config(server))
        stack.eventually(lambda: "k" not in stack.status()["discovery"], "none is followed any more")


def slices_of(engines: list[EngineSim]) -> list[dict]:
    return [make_slice(f"vllm-{at}", "vllm", [("127.0.0.1", {"ready": True})], engine.port) for at, engine in enumerate(engines)]


def test_no_request_fails_while_pods_of_a_service_are_replaced_under_load_and_watches_are_cut(stack, cluster):
    def publish_all(engines: list[EngineSim]) -> None:
        cluster.drop_connections()
        cluster.put(*slices_of(engines))

    failed, nodes = replace_nodes(stack, publish_all, "k", "m-k")
    assert failed == [], stack.log("sidecar")[-4000:]
    assert len(nodes) == 12


def test_a_pod_that_terminates_finishes_its_stream_and_gets_no_further_request(stack, cluster):
    with EngineSim(model="m-q", decode_rate=20.0) as old, EngineSim(model="m-q") as new:
        cluster.put(make_pod("old", "127.0.0.1", old.port))
        stack.eventually(lambda: stack.chat(model="m-q").status_code == 200, "the first pod is found")
        with stack.client() as client:
            body = {
                "model": "m-q",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 40,
                "stream": True,
                "ignore_eos": True,
            }
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                assert next(lines).startswith("data:")
                going = make_pod("old", "127.0.0.1", old.port)
                going["metadata"]["deletionTimestamp"] = "2026-11-30T10:00:00Z"
                cluster.put(make_pod("new", "127.0.0.1", new.port), going)
                stack.eventually(lambda: states(stack).get(node_id(old, "q")) == "draining", "it drains")
                used(stack, {node_id(new, "q")}, "m-q")
                assert [line for line in lines if line][-1] == "data: [DONE]"
        cluster.delete("pods", "old")
        stack.eventually(lambda: node_id(old, "q") not in states(stack), "it is gone")


def test_a_refusal_of_the_api_server_is_in_status_metrics_and_log_without_the_token(stack, cluster, engines):
    cluster.put(*slices_of(engines[:1]))
    stack.eventually(lambda: stack.status()["discovery"]["k"]["nodes"] == 1, "the node is found")
    cluster.refusal = (403, "endpointslices.discovery.k8s.io is forbidden")
    cluster.drop_connections()
    problem = eventually(lambda: stack.status()["discovery"]["k"]["problem"], "the failure is shown")
    assert "does not allow to watch endpointslices in namespace inference (403)" in problem
    assert "bind a Role" in stack.status()["discovery"]["k"]["remedy"]
    metrics = httpx.get(f"{stack.admin_url}/metrics").text
    assert 'din_discovery_failing{din_pool_name="k"} 1' in metrics
    assert stack.status()["discovery"]["k"]["nodes"] == 1
    cluster.refusal = None
    stack.eventually(lambda: not stack.status()["discovery"]["k"]["problem"], "it works again")
    assert "endpointslices in namespace inference (403)" in stack.log("sidecar")
    assert cluster.token not in stack.log("sidecar")

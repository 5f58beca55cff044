"""A real Envoy that gets its pools, nodes and routes by xDS: by changes, and by the state of the world."""

import asyncio
import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from msgspec import structs

from din_extproc.control.blueprint import make_blueprint
from din_extproc.control.bootstrap import render_yaml
from din_extproc.control.clusters import build_discovered_pool
from din_extproc.control.snapshot import CLUSTER, Assigner, Resource
from din_extproc.control.topology import SocketAddress, Topology, XdsSource
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.xds_service import DiscoveryService
from din_extproc.edge.process.envoy_binary import find_envoy
from tests.e2e.test_registry import Replica
from tests.support import waiting
from tests.support.servers import EngineSim, RedisServer, free_port
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e

ENVOY = "envoy-of-this-test"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineSim]]:
    options: dict[str, Any] = {"model": "m", "decode_rate": 200.0, "max_num_seqs": 256, "kv_tokens": 1_000_000, "served_model": ("m", "n")}
    with contextlib.ExitStack() as running:
        yield [running.enter_context(EngineSim(**options)) for _ in range(2)]


def config(engines, names: str = "ab", **sections: Any) -> dict[str, Any]:
    """A pool `p` with node `a` at the first engine, `b` at the second."""
    where = dict(zip("ab", engines, strict=True))
    nodes = [node(name, where[name].address) for name in names]
    return {
        "pools": {"p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}},
        "tenants": [tenant("acme")],
        **sections,
    }


@pytest.fixture(scope="module", params=["delta", "state of the world"])
def stack(request, engines) -> Iterator[Stack]:
    xds = {"address": f"127.0.0.1:{free_port()}", "delta": request.param == "delta"}
    with Stack(config(engines), gateway={"xds": xds}) as running:
        yield running


@pytest.fixture
def settled(stack, engines) -> Stack:
    """The stack with nodes `a` and `b`, whatever the test before has left."""
    change(stack, config(engines))
    return stack


def hosts(stack: Stack, pool: str = "p") -> set[str]:
    """The pool's nodes as Envoy's `/clusters` shows them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.envoy_admin_port}/clusters", timeout=5) as reply:
        return set(re.findall(rf"^{re.escape(pool)}::([\d.:]+)::cx_active", reply.read().decode(), re.MULTILINE))


def clusters(stack: Stack) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.envoy_admin_port}/clusters?format=json", timeout=5) as reply:
        return {each["name"] for each in json.loads(reply.read())["cluster_statuses"]}


def dump(stack: Stack) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.envoy_admin_port}/config_dump", timeout=5) as reply:
        return reply.read().decode()


def envoy_status(stack: Stack) -> dict[str, Any]:
    """How the stack's Envoy stands, as the sidecar sees it; empty while it is not connected."""
    return next((each for each in stack.status()["xds"]["envoys"] if each["id"] == ENVOY), {"types": {}})


def change(stack: Stack, configuration: dict[str, Any]) -> None:
    """Write it, and wait until Envoy has the nodes of pool `p` that it says, and has answered to all else."""
    text, before = stack.config_file.read_text(), stack.status()["configuration"]["fingerprint"]
    stack.write(configuration)
    if stack.config_file.read_text() != text:
        stack.eventually(lambda: stack.status()["configuration"]["fingerprint"] != before, "the change is in use")
    expected = {each["address"] for each in configuration["pools"]["p"]["nodes"]}
    stack.eventually(lambda: hosts(stack) == expected, f"the nodes {expected}")
    stack.eventually(lambda: in_sync(stack), f"Envoy has it all: {stack.status()['xds']}")


def in_sync(stack: Stack) -> bool:
    types = envoy_status(stack)["types"]
    return len(types) == 3 and all(each["in_sync"] for each in types.values())


class Asking:
    """Requests one after the other, from the start of the block to its end."""

    def __init__(self, stack: Stack, **fields: Any) -> None:
        self._stack = stack
        self._fields = fields
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.replies: list[tuple[int, str | None]] = []

    def _ask(self) -> None:
        with self._stack.client() as client:
            while not self._stop.is_set():
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **self._fields}
                reply = client.post("/v1/chat/completions", json=body)
                self.replies.append((reply.status_code, reply.headers.get("x-din-node-id")))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def test_an_envoy_that_knows_no_node_starts_and_gets_all_resources(settled, engines):
    assert {settled.chat().headers["x-din-node-id"] for _ in range(4)} == {"a", "b"}
    assert hosts(settled) == {engine.address for engine in engines}
    status = envoy_status(settled)
    assert status["envoy"].startswith("envoy")
    assert {name: (each["acked"] != "", each["refusal"]) for name, each in status["types"].items()} == {
        "clusters": (True, ""),
        "endpoints": (True, ""),
        "routes": (True, ""),
    }
    assert settled.status()["xds"]["served"] == {name: each["acked"] for name, each in status["types"].items()}


def test_nodes_come_and_go_without_a_restart_and_without_a_failed_request(settled, engines):
    with Asking(settled) as asking:
        began = time.monotonic()
        change(settled, config(engines, "a"))
        removed_ms = 1000 * (time.monotonic() - began)
        mark = len(asking.replies)
        settled.eventually(lambda: len(asking.replies) > mark + 10, "requests go on")
        without = asking.replies[mark + 1 :]
        change(settled, config(engines, "b"))  # none of the nodes stays: they overlap for a while
        change(settled, config(engines, "ab"))
        settled.eventually(lambda: {name for _, name in asking.replies[-10:]} == {"a", "b"}, "both answer")
    print(f"a removal, from the file to /clusters (the file is looked at every second): {removed_ms:.0f} ms")
    assert {status for status, _ in asking.replies} == {200}
    assert {name for _, name in without} == {"a"}
    assert settled.envoy.poll() is None


def test_a_stream_outlives_the_removal_of_its_node(settled, engines):
    long = {"model": "m", "stream": True, "max_tokens": 800, "ignore_eos": True, "messages": [{"role": "user", "content": "tell"}]}
    with settled.client() as client, client.stream("POST", "/v1/chat/completions", json=long) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        change(settled, config(engines, "b" if reply.headers["x-din-node-id"] == "a" else "a"))
        text = "\n".join(lines)
    assert text.rstrip().endswith("data: [DONE]")
    assert text.count("data: ") > 700


def test_what_a_node_is_marked_with_changes_in_place(settled, engines):
    changed = config(engines)
    for each in changed["pools"]["p"]["nodes"]:
        each["version"] = "2026.1.0"
    change(settled, changed)
    settled.eventually(lambda: settled.chat().headers.get("x-din-model-version") == "2026.1.0", "the new mark")
    assert {settled.chat().headers["x-din-model-version"] for _ in range(4)} == {"2026.1.0"}


def test_a_new_pool_is_known_to_envoy_before_its_first_request_and_leaves_after_its_last(settled, engines):
    both = config(engines)
    both["pools"]["q"] = {"model": "n", "engine": "vllm", "nodes": [node("c", engines[1].address)]}
    with Asking(settled, model="n") as asking:
        change(settled, both)
        settled.eventually(lambda: 200 in {status for status, _ in asking.replies}, "the new pool answers")
    statuses = [status for status, _ in asking.replies]
    first = statuses.index(200)
    assert set(statuses[:first]) <= {404}
    assert set(statuses[first:]) == {200}
    change(settled, config(engines))
    settled.eventually(lambda: settled.chat(model="n").status_code == 404, "the pool is no more")
    assert "q" in clusters(settled)
    settled.eventually(lambda: "q" not in clusters(settled), "the cluster goes")
    assert in_sync(settled)


def test_no_worker_uses_a_new_pool_before_envoy_knows_it_and_the_change_is_logged_once(engines):
    xds = {"address": f"127.0.0.1:{free_port()}"}
    with Stack(config(engines), gateway={"xds": xds, "workers": 2}) as stack:
        wider = config(engines)
        for name in ("q", "r"):
            wider["pools"][name] = {
                "model": name,
                "engine": "vllm",
                "served_model": "n",
                "nodes": [node(f"node-{name}", engines[1].address)],
            }
            with Asking(stack, model=name) as asking:
                change(stack, wider)
                stack.eventually(lambda asking=asking: {status for status, _ in asking.replies[-20:]} == {200}, "both workers use it")
            assert {status for status, _ in asking.replies} == {404, 200}
            used = stack.status()["configuration"]["fingerprint"]
            assert stack.log("sidecar").count(f"configuration {used} is in use") == 1


def test_a_pair_of_pools_between_which_requests_move_has_the_nodes_of_both_as_they_come_and_go(settled, engines):
    first, second = (engine.address for engine in engines)

    def moving(where: str) -> dict[str, Any]:
        made = config(engines, "a", rules=[{"id": "r", "when": "always", "pool": "p", "fallback": "q"}], health={"breaker": False})
        made["pools"]["q"] = {"model": "n", "engine": "vllm", "nodes": [node("c", where)]}
        return made

    change(settled, moving(second))
    settled.eventually(lambda: hosts(settled, "p+q") == {first, second}, "both pools' nodes")
    try:
        engines[0].fail("unavailable")
        settled.eventually(lambda: settled.chat().status_code == 200, "the worker uses it, too")
        reply = settled.chat()
        assert (reply.status_code, reply.headers["x-din-node-id"], reply.headers["x-bxagent-degraded"]) == (200, "c", "true")
        with EngineSim(model="n") as other:
            change(settled, moving(other.address))
            settled.eventually(lambda: hosts(settled, "p+q") == {first, other.address}, "the other node")
            settled.eventually(lambda: (reply := settled.chat()).status_code == 200 and reply.json()["model"] == "n", "it takes over")
            assert other.seen()[0]["requests"] >= 1
            engines[0].fail("")
            settled.eventually(lambda: settled.chat().headers.get("x-din-node-id") == "a", "the first one answers again")
    finally:
        engines[0].fail("")


def test_a_pool_that_is_treated_otherwise_gets_its_nodes_again(settled, engines):
    with Asking(settled) as asking:
        change(settled, config(engines, envoy={"health_check": {"interval_ms": 700}, "retry": {"jitter_ms": 30}}))
        settled.eventually(lambda: '"interval": "0.700s"' in dump(settled), "the new health check")
        settled.eventually(lambda: settled.envoy_stats("cluster_manager.warming")["cluster_manager.warming_clusters"] == 0, "warm")
    assert {status for status, _ in asking.replies} == {200}
    assert hosts(settled) == {engine.address for engine in engines}
    settled.eventually(lambda: '"base_interval": "0.030s"' in dump(settled), "the new routes")


@pytest.mark.parametrize("delta", [True, False])
async def test_what_envoy_refuses_leaves_what_it_had_and_is_shown_with_its_reason(delta, tmp_path):
    admin, here = free_port(), Endpoint("127.0.0.1", 8000)
    pool = Pool("p", "m", "m", "vllm", "round_robin", (Node("a", here, "m", "1", "bf16", "", 1, 8192, 4),))
    port = free_port()
    topology = Topology(
        ext_proc=(SocketAddress("127.0.0.1", 1),),
        access_log=SocketAddress("127.0.0.1", 1),
        pools=(pool,),
        listener=SocketAddress("127.0.0.1", free_port()),
        admin=SocketAddress("127.0.0.1", admin),
        health_check=None,
        discovery=XdsSource(SocketAddress("127.0.0.1", port), ENVOY, delta),
    )
    sound = make_blueprint(topology)
    cluster = build_discovered_pool(pool, topology)
    cluster.connect_timeout = timedelta(0)
    broken = structs.replace(sound, clusters=(Resource.of("p", CLUSTER, bytes(cluster)),))
    good, bad = (Assigner().make_snapshot(each, {"p": pool.nodes}) for each in (sound, broken))
    service = DiscoveryService(good)
    server = H2Server((service,), max_body_bytes=1 << 20)
    await server.start(f"127.0.0.1:{port}")
    file = tmp_path / "envoy.yaml"
    file.write_text(render_yaml(topology))
    command = [find_envoy(), "--config-path", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "critical"]
    envoy = await asyncio.create_subprocess_exec(*command)

    async def until(holds) -> None:
        await waiting.until(
            lambda: (envoys := service.snapshot_status()["envoys"]) and len(envoys[0].types) == 3 and holds(envoys[0].types["clusters"])
        )

    try:
        await until(lambda clusters: clusters.acked == good.versions[CLUSTER])
        service.publish(bad)
        await until(lambda clusters: clusters.refusal)
        cluster_status = service.snapshot_status()["envoys"][0].types["clusters"]
        assert "connect_timeout" in cluster_status.refusal.lower() or "ConnectTimeout" in cluster_status.refusal
        assert cluster_status.acked == good.versions[CLUSTER]
        async with httpx.AsyncClient() as client:
            found = (await client.get(f"http://127.0.0.1:{admin}/clusters")).text
        assert "p::127.0.0.1:8000::" in found
        service.publish(good)
        await until(lambda clusters: not clusters.refusal)
    finally:
        envoy.terminate()
        await envoy.wait()
        await server.stop(1)


def test_envoy_goes_on_without_the_sidecar_and_finds_it_again(settled, engines):
    known = hosts(settled)
    settled.sidecar.terminate()
    settled.sidecar.wait(20)
    assert hosts(settled) == known
    assert settled.chat().status_code in {500, 503}  # nobody decides; the nodes are known all the same
    settled.start_sidecar()
    settled.eventually(lambda: in_sync(settled), "Envoy is back")
    assert settled.chat().status_code == 200
    change(settled, config(engines, "b"))


def test_a_node_that_registers_reaches_envoy_by_event_and_leaves_it_by_event(engines):
    address = engines[0].address
    with RedisServer() as redis, Replica(redis, gateway={"xds": {"address": f"127.0.0.1:{free_port()}"}}) as stack:
        assert hosts(stack, "chat") == set()
        began = time.monotonic()
        status, registered = stack.register("gpu-1", address=address)
        assert status == 200
        beat = {"lease": registered["lease"], "sequence": 1}
        assert stack.say("POST", "/v1/nodes/gpu-1/heartbeat", beat, "gpu-1") == (200, {"drain": False})
        stack.eventually(lambda: hosts(stack, "chat") == {address}, "Envoy knows it")
        joined_ms = 1000 * (time.monotonic() - began)
        assert stack.chat().headers["x-din-node-id"] == "gpu-1"
        began = time.monotonic()
        assert stack.say("DELETE", "/v1/nodes/gpu-1", {"reason": "done"}, "gpu-1") == (200, {})
        stack.eventually(lambda: hosts(stack, "chat") == set(), "Envoy forgets it")
        print(f"registered and in /clusters after {joined_ms:.0f} ms, gone after {1000 * (time.monotonic() - began):.0f} ms")
        assert stack.chat().json()["code"] == "no_healthy_node"

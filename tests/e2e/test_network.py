"""The living network: agents beside engines, two gateways over one Redis, an Envoy each that gets its nodes by xDS."""

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Self

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support.node_stack import NodeStack
from tests.support.servers import EngineSim, RedisServer, free_port
from tests.support.stack import Stack, tenant

pytestmark = pytest.mark.e2e

NAMES = ("gpu-1", "gpu-2", "gpu-3")
DEAD_AFTER_S = 2
TOKENS = {name: make_node_token(name, bytes([number + 1]) * ENTROPY_BYTES) for number, name in enumerate(NAMES)}


class Network:
    """Two gateways, and agents and engines that a test may kill."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        redis = stack.enter_context(RedisServer())
        self.registries = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.gateways = [stack.enter_context(self._gateway(redis, url)) for url in self.registries]
        self.engines: dict[str, EngineSim] = {}
        self.agents: dict[str, NodeStack] = {}
        self._stack = stack

    def _gateway(self, redis: RedisServer, url: str) -> Stack:
        registry = {
            "http_address": url.removeprefix("http://"),
            "node_tokens_file": "tokens.yaml",
            "heartbeat_s": 0.3,
            "dead_after_s": DEAD_AFTER_S,
        }
        config = {
            "pools": {"p": {"model": "sim-model", "engine": "vllm", "scheduler": "round_robin", "dtype": "bf16"}},
            "tenants": [tenant("acme")],
        }
        xds = {"address": f"127.0.0.1:{free_port()}"}
        gateway = Stack(config, server=redis, gateway={"registry": registry, "xds": xds})
        (gateway.folder / "tokens.yaml").write_text("".join(f'{name}: "{token.hash}"\n' for name, token in TOKENS.items()))
        return gateway

    def join(self, name: str) -> None:
        """Start an engine and its agent, and wait until both gateways and both Envoys know it."""
        engine = self.engines[name] = self._stack.enter_context(EngineSim(decode_rate=300.0, max_num_seqs=64, kv_tokens=1_000_000))
        token = self.gateways[0].folder / f"{name}.token"
        token.write_text(TOKENS[name].text)
        node = {"id": name, "address": engine.address}
        agent = NodeStack(engine.address, self.registries[0], token_file=str(token), node=node)
        self.agents[name] = self._stack.enter_context(agent)
        for gateway in self.gateways:
            gateway.eventually(lambda gateway=gateway: engine.address in hosts(gateway), f"{name} in Envoy")


def hosts(gateway: Stack) -> set[str]:
    """The pool's nodes as Envoy's `/clusters` shows them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.envoy_admin_port}/clusters", timeout=5) as reply:
        return set(re.findall(r"^p::([\d.:]+)::cx_active", reply.read().decode(), re.MULTILINE))


class Load:
    """About fifty requests a second through both gateways, while the block runs."""

    def __init__(self, network: Network) -> None:
        self.replies: list[tuple[float, int, str | None]] = []
        self._network = network
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(gateway,)) for gateway in network.gateways for _ in range(2)]

    def _ask(self, gateway: Stack) -> None:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        with gateway.client() as client:
            while not self._stop.is_set():
                reply = client.post("/v1/chat/completions", json=body)
                self.replies.append((time.monotonic(), reply.status_code, reply.headers.get("x-din-node-id")))
                time.sleep(0.04)

    def after(self, moment: float) -> Counter:
        """How many answers by status and node, of those that came after it."""
        return Counter((status, node) for at, status, node in self.replies if at > moment)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        running = Network(stack)
        for name in NAMES:
            running.join(name)
        yield running


def test_nodes_that_register_are_served_by_every_gateway(network):
    with Load(network) as load:
        network.gateways[0].eventually(lambda: {node for _, _, node in load.replies} >= set(NAMES), "all nodes answer")
    assert {status for _, status, _ in load.replies} == {200}


def test_a_draining_node_ends_its_stream_and_gets_nothing_new(network):
    name = "gpu-3"
    gateway, engine = network.gateways[0], network.engines[name]
    body = {"model": "sim-model", "stream": True, "max_tokens": 900, "messages": [{"role": "user", "content": "tell"}], "ignore_eos": True}
    with contextlib.ExitStack() as open_streams, Load(network) as load:
        client = open_streams.enter_context(gateway.client())
        streams = [open_streams.enter_context(client.stream("POST", "/v1/chat/completions", json=body)) for _ in range(3)]
        mine = next(stream for stream in streams if stream.headers["x-din-node-id"] == name)
        network.agents[name].agent.terminate()
        for each in network.gateways:
            each.eventually(lambda each=each: engine.address not in hosts(each), "the node is out of Envoy")
        gone = time.monotonic()
        before = engine.seen()[0]["requests"]
        gateway.eventually(lambda: sum(load.after(gone).values()) > 40, "more requests")
        assert engine.seen()[0]["requests"] == before
        text = "".join(mine.iter_text())
    assert text.rstrip().endswith("data: [DONE]")
    assert network.agents[name].wait() == 0
    assert {status for _, status, _ in load.replies} == {200}


def test_a_killed_node_costs_no_client_an_error_and_leaves_every_view_at_once(network):
    name = "gpu-2"
    engine = network.engines[name]
    with Load(network) as load:
        network.gateways[0].eventually(lambda: (200, name) in load.after(0), "it answers")
        network.agents[name].agent.kill()
        engine.end()
        killed = time.monotonic()
        noticed = {}
        while len(noticed) < 4:
            assert time.monotonic() < killed + 30
            for number, gateway in enumerate(network.gateways):
                if name not in usable(gateway):
                    noticed.setdefault(f"view {number}", time.monotonic() - killed)
                if engine.address not in hosts(gateway):
                    noticed.setdefault(f"Envoy {number}", time.monotonic() - killed)
        gone = time.monotonic()
        network.gateways[0].eventually(lambda: sum(load.after(gone).values()) > 40, "more requests")
    print("seconds from the kill to each view:", {each: round(seconds, 3) for each, seconds in noticed.items()})
    assert max(noticed.values()) - min(noticed.values()) < 0.5 * max(noticed.values()), "the views agree long before they would expire"
    assert set(load.after(gone)) == {(200, "gpu-1")}
    failed = [status for _, status, _ in load.replies if status != 200]
    assert failed == [], "Envoy asked another node"


def test_a_node_that_comes_back_is_used_again(network):
    name = "gpu-2"
    network.join(name)
    with Load(network) as load:
        network.gateways[0].eventually(lambda: (200, name) in load.after(0), "it answers again")
    assert {status for _, status, _ in load.replies} == {200}


def usable(gateway: Stack) -> set[str]:
    """Ids of the nodes that this gateway routes to."""
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.admin_port}/nodes", timeout=5) as reply:
        rows = json.loads(reply.read())["nodes"]
    return {row["node"]["id"] for row in rows if row["state"] == "ready"}

"""Which of the nodes that a source finds take requests, beside listed and registered ones."""

from collections.abc import AsyncIterator, Iterator

import pytest
import yaml

from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Endpoint
from din_extproc.edge.discovery.source import FoundEndpoint
from din_extproc.roles.serve.node_discovery import NodeDiscovery, make_found_node
from din_extproc.settings.load import load
from tests.support.dns_server import DnsServer
from tests.support.kube_server import KubeServer, make_pod
from tests.support.servers import free_port
from tests.support.stack import node, tenant
from tests.support.waiting import until

NAME = "vllm.local"


class Network:
    """What a discovery passes on, beside a DNS server and the registered nodes."""

    def __init__(self, folder, server: DnsServer) -> None:
        self.folder, self.server = folder, server
        self.registered = {}
        self.ids: set[str] = set()
        self.discovery = NodeDiscovery(self.apply, lambda: self.registered, {})

    def apply(self, delta) -> None:
        self.ids -= set(delta.left.get("p", ()))
        self.ids |= {each.id for each in delta.joined.get("p", ())}

    def configure(self, *nodes, discovers=True, port=8000, admin=None, source=None, **pool):
        facts = {"version": "1", "dtype": "bf16", "max_seq_len": 8192}
        source = source or {"dns": f"{NAME}:{port}", "server": self.server.address, "every_s": 0.1}
        discover = {"discover": {**source, **facts}}
        pools = {"p": {"model": "m", "engine": "vllm", "nodes": list(nodes), **pool, **(discover if discovers else {})}}
        gateway = {"xds": {"address": "127.0.0.1:18000"}, **({"admin": admin} if admin else {})}
        config = {"version": 1, "gateway": gateway, "pools": pools, "tenants": [tenant("acme")]}
        file = self.folder / "din.yaml"
        file.write_text(yaml.safe_dump(config))
        settings = load(file, {})
        self.discovery.reload(settings)
        return settings


@pytest.fixture
async def network(tmp_path) -> AsyncIterator[Network]:
    with DnsServer() as server:
        server.records[NAME] = {"A": ["10.0.0.1", "10.0.0.2"]}
        made = Network(tmp_path, server)
        yield made
        await made.discovery.stop()


async def test_a_listed_node_wins_at_its_address(network):
    settings = network.configure(node("gpu-1", "10.0.0.1:8000"))
    await until(lambda: network.ids == {"p-10.0.0.2-8000"})
    [pool] = network.discovery.with_found(settings.pools)
    assert [each.id for each in pool.nodes] == ["gpu-1", "p-10.0.0.2-8000"]


async def test_a_registered_node_wins_at_its_address_until_it_leaves(network):
    network.configure()
    await until(lambda: network.ids == {"p-10.0.0.1-8000", "p-10.0.0.2-8000"})
    [found] = [each for each in network.discovery.snapshot().joined["p"] if each.id == "p-10.0.0.1-8000"]
    network.registered = {"p": (found,)}
    network.apply(network.discovery.take_changes())
    assert network.ids == {"p-10.0.0.2-8000"}
    network.registered = {}
    network.apply(network.discovery.take_changes())
    assert network.ids == {"p-10.0.0.1-8000", "p-10.0.0.2-8000"}


async def test_a_pool_that_no_longer_looks_loses_what_was_found(network):
    network.configure()
    await until(lambda: len(network.ids) == 2)
    network.configure(node("gpu-9", "10.0.0.9:8000"), discovers=False)
    assert network.ids == set()
    assert network.discovery.status() == {}


@pytest.fixture
def cluster() -> Iterator[KubeServer]:
    with KubeServer() as running:
        yield running


def pods_of(cluster: KubeServer, network: Network) -> dict:
    file = cluster.write_kubeconfig(network.folder / "kubeconfig")
    return {"kubernetes": {"namespace": "inference", "selector": "app=vllm", "port": "http", "kubeconfig": file.name}}


async def test_a_pod_that_terminates_is_shown_as_draining_and_takes_no_requests(network, cluster):
    cluster.put(make_pod("a", "10.0.0.1", 8000), make_pod("b", "10.0.0.2", 8000, ready=False))
    network.configure(source=pods_of(cluster, network))
    await until(lambda: network.ids == {"p-10.0.0.1-8000"})
    going = make_pod("a", "10.0.0.1", 8000)
    going["metadata"]["deletionTimestamp"] = "2026-11-30T10:00:00Z"
    cluster.put(going)
    await until(lambda: not network.ids)
    states = {each.node.id: each.state for each in network.discovery.get_found()["p"]}
    assert states == {"p-10.0.0.1-8000": NodeState.DRAINING, "p-10.0.0.2-8000": NodeState.LOADING}
    assert network.discovery.status()["p"].nodes == 0


async def test_what_a_pod_states_takes_precedence_and_is_held_against_the_pool(network, cluster):
    cluster.put(make_pod("a", "10.0.0.1", 8000, version="2", max_seq_len="4096", max_concurrency="8", adapters="sql"))
    cluster.put(make_pod("b", "10.0.0.2", 8000, dtype="fp8"), make_pod("c", "10.0.0.3", 8000, version="a b"))
    network.configure(source=pods_of(cluster, network), dtype="bf16")
    await until(lambda: network.ids)
    [node] = network.discovery.snapshot().joined["p"]
    assert (node.version, node.dtype, node.max_seq_len, node.max_concurrency, node.adapters) == ("2", "bf16", 4096, 8, ("sql",))
    assert network.discovery.status()["p"].refused == {
        "10.0.0.2:8000": "dtype is fp8, the pool's is bf16",
        "10.0.0.3:8000": "version 'a b' of model 'm' is not a version such as '2025.3.1'",
    }


async def test_a_pod_that_is_listed_as_well_is_one_node(network, cluster):
    cluster.put(make_pod("a", "10.0.0.1", 8000), make_pod("b", "10.0.0.2", 8000))
    settings = network.configure(node("gpu-1", "10.0.0.1:8000"), source=pods_of(cluster, network))
    await until(lambda: network.ids)
    [pool] = network.discovery.with_found(settings.pools)
    assert [each.id for each in pool.nodes] == ["gpu-1", "p-10.0.0.2-8000"]


async def test_slots_are_in_proportion_to_weights(network):
    [pool] = network.configure().pools
    weights = {Endpoint("10.0.0.1", 1): 4, Endpoint("10.0.0.2", 1): 1, Endpoint("fd00::1", 1): 0}
    made = [make_found_node(pool, pool.discover, endpoint, FoundEndpoint(weight), 4) for endpoint, weight in weights.items()]
    assert [(each.id, each.max_concurrency) for each in made] == [("p-10.0.0.1-1", 64), ("p-10.0.0.2-1", 16), ("p-fd00--1-1", 1)]


async def test_addresses_at_which_no_engine_can_be_are_refused_counted_and_logged_with_the_reason(network, caplog):
    admin = f"127.0.0.1:{free_port()}"
    odd = {"0.0.0.0": "unspecified", "169.254.169.254": "link-local", "224.0.0.1": "multicast", "127.0.0.1": "the gateway itself"}
    network.server.records[NAME] = {"A": ["10.0.0.1", *odd], "AAAA": ["::", "fe80::1", "ff02::1", "::ffff:169.254.169.254"]}
    network.configure(admin={"address": admin}, port=int(admin.rpartition(":")[2]))
    await until(lambda: network.ids)
    assert [each.split("-")[1] for each in network.ids] == ["10.0.0.1"]
    status = network.discovery.status()["p"]
    assert (status.nodes, status.problem, len(status.refused)) == (1, "", 8)
    for address, reason in odd.items():
        [refusal] = [each for where, each in status.refused.items() if where.startswith(f"{address}:")]
        assert reason in refusal
        assert refusal in caplog.text
    logged = len(caplog.records)
    network.server.asked.clear()
    await until(lambda: len(network.server.asked) > 4)
    assert len(caplog.records) == logged


async def test_a_node_that_the_pool_does_not_take_is_refused_until_the_pool_takes_it(network):
    network.configure(min_seq_len=9000)
    await until(lambda: network.discovery.status()["p"].refused)
    assert set(network.discovery.status()["p"].refused.values()) == {"max_seq_len is 8192, the pool wants 9000"}
    network.configure(min_seq_len=8000)
    assert network.ids == {"p-10.0.0.1-8000", "p-10.0.0.2-8000"}

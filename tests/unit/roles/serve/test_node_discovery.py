"""Which of the nodes that a source finds take requests, beside listed and registered ones."""

from collections.abc import AsyncIterator

import pytest
import yaml

from din_extproc.domain.node import Endpoint
from din_extproc.roles.serve.node_discovery import NodeDiscovery, make_found_nodes
from din_extproc.settings.load import load
from tests.support.dns_server import DnsServer
from tests.support.stack import node, tenant
from tests.support.waiting import until

NAME = "vllm.local"


class Network:
    """What a discovery passes on, beside a DNS server and the registered nodes."""

    def __init__(self, folder, server: DnsServer) -> None:
        self.folder, self.server = folder, server
        self.registered = {}
        self.ids: set[str] = set()
        self.discovery = NodeDiscovery(self.apply, lambda: self.registered)

    def apply(self, delta) -> None:
        self.ids -= set(delta.left.get("p", ()))
        self.ids |= {each.id for each in delta.joined.get("p", ())}

    def configure(self, *nodes, discovers=True):
        facts = {"version": "1", "dtype": "bf16", "max_seq_len": 8192}
        discover = {"discover": {"dns": f"{NAME}:8000", "server": self.server.address, "every_s": 0.1, **facts}}
        pools = {"p": {"model": "m", "engine": "vllm", "nodes": list(nodes), **(discover if discovers else {})}}
        config = {"version": 1, "gateway": {"xds": {"address": "127.0.0.1:18000"}}, "pools": pools, "tenants": [tenant("acme")]}
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


async def test_slots_are_in_proportion_to_weights(network):
    template = network.configure().pools[0].discover.template
    weights = {Endpoint("10.0.0.1", 1): 4, Endpoint("10.0.0.2", 1): 1, Endpoint("fd00::1", 1): 0}
    assert [(each.id, each.max_concurrency) for each in make_found_nodes("p", template, weights)] == [
        ("p-10.0.0.1-1", 64),
        ("p-10.0.0.2-1", 16),
        ("p-fd00--1-1", 1),
    ]

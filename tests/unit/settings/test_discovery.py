"""`discover`: what it takes, and what it is refused for."""

import pytest

from din_extproc.domain.node import Discovery, DnsName, Endpoint
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from tests.support.stack import tenant

XDS = "gateway: { xds: { address: 127.0.0.1:18000 } }"
FACTS = "version: '1', dtype: bf16, max_seq_len: 8192"


def loaded(tmp_path, discover, gateway=XDS, engine="vllm"):
    key = tenant("acme")["keys"][0]
    who = f"tenants: [{{ id: acme, models: ['*'], keys: [{{ id: acme, hash: \"{key['hash']}\" }}] }}]"
    config = tmp_path / "din.yaml"
    pool = f"pools: {{ p: {{ model: m, engine: {engine}, discover: {{ {discover} }} }} }}"
    config.write_text(f"version: 1\n{gateway}\n{pool}\n{who}")
    return load(config, {})


def test_a_pool_may_have_found_nodes_only(tmp_path):
    [pool] = loaded(tmp_path, f"dns: 'vllm.inference.svc:8000', every_s: 1, server: '10.0.0.53:53', {FACTS}").pools
    assert isinstance(pool.discover, Discovery)
    assert pool.discover.source == DnsName("vllm.inference.svc", 8000, 1.0, Endpoint("10.0.0.53", 53))
    assert (pool.nodes, pool.discover.template.dtype, pool.discover.template.version) == ((), "bf16", "1")


def test_a_name_of_service_records_has_no_port(tmp_path):
    [pool] = loaded(tmp_path, f"dns: _http._tcp.vllm.local, {FACTS}").pools
    assert pool.discover.source == DnsName("_http._tcp.vllm.local", 0, 1.0)


@pytest.mark.parametrize(
    ("dns", "says"),
    [
        ("vllm.local", "is not `name:port`"),
        ("_http._tcp.vllm.local:80", "is not `name:port`"),
        ("vllm.local:0", "a port is a number from 1 to 65535"),
        ("vllm.local:http", "a port is a number from 1 to 65535"),
        ("vllm..local:80", "is not a DNS name"),
        ("10.0.0.1:80", "is an address, not a name"),
        ("a" * 64 + ".local:80", "is not a DNS name"),
    ],
)
def test_a_name_that_can_not_be_asked_for_is_refused_with_the_reason(tmp_path, dns, says):
    refused = loaded(tmp_path, f"dns: '{dns}', {FACTS}")
    assert isinstance(refused, ConfigRejected)
    [problem] = refused.problems
    assert (problem.path, says in problem.message) == ("pools.p.discover.dns", True), problem


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"gateway": ""}, "pools.p.discover", "by xDS only"),
        ({"engine": "openai"}, "pools.p.discover", "are not found by DNS"),
        ({"discover": "dns: 'vllm.local:80', dtype: bf16"}, "pools.p.discover", "no version, max_seq_len"),
    ],
)
def test_what_discovery_needs_is_asked_for(tmp_path, changes, path, says):
    refused = loaded(tmp_path, **{"discover": f"dns: 'vllm.local:80', {FACTS}", **changes})
    assert isinstance(refused, ConfigRejected)
    assert any(problem.path == path and says in problem.message for problem in refused.problems), refused.problems

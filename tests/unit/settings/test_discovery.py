"""`discover`: what it takes, and what it is refused for."""

import json

import pytest

from din_extproc.domain.node import Discovery, DnsName, Endpoint, KubernetesObjects
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


def test_a_kubernetes_service_and_the_versions_of_the_catalogue_are_read(tmp_path):
    models = [{"model_name": "m", "model_version": each, "dtype": "bf16", "max_seq_len": 1000 * int(each)} for each in "12"]
    (tmp_path / "models.json").write_text(json.dumps({"models": models}))
    wanted = "kubernetes: { namespace: ai, service: vllm, port: http, kubeconfig: kube.yaml, context: c }, version: '1'"
    [pool] = loaded(tmp_path, wanted, gateway=f"{XDS}\ncatalog: {{ source: models.json }}").pools
    found = pool.discover
    assert found.source == KubernetesObjects("ai", "http", service="vllm", kubeconfig=str(tmp_path / "kube.yaml"), context="c")
    assert {version: node.max_seq_len for version, node in found.versions.items()} == {"2": 2000}
    assert found.template.max_seq_len == 1000


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("namespace: ai, service: v, selector: 'a=b', port: 1", "give either `service` or `selector`"),
        ("namespace: ai, port: 1", "give either `service` or `selector`"),
        ("namespace: ai, service: v, port: 1, context: c", "`context` is one of a `kubeconfig`"),
        ("namespace: ai, service: v, port: 0", "0 is neither a number"),
        ("namespace: ai, service: v, port: '8000'", "'8000' is neither a number"),
        ("namespace: ai, service: v, port: true", "True is neither a number"),
        ("namespace: ai, service: v", "port: is missing"),
        ("namespace: ../ai, service: v, port: 1", "of the form"),
        ("namespace: ai, selector: 'a=b&x', port: 1", "of the form"),
    ],
)
def test_objects_that_can_not_be_watched_are_refused_with_the_reason(tmp_path, wanted, says):
    refused = loaded(tmp_path, f"kubernetes: {{ {wanted} }}, {FACTS}")
    assert isinstance(refused, ConfigRejected)
    assert any(problem.path.startswith("pools.p.discover.kubernetes") and says in str(problem) for problem in refused.problems), str(
        refused
    )


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
        ({"discover": FACTS}, "pools.p.discover", "give either `dns` or `kubernetes`"),
        (
            {"discover": f"kubernetes: {{ namespace: a, service: v, port: 1 }}, every_s: 1, {FACTS}"},
            "pools.p.discover",
            "`every_s` and `server` are for `dns`",
        ),
        ({"engine": "openai"}, "pools.p.discover", "are remote APIs"),
        ({"discover": "dns: 'vllm.local:80', dtype: bf16"}, "pools.p.discover", "no version, max_seq_len"),
    ],
)
def test_what_discovery_needs_is_asked_for(tmp_path, changes, path, says):
    refused = loaded(tmp_path, **{"discover": f"dns: 'vllm.local:80', {FACTS}", **changes})
    assert isinstance(refused, ConfigRejected)
    assert any(problem.path == path and says in problem.message for problem in refused.problems), refused.problems

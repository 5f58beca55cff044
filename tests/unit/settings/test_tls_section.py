"""`tls:` wherever there is a port: refusals before anything starts, and Envoy's part of it."""

import pytest
import yaml

from din_extproc.settings.load import load
from din_extproc.settings.node import NodeSettings, load_node
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from tests.support.certificates import Authority
from tests.support.stack import node, tenant

POOL = {"model": "m", "engine": "vllm", "nodes": [node("n1", "10.0.0.1:8000")]}


@pytest.fixture
def issued(tmp_path):
    """Files in the configuration's own folder, named relative to it."""
    authority = Authority(tmp_path)
    authority.issue("port", "localhost")
    authority.issue("envoy", "envoy")
    return authority


PORT = {"cert": "port.pem", "key": "port.key"}
MUTUAL = {**PORT, "client_ca": "ca.pem"}


def loaded(folder, gateway, envoy=None):
    config = {"version": 1, "pools": {"p": POOL}, "tenants": [tenant("t")], "gateway": gateway, "envoy": envoy or {}}
    (folder / "din.yaml").write_text(yaml.safe_dump(config))
    return load(folder / "din.yaml", {})


def problems(folder, gateway, envoy=None):
    result = loaded(folder, gateway, envoy)
    found = result.problems if isinstance(result, ConfigRejected) else result.warnings
    return [(problem.path, problem.message.replace(f"{folder}/", "")) for problem in found]


def test_files_that_can_not_be_used_are_reported_at_their_field(issued, tmp_path):
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("")
    registry = {"http_address": "127.0.0.1:1", "node_tokens_file": "tokens.yaml"}
    found = problems(
        tmp_path,
        {
            "admin": {"address": "127.0.0.1:2", "tls": {"cert": "port.pem", "key": "envoy.key"}},
            "registry": {**registry, "tls": {**PORT, "client_ca": "nowhere.pem"}},
        },
    )
    assert found == [
        ("gateway.admin.tls.key", "envoy.key is not the key of port.pem"),
        ("gateway.registry.tls.client_ca", "nowhere.pem: can't be read: no such file or directory"),
    ]


def test_a_port_that_envoy_could_not_talk_to_is_refused(issued, tmp_path):
    ports = {"access_log": {"address": "127.0.0.1:3", "tls": MUTUAL}}
    assert problems(tmp_path, ports) == [("envoy.sidecar_tls", "gateway.access_log speaks TLS, but how Envoy connects to it is not said")]
    assert problems(tmp_path, ports, {"sidecar_tls": {"ca": "ca.pem"}}) == [
        ("envoy.sidecar_tls", "gateway.access_log wants certificates of its clients, and Envoy has none")
    ]
    assert problems(tmp_path, ports, {"sidecar_tls": {"ca": "ca.pem", "cert": "envoy.pem", "key": "envoy.key"}}) == []


def test_files_of_an_envoy_on_another_machine_are_a_warning(issued, tmp_path):
    result = loaded(tmp_path, {"access_log": {"address": "127.0.0.1:3", "tls": PORT}}, {"sidecar_tls": {"ca": "/elsewhere/ca.pem"}})
    assert isinstance(result, Settings)
    assert [warning.path for warning in result.warnings] == ["envoy.sidecar_tls.ca"]


def test_what_makes_no_sense_is_refused(issued, tmp_path):
    assert problems(tmp_path, {"ext_proc": {"socket": "/run/x.sock", "tls": PORT}}) == [
        ("gateway.ext_proc", "`tls` is for an `address`: a Unix socket never leaves the machine")
    ]
    registry = {"http_address": "127.0.0.1:1", "node_tokens_file": "tokens.yaml", "bind_certificates": True, "tls": PORT}
    assert problems(tmp_path, {"registry": registry})[0] == (
        "gateway.registry",
        "bind_certificates needs `tls` with `client_ca`: else nodes show no certificates",
    )
    assert ("envoy.sidecar_tls", "`cert` and `key`, or neither") in problems(
        tmp_path, {}, {"sidecar_tls": {"ca": "ca.pem", "cert": "envoy.pem"}}
    )


def test_envoy_gets_the_tls_settings_of_each_port(issued, tmp_path):
    sidecar_tls = {"ca": "ca.pem", "cert": "envoy.pem", "key": "envoy.key", "server_name": "localhost"}
    settings = loaded(
        tmp_path,
        {
            "ext_proc": {"address": "127.0.0.1:4", "tls": MUTUAL},
            "access_log": {"address": "127.0.0.1:3"},
            "xds": {"address": "127.0.0.1:5", "tls": PORT},
        },
        {"sidecar_tls": sidecar_tls},
    )
    assert isinstance(settings, Settings), str(settings)
    topology = settings.make_topology("", settings.make_xds_source("envoy"))
    [workers] = topology.ext_proc
    assert workers.tls.ca == str(tmp_path / "ca.pem")
    assert (workers.tls.cert, workers.tls.server_name) == (str(tmp_path / "envoy.pem"), "localhost")
    assert topology.discovery.address.tls == workers.tls
    assert topology.access_log.tls is None


def test_a_nodes_files_are_looked_at_too(issued, tmp_path):
    config = {
        "version": 1,
        "node": {"id": "n", "address": "10.0.0.1:8000", "model": "m", "version": "1", "dtype": "bf16", "max_seq_len": 100},
        "engine": {"kind": "vllm", "address": "127.0.0.1:8000"},
        "registry": {"addresses": ["https://127.0.0.1:7000"], "tls": {"ca": "ca.pem", "cert": "port.pem", "key": "envoy.key"}},
        "health": {"address": "127.0.0.1:9", "tls": PORT},
        "proxy": {},
    }
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(config))
    found = load_node(file, {})
    assert isinstance(found, ConfigRejected)
    assert {problem.path for problem in found.problems} == {"registry.tls.key", "proxy.sidecar_tls"}
    config["registry"]["tls"]["key"] = "port.key"
    config["proxy"] = {"sidecar_tls": {"ca": "ca.pem"}}
    file.write_text(yaml.safe_dump(config))
    settings = load_node(file, {})
    assert isinstance(settings, NodeSettings), str(settings)
    assert settings.registry_tls.cert == str(tmp_path / "port.pem")
    assert settings.make_topology().agent.tls.ca == str(tmp_path / "ca.pem")

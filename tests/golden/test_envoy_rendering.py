"""The complete configuration of Envoy. `make golden` rewrites the expectations."""

import os
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from din_extproc.control import bootstrap
from din_extproc.control.topology import SocketAddress, Topology, UnixSocket, XdsSource
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.roles.configure.render import RenderFailed, render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected

HERE = Path(__file__).parent / "envoy"
SHIPPED = Path(__file__).parent.parent.parent / "envoy"
REWRITE = os.environ.get("DIN_REWRITE_GOLDENS") == "1"


def node(name: str, address: str, version: str) -> Node:
    return Node(
        id=name,
        endpoint=Endpoint.parse(address),
        model="big",
        version=version,
        dtype="bf16",
        compute_capability="9.0",
        tp_world_size=2,
        max_seq_len=32_768,
        max_concurrency=64,
    )


def everything() -> Topology:
    """Every branch of the renderer: two workers, a named host, IPv6, an engine with its own health path, CORS, fail-open, moves."""
    nodes = (node("gpu-1", "10.0.0.1:8000", "2025.3.1"), node("gpu-2", "[fd00::10]:8000", "2025.3.2"))
    return Topology(
        ext_proc=(UnixSocket("/run/din/ext_proc.sock.0"), UnixSocket("/run/din/ext_proc.sock.1")),
        access_log=SocketAddress("sidecar.internal", 50052),
        pools=(Pool("big", "big", "big", "vllm", "round_robin", nodes), Pool("other", "small", "small", "ollama", "round_robin", ())),
        usage_lua="function envoy_on_response(handle)\n  handle:headers()\nend\n",
        cors_origins=("https://app.example", "https://*.team.example", "*"),
        fail_open_pool="big",
        moves=(("big", "other"), ("other", "big")),
    )


def shipped() -> Topology:
    """The configuration that the repository shows as its example."""
    settings = load(SHIPPED / "din.yaml", {})
    assert not isinstance(settings, ConfigRejected), settings
    return settings.make_topology((SHIPPED / "lua" / "usage.lua").read_text())


def smallest() -> Topology:
    return Topology(ext_proc=(SocketAddress("127.0.0.1", 50051),), access_log=SocketAddress("127.0.0.1", 50052), health_check=None)


def discovered() -> Topology:
    """An Envoy that gets its pools, nodes and routes by xDS."""
    return structs.replace(everything(), discovery=XdsSource(SocketAddress("127.0.0.1", 50053), "envoy-1"))


@pytest.mark.parametrize(
    ("topology", "golden"),
    [
        (discovered, HERE / "discovered.yaml"),
        (everything, HERE / "everything.yaml"),
        (smallest, HERE / "smallest.yaml"),
        (shipped, SHIPPED / "gateway.yaml"),
    ],
    ids=["discovered", "everything", "smallest", "shipped"],
)
def test_a_topology_renders_to_its_golden_file_and_envoy_accepts_it(topology, golden):
    rendered = bootstrap.render_yaml(topology())
    if REWRITE:
        golden.write_text(rendered)
    assert rendered == golden.read_text()
    binary = find_envoy()
    assert binary is not None
    assert find_config_error(rendered, binary) is None


def test_an_envoy_without_delta_asks_for_the_state_of_the_world():
    topology = structs.replace(discovered(), discovery=XdsSource(SocketAddress("127.0.0.1", 50053), "envoy-1", delta=False))
    rendered = yaml.safe_load(bootstrap.render_yaml(topology))
    source = rendered["dynamic_resources"]["ads_config"]
    assert (source["api_type"], source["set_node_on_first_message_only"]) == ("GRPC", True)
    binary = find_envoy()
    assert binary is not None
    assert find_config_error(bootstrap.render_yaml(topology), binary) is None


def test_an_envoy_that_nothing_would_tell_its_nodes_is_not_rendered():
    settings = load(SHIPPED / "din.yaml", {})
    assert not isinstance(settings, ConfigRejected), settings
    with pytest.raises(RenderFailed, match=r"gateway\.xds"):
        render_envoy(settings, xds=True)


def test_the_yaml_text_has_the_rendered_values():
    assert yaml.safe_load(bootstrap.render_yaml(everything())) == bootstrap.render_dict(everything())


def test_one_rendering_is_for_every_supported_envoy_and_older_ones_are_refused():
    settings = load(SHIPPED / "din.yaml", {})
    assert not isinstance(settings, ConfigRejected), settings
    renderings = {render_envoy(settings, validate=True, envoy_version=version) for version in ("1.36", "1.37.0", "1.38", "1.39", "1.40")}
    assert renderings == {(SHIPPED / "gateway.yaml").read_text()}
    with pytest.raises(RenderFailed, match="too old"):
        render_envoy(settings, envoy_version="1.35")

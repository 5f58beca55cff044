"""`render`: an unwritable file is reported in one line, and names that no cluster or Envoy accepts are rejected."""

import pytest
import yaml
from typer.testing import CliRunner

from din_extproc.cli.app import app

DIN = """
version: 1
gateway: { reached_at: sidecar.example.com, ext_proc: { address: "0.0.0.0:50051" }, ext_authz: {} }
pools:
  p:
    model: m
    engine: vllm
    nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }]
tenants: [{ id: a, models: ["*"] }]
"""
MESH = ["istio", "--host", "llm.example.com"]
GATEWAY = ["envoy-gateway", "--host", "llm.example.com", "--gateway", "g"]


@pytest.fixture
def render(tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text(DIN)
    return lambda *arguments: CliRunner().invoke(app, ["render", *arguments, "-c", str(file)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", [["envoy", "--no-validate"], MESH, GATEWAY, ["ext-authz", "--no-validate"]], ids=lambda each: each[0])
def test_a_file_that_cannot_be_written_is_one_line(render, tmp_path, command):
    for output, why in ((tmp_path / "nope" / "x", "No such file or directory"), (tmp_path, "Is a directory")):
        result = render(*command, "-o", str(output))
        assert (result.exit_code, result.stderr.replace("\n", "")) == (1, f"error: {output}: {why}"), result.output


def test_what_lies_there_and_is_no_text_is_reported(render, tmp_path):
    output = tmp_path / "envoy.yaml"
    output.write_bytes(b"\xff\xfe\x00")
    result = render("envoy", "--no-validate", "-o", str(output))
    assert (result.exit_code, result.stderr) == (1, f"error: {output}: the file is not UTF-8 text\n"), result.output


@pytest.mark.parametrize("command", [["envoy", "--no-validate", "--static"], MESH, GATEWAY], ids=lambda each: each[0])
def test_a_pool_whose_nodes_are_found_is_not_rendered_without_xds(render, tmp_path, command):
    found = DIN.replace("reached_at:", 'xds: { address: "0.0.0.0:50053" }, reached_at:')
    found = found.replace("model: m\n", "model: m\n    discover: { dns: 'm.local:80', version: '1', dtype: bf16, max_seq_len: 9 }\n")
    (tmp_path / "din.yaml").write_text(found)
    result = render(*command)
    message = "error: pools.p.discover: a static rendering has the listed nodes alone"
    assert (result.exit_code, result.stderr.startswith(message)) == (1, True), result.output
    assert render("envoy", "--no-validate").exit_code == 0


@pytest.mark.parametrize("command", [MESH, GATEWAY], ids=lambda each: each[0])
@pytest.mark.parametrize(("option", "value"), [
    ("--host", ""), ("--host", "a b"), ("--host", "-a"),
    ("--host", "a..b"), ("--host", "*."), ("--host", "x" * 64), ("--namespace", ""),
    ("--namespace", "A B"), ("--namespace", "a.b"), ("--namespace", "x" * 64), ("--gateway", "a/b/c"), ("--gateway", ""),
    ("--gateway", "/a"), ("--gateway", "A"),
])  # fmt: skip
def test_a_name_that_no_cluster_takes_is_refused_with_its_option(render, command, option, value):
    result = render(*command, option, value)
    assert (result.exit_code, option in result.output) == (2, True), result.output


@pytest.mark.parametrize(("option", "value"), [
    ("--port", "0"), ("--port", "99999"), ("--selector", "="), ("--selector", "a"), ("--selector", "a=b c"), ("--selector", "a/b/c=d"),
    ("--selector", "=b"),
])  # fmt: skip
def test_what_istio_cannot_select_is_refused_with_its_option(render, option, value):
    result = render(*MESH, option, value)
    assert (result.exit_code, option in result.output) == (2, True), result.output


def test_an_address_or_a_slash_is_nothing_for_envoy_gateway(render):
    for wrong in (["--host", "10.0.0.1"], ["--gateway", "a/b"], ["--listener", ""]):
        result = render(*GATEWAY, *wrong)
        assert (result.exit_code, wrong[0] in result.output) == (2, True), result.output


def test_what_a_cluster_can_take_passes(render):
    selectors = ["--selector", "a.b/c=", "--selector", "app=x_Y.1"]
    mixed = ["--host", "*.example.com", "--gateway", "ns/name.x", *selectors, "--namespace", "n-1", "--port", "65535"]
    for right in (mixed, ["--host", "*"], ["--host", "10.0.0.1"]):
        assert render(*MESH, *right).exit_code == 0, right
    assert render(*GATEWAY, "--host", "*.example.com", "--gateway", "a.b-1", "--listener", "https").exit_code == 0


@pytest.mark.parametrize("node", ["x:99999", "x:0", ":80", "a b:80", "x", "x:", "::1:80", "[x]:80", "x:8²"])
def test_an_address_that_is_none_is_refused_before_envoy_is_asked(render, node):
    result = render("ext-authz", "--no-validate", "--node", node)
    assert (result.exit_code, "port" in result.stderr) == (1, True), result.output


def test_a_node_may_have_a_name_or_an_address(render):
    for node, host in (("engine.internal:80", "engine.internal"), ("[fd00::1]:80", "fd00::1")):
        result = render("ext-authz", "--no-validate", "--node", node)
        clusters = yaml.safe_load(result.output)["static_resources"]["clusters"]
        [nodes] = [each for each in clusters if each["name"] == "nodes"]
        address = nodes["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
        assert address == {"address": host, "port_value": 80}

"""The complete resources for Istio and Envoy Gateway. `make golden` rewrites the expectations.

Where the published schemas of their kinds lie (the folder that DIN_CRD_SCHEMAS names, or shared/crds beside the repository), each document
is held against them too. They are not this project's to ship; the golden files were written where they lay.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from msgspec import structs
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.control.envoy_gateway import Placement
from din_extproc.control.envoy_gateway import build_envoy_gateway as envoy_gateway_of
from din_extproc.control.istio import Mesh
from din_extproc.control.istio import build_istio as istio_of
from din_extproc.control.topology import Retry, SocketAddress, Topology
from din_extproc.domain.identity import SYSTEM_CA, IdentityRules, JwtIssuer, RemoteJwks
from din_extproc.domain.node import CredentialSource, Endpoint, InternalEndpoint, Node, Pool, RemoteApi
from din_extproc.roles.configure.render import RenderFailed, render_envoy_gateway, render_istio
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings

HERE = Path(__file__).parent / "mesh"
_HOSTED = {"cloud", "claude"}
SHIPPED = Path(__file__).parents[2] / "envoy" / "din.yaml"
REWRITE = os.environ.get("DIN_REWRITE_GOLDENS") == "1"
SCHEMAS = Path(os.environ.get("DIN_CRD_SCHEMAS", Path(__file__).parents[3] / "shared" / "crds"))
_TWO_ENGINES = (("fast", "vllm", "openai"), ("local", "ollama", "native"))
CLUSTER = "din-sidecar.inference.svc"


def settings(sidecar: str = CLUSTER, file: Path = HERE / "din.yaml") -> Settings:
    loaded = load(file, {"SIDECAR": sidecar})
    assert isinstance(loaded, Settings), str(loaded)
    return loaded


def without_hosted(folder: Path) -> Path:
    """Write the configuration without what only a gateway can have: hosted APIs and identities."""
    config = yaml.safe_load((HERE / "din.yaml").read_text())
    del config["identity"]
    config["catalog"]["source"] = str(HERE / "models.json")
    config["pools"] = {name: pool for name, pool in config["pools"].items() if name not in _HOSTED}
    config["rules"] = [rule for rule in config["rules"] if not _HOSTED & {rule["pool"], rule.get("fallback")}]
    (folder / "din.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder / "din.yaml"


def gateway_mode() -> str:
    text = render_istio(settings(), mode="gateway", host="llm.example.com", namespace="inference", gateway="istio-system/public")
    return text.replace(str(HERE), "/etc/din-extproc")


def sidecar_mode() -> str:
    selector = (("llm-client", "true"),)
    with tempfile.TemporaryDirectory() as folder:
        inside = settings("203.0.113.7", without_hosted(Path(folder)))
    return render_istio(inside, mode="sidecar", host="llm.din.internal", namespace="apps", selector=selector, port=10000)


def envoy_gateway() -> str:
    return render_envoy_gateway(settings(), host="llm.example.com", gateway="public", namespace="inference")


RENDERINGS = {"istio-gateway": gateway_mode, "istio-sidecar": sidecar_mode, "envoy-gateway": envoy_gateway}


@pytest.fixture(scope="module", params=RENDERINGS)
def rendering(request) -> tuple[str, str]:
    return request.param, RENDERINGS[request.param]()


def strict(schema: Any) -> Any:
    """A published schema that also refuses what it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


def complaints(document: dict[str, Any]) -> list[str]:
    """What the published schema of its kind has against it; nothing where the schemas are not at hand."""
    group, _, version = document["apiVersion"].partition("/")
    file = SCHEMAS / f"{group}_{version}_{document['kind']}.json"
    if not file.exists():
        return []
    schema = strict(json.loads(file.read_text()))
    for name in ("apiVersion", "kind"):
        schema["properties"].setdefault(name, {"type": "string"})
    schema["properties"]["metadata"] = {"type": "object"}
    return [f"{error.json_path}: {error.message[:300]}" for error in Draft202012Validator(schema).iter_errors(document)]


def test_a_rendering_is_its_golden_file(rendering):
    name, text = rendering
    golden = HERE / f"{name}.yaml"
    if REWRITE:
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_document_holds_to_the_published_schema_of_its_kind(rendering):
    _, text = rendering
    documents = list(yaml.safe_load_all(text))
    assert [complaint for document in documents for complaint in complaints(document)] == []


def test_a_published_schema_refuses_what_it_does_not_name():
    good = next(each for each in yaml.safe_load_all((HERE / "istio-gateway.yaml").read_text()) if each["kind"] == "EnvoyFilter")
    bad = json.loads(json.dumps(good))
    bad["spec"]["configPatches"][0]["applyTo"] = "CLUSTERS"
    bad["spec"]["surprise"] = 1
    assert len(complaints(bad)) == (2 if SCHEMAS.is_dir() else 0)


def test_the_kinds_that_each_proxy_needs_are_there(rendering):
    name, text = rendering
    wanted = {
        "istio-gateway": {"EnvoyFilter", "DestinationRule", "VirtualService"},
        "istio-sidecar": {"EnvoyFilter", "DestinationRule", "VirtualService", "ServiceEntry"},
        "envoy-gateway": {"HTTPRoute", "Backend", "BackendTLSPolicy", "EnvoyExtensionPolicy", "EnvoyPatchPolicy", "SecurityPolicy"},
    }
    assert wanted[name] <= {document["kind"] for document in yaml.safe_load_all(text)}


def test_what_a_mesh_could_not_reach_is_reported_with_what_to_change():
    shipped = load(SHIPPED, {})
    assert isinstance(shipped, Settings)
    with pytest.raises(RenderFailed, match="reached_at"):
        render_istio(shipped, mode="gateway", host="h", namespace="n")
    with pytest.raises(RenderFailed, match="reached_at"):
        render_envoy_gateway(shipped, host="h", namespace="n", gateway="g")


def test_tokens_are_verified_at_a_gateway_with_the_clusters_own_authorities():
    with pytest.raises(RenderFailed, match="only mode `gateway`"):
        render_istio(settings(), mode="sidecar", host="h", namespace="n")
    keys = RemoteJwks("https://a.example/keys", "a.example", 443, "/etc/own-ca.pem", 300)
    own = IdentityRules(jwt=(JwtIssuer("https://a.example", ("x",), keys, ("tenant",), ("sub",)),))
    missing = structs.replace(own, jwt=(structs.replace(own.jwt[0], jwks="/nowhere/jwks.json"),))
    for render, placed in ((render_istio, {"mode": "gateway"}), (render_envoy_gateway, {"gateway": "g"})):
        for identity, complaint in ((own, "own authorities"), (missing, "No such file")):
            with pytest.raises(RenderFailed, match=complaint):
                render(structs.replace(settings(), identity=identity), host="h", namespace="n", **placed)


def test_pairs_whose_names_run_together_are_refused():
    gpu = Node("n", Endpoint("10.0.0.1", 8000), "m", "1.0", "bf16", "", 1, 8192, 4)
    pools = tuple(Pool(name, "m", "m", "vllm", "round_robin", (gpu,)) for name in ("a", "b.c", "a.b", "c"))
    outside = SocketAddress("sidecar.internal", 50051)
    topology = Topology(ext_proc=(outside,), access_log=outside, pools=pools, moves=(("a", "b.c"), ("a.b", "c")))
    with pytest.raises(ValueError, match="dots"):
        envoy_gateway_of(topology, Placement(namespace="n", host="h", gateway="g"))


def hosted(*apis: tuple[str, str, bool]) -> Topology:
    """A pool of hosted APIs: host, authority and whether with TLS."""
    nodes = []
    for at, (host, ca, tls) in enumerate(apis):
        header, key = ("authorization", "Bearer "), CredentialSource(file="/run/key")
        api = RemoteApi(host=host, port=443, base_path="/v1", tls=tls, ca=ca, credential_header=header, credential=key)
        nodes.append(Node(f"n{at}", InternalEndpoint.of(f"n{at}"), "m", "0", "hosted", "", 1, 8192, 4, remote=api))
    outside = SocketAddress("sidecar.internal", 50051)
    pool = Pool("cloud", "m", "m", "openai", "round_robin", tuple(nodes))
    return Topology(ext_proc=(outside,), access_log=outside, pools=(pool,))


def test_hosted_apis_are_hosts_of_istio_and_listeners_of_its_proxies():
    mesh, good = Mesh(mode="gateway", host="h", namespace="n"), ("api.example", "/ca.pem", True)
    documents = istio_of(hosted(good, ("203.0.113.9", "/ca.pem", True)), mesh)
    assert [complaint for document in documents for complaint in complaints(document)] == []
    found = {each["spec"]["hosts"][0]: each["spec"] for each in documents if each["kind"] == "ServiceEntry"}
    assert {"api.example", "203-0-113-9.din-extproc.internal"} <= found.keys()
    assert found["api.example"]["resolution"] == "DNS"
    rules = {each["spec"]["host"]: each["spec"]["trafficPolicy"] for each in documents if each["kind"] == "DestinationRule"}
    own = {"mode": "SIMPLE", "caCertificates": "/ca.pem", "subjectAltNames": ["api.example"], "sni": "api.example"}
    assert rules["api.example"]["tls"] == own
    text = json.dumps(documents)
    assert '"cluster": "outbound|443||api.example"' in text
    assert '"path": "/var/lib/din/credentials/n0.yaml"' in text


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(("127.0.0.1", "/ca.pem", False), "own machine"), (("api.example", "/other.pem", True), "same `ca`")]
)
def test_hosted_apis_that_a_mesh_can_t_reach_are_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        istio_of(hosted(("api.example", "/ca.pem", True), wrong), Mesh(mode="gateway", host="h", namespace="n"))


def test_clients_proxies_are_given_no_credentials():
    with pytest.raises(ValueError, match="in each client's pod"):
        istio_of(hosted(("api.example", "/ca.pem", True)), Mesh(mode="sidecar", host="h", namespace="n"))


def test_hosted_apis_are_backends_with_tls_and_listeners_of_envoy_gateways_proxies():
    topology = hosted(("api.example", "/ca.pem", True), ("api.other.example", SYSTEM_CA, True))
    documents = envoy_gateway_of(topology, Placement(namespace="ns", host="h", gateway="g"), {"/ca.pem": "PEM of the authority"})
    assert [complaint for document in documents for complaint in complaints(document)] == []
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    own, other = (found["BackendTLSPolicy", f"din-egress.n{at}"]["spec"]["validation"] for at in (0, 1))
    assert own == {"hostname": "api.example", "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "din-egress.n0"}]}
    assert found["ConfigMap", "din-egress.n0"]["data"] == {"ca.crt": "PEM of the authority"}
    assert other == {"hostname": "api.other.example", "wellKnownCACertificates": "System"}
    assert found["Backend", "din-egress.n1"]["spec"]["endpoints"] == [{"fqdn": {"hostname": "api.other.example", "port": 443}}]
    assert "active" not in found["BackendTrafficPolicy", "din-cloud"]["spec"]["healthCheck"], "probes cost money"
    proxy = found["EnvoyProxy", "din"]["spec"]
    assert "internal_listener" in proxy["bootstrap"]["value"]
    [mount] = proxy["provider"]["kubernetes"]["envoyDeployment"]["container"]["volumeMounts"]
    assert mount == {"name": "din-credentials", "mountPath": topology.credentials_folder, "readOnly": True}


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(("127.0.0.1", "/ca.pem", False), "own machine"), (("203.0.113.9", "/ca.pem", True), "give a URL with a name")]
)
def test_hosted_apis_that_envoy_gateway_can_t_reach_are_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        envoy_gateway_of(hosted(wrong), Placement(namespace="n", host="h", gateway="g"))


def test_an_authority_that_can_t_be_read_is_named(tmp_path):
    config = yaml.safe_load((HERE / "din.yaml").read_text())
    for name in ("models.json", "jwks.json"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "din.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(RenderFailed, match=r"node account-1: its `ca` can't be read"):
        render_envoy_gateway(settings(CLUSTER, tmp_path / "din.yaml"), host="h", gateway="g", namespace="n")


def test_a_pool_named_like_one_of_the_gateways_own_resources_is_refused():
    gpu = Node("n", Endpoint("10.0.0.1", 8000), "m", "1.0", "bf16", "", 1, 8192, 4)
    outside = SocketAddress("sidecar.internal", 50051)
    for name in ("log", "closed", "extproc"):
        pools = (Pool(name, "m", "m", "vllm", "round_robin", (gpu,)),)
        with pytest.raises(ValueError, match="rename"):
            envoy_gateway_of(
                Topology(ext_proc=(outside,), access_log=outside, pools=pools), Placement(namespace="n", host="h", gateway="g")
            )


def test_attempts_are_translated_by_the_sidecar_under_the_name_that_each_proxy_has_for_it():
    node = Node("n", Endpoint("10.0.0.1", 8000), "m", "1.0", "bf16", "", 1, 8192, 4)
    pools = tuple(Pool(name, "m", "m", engine, "round_robin", (node,), api=api) for name, engine, api in _TWO_ENGINES)
    outside = SocketAddress("sidecar.internal", 50051)
    topology = Topology(ext_proc=(outside,), access_log=outside, pools=pools, moves=(("fast", "local"),))
    gateway = envoy_gateway_of(topology, Placement(namespace="n", host="h", gateway="g"))
    mesh = istio_of(topology, Mesh(mode="gateway", host="h", namespace="n"))
    found = json.dumps([each for each in gateway if each["kind"] == "EnvoyPatchPolicy"])
    assert '"cluster_name": "envoyextensionpolicy/n/din/extproc/0"' in found
    assert '"cluster_name": "outbound|50051||sidecar.internal"' in json.dumps(mesh)
    assert "din_ext_proc" not in found + json.dumps(mesh)


def test_the_command_line_renders_both(tmp_path):
    runner, config = CliRunner(), without_hosted(tmp_path)
    for arguments in (["istio"], ["istio", "--mode", "sidecar", "--selector", "app=x"], ["envoy-gateway", "--gateway", "public"]):
        out = tmp_path / "out.yaml"
        result = runner.invoke(app, ["render", *arguments, "--host", "llm.example.com", "-c", str(config), "-o", str(out)])
        assert result.exit_code == 0, result.output
        assert list(yaml.safe_load_all(out.read_text()))


def test_a_third_attempt_waits_for_the_sidecar_under_the_name_that_each_proxy_has_for_it():
    nodes = tuple(Node(f"n{at}", Endpoint(f"10.0.0.{at}", 8000), "m", "1.0", "bf16", "", 1, 8192, 4) for at in range(1, 4))
    outside = SocketAddress("sidecar.internal", 50051)
    for attempts, scripts in ((1, 0), (2, 1)):
        pools = (Pool("p", "m", "m", "vllm", "round_robin", nodes),)
        topology = Topology(ext_proc=(outside,), access_log=outside, pools=pools, retry=Retry(attempts=attempts))
        gateway = envoy_gateway_of(topology, Placement(namespace="n", host="h", gateway="g"))
        mesh = istio_of(topology, Mesh(mode="gateway", host="h", namespace="n"))
        for found, name in ((gateway, "envoyextensionpolicy/n/din/extproc/0"), (mesh, "outbound|50051||sidecar.internal")):
            assert json.dumps(found).count(f'httpCall(\\"{name}\\"') == scripts

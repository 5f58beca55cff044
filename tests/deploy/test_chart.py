"""The Helm chart, rendered by Helm's own engine and held against the schemas of Kubernetes; its din.yaml against the program."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.deploy.shipped import DEPLOY

CHART = DEPLOY / "helm" / "din-extproc"
KUBERNETES = ("1.30", "1.34")
POOL = {"model": "sim-chat", "engine": "vllm", "nodes": [{"id": "a", "address": "10.0.0.7:8000", "max_concurrency": 8}]}
ENGINES = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"}
EXAMPLE: dict[str, Any] = {
    "config": {
        "aliases": {"bx-fast-chat": {"model": "sim-chat"}},
        "pools": {
            "chat": {"model": "sim-chat", "engine": "vllm", "nodes": [{"id": "a", "address": "10.0.0.7:8000", "max_concurrency": 8}]}
        },
        "rules": [{"id": "all", "when": "always", "pool": "chat"}],
        "tenants": [{"id": "t", "keys": [{"id": "t", "hash": "sha256$" + "0" * 32 + "$" + "0" * 64}], "models": ["*"]}],
    },
    "catalog": [{"model_name": "sim-chat", "model_version": "1.0", "dtype": "bf16", "max_seq_len": 8192}],
    "redis": {"url": "redis://redis.example.svc:6379/0"},
}
EVERYTHING: dict[str, Any] = {
    "registry": {"enabled": True, "tokensSecret": "node-tokens"},
    "redis": {"bundled": {"enabled": True}},
    "imagePullSecrets": [{"name": "pull"}],
    "env": [{"name": "DIN_WORKERS", "value": "1"}],
    "autoscaling": {
        "gateway": {"enabled": True},
        "engines": [
            {
                "name": "chat",
                "model": "sim-chat",
                "target": ENGINES,
                "min": 1,
                "max": 8,
                "queueSeconds": 2,
            }
        ],
    },
    "networkPolicy": {
        "clients": [{"namespaceSelector": {}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "nodes": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "serviceAccount": {"annotations": {"a": "b"}},
}
FOUND: dict[str, Any] = {
    "config": {
        "pools": {
            "chat": {
                "model": "sim-chat",
                "engine": "vllm",
                "discover": {"kubernetes": {"namespace": "gpu", "service": "vllm", "port": "http"}},
            },
            "more": {
                "model": "sim-chat",
                "engine": "vllm",
                "discover": {"kubernetes": {"namespace": "gpu", "selector": "a=b", "port": 8000}},
            },
            "here": {
                "model": "sim-chat",
                "engine": "vllm",
                "discover": {"kubernetes": {"namespace": "inference", "service": "v", "port": 1}},
            },
        }
    }
}
VARIANTS = {
    "sidecar": {},
    "separate": {"mode": "separate"},
    "everything, sidecar": EVERYTHING,
    "everything, separate": {**EVERYTHING, "mode": "separate"},
    "found nodes, sidecar": FOUND,
    "found nodes, separate": {**FOUND, "mode": "separate"},
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(dict(base))
    for name, value in over.items():
        out[name] = merged(out[name], value) if isinstance(value, Mapping) and isinstance(out.get(name), Mapping) else value
    return out


def rendered(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(merged(EXAMPLE, values), name="din", namespace="inference")
    return [document for text in files.values() if "kind:" in text for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request) -> list[dict[str, Any]]:
    return rendered(VARIANTS[request.param])


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: deployment["spec"]["template"] for name, deployment in of_kind(manifests, "Deployment").items()}


def test_helm_has_no_complaint():
    result = helm_python.lint(str(CHART), values=EXAMPLE)
    assert not result.get("errors"), result


def test_every_manifest_holds_to_the_schema_of_kubernetes(manifests):
    for document in manifests:
        if document["kind"] == "ServiceMonitor":  # the operator's own kind: not in Kubernetes' schemas
            assert set(document["spec"]) == {"selector", "endpoints"}
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_configuration_is_sound_and_envoy_would_start_with_it(manifests, tmp_path):
    settings = shipped_settings(manifests, tmp_path)
    assert [problem for problem in settings.warnings if "no nodes" not in str(problem)] == []
    result = settings.gateway.xds is not None
    assert find_config_error(render_envoy(settings, xds=result, node_id="pod"), find_envoy()) is None


def shipped_settings(manifests: list[dict[str, Any]], folder: Path) -> Settings:
    data = of_kind(manifests, "ConfigMap")["din"]["data"]
    for name, text in data.items():
        (folder / name).write_text(text.replace("/etc/din-tokens/", f"{folder}/"))
    (folder / "node-tokens.yaml").write_text("{}\n")
    settings = load(folder / "din.yaml", {"DIN_REDIS_URL": "redis://127.0.0.1:6379/0"})
    assert isinstance(settings, Settings), str(settings)
    return settings


def test_no_pod_has_rights_that_it_does_not_need(manifests):
    for template in pods(manifests).values():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            security = container["securityContext"]
            assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("mode", ["sidecar", "separate"])
def test_the_sidecar_alone_may_read_what_it_finds_nodes_by(mode):
    found = rendered({**FOUND, "mode": mode})
    rules = {role["metadata"]["namespace"]: role["rules"] for role in found if role["kind"] == "Role"}
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert rules == {"gpu": [slices, {**slices, "apiGroups": [""], "resources": ["pods"]}], "inference": [slices]}
    for binding in (each for each in found if each["kind"] == "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "din", "namespace": "inference"}]
    readers = [
        container["name"]
        for template in pods(found).values()
        for container in [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
        if any("serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"])
    ]
    assert readers == ["sidecar"]
    assert not [each for each in rendered({"mode": mode}) if "Role" in each["kind"]]


def test_selectors_find_their_pods_and_ports_have_names_that_exist(manifests):
    templates = pods(manifests)
    selecting = [each for each in manifests if each["kind"] in {"Service", "PodDisruptionBudget", "NetworkPolicy"}]
    for each in selecting:
        spec = each["spec"]
        wanted = spec.get("podSelector", spec.get("selector", {}))
        wanted = wanted.get("matchLabels", wanted)
        found = [template for template in templates.values() if wanted.items() <= template["metadata"]["labels"].items()]
        assert len(found) == 1, each["metadata"]["name"]
        named = {port["name"] for container in found[0]["spec"]["containers"] for port in container.get("ports", ())}
        asked = [port.get("targetPort") for port in spec.get("ports", ())] if each["kind"] == "Service" else []
        asked += [port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]]
        assert {port for port in asked if isinstance(port, str)} <= named, each["metadata"]["name"]


def test_the_administration_and_the_registry_are_closed_unless_somebody_is_named():
    closed = rendered({"registry": {"enabled": True, "tokensSecret": "t"}})
    rules = [rule for policy in of_kind(closed, "NetworkPolicy").values() for rule in policy["spec"]["ingress"]]
    assert [rule["ports"] for rule in rules] == [[{"port": "http"}]]


def test_a_pod_that_goes_has_time_for_what_is_in_flight(manifests):
    for name, template in pods(manifests).items():
        if name == "din-redis":
            continue
        spec = template["spec"]
        for container in spec["containers"]:
            waits = container["lifecycle"]["preStop"]
            assert waits.get("sleep", {"seconds": 60})["seconds"] < spec["terminationGracePeriodSeconds"]
    envoys = [each for template in pods(manifests).values() for each in template["spec"]["containers"] if each["name"] == "envoy"]
    assert [each["lifecycle"]["preStop"] for each in envoys] == [{"sleep": {"seconds": 60}}]


def test_probes_ask_for_life_and_for_readiness_apart(manifests):
    [sidecar] = [each for template in pods(manifests).values() for each in template["spec"]["containers"] if each["name"] == "sidecar"]
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert sidecar["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize(
    ("values", "complaint_of_helm"),
    [
        ({"mode": "other"}, "mode"),
        ({"surprise": 1}, "surprise"),
        ({"redis": {"url": ""}}, "redis"),
        ({"registry": {"enabled": True}}, "tokensSecret"),
        ({"config": {"version": 1}}, "config"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values, complaint_of_helm):
    with pytest.raises(helm_python.HelmError, match=complaint_of_helm):
        rendered(values)


def test_engines_scale_by_how_long_requests_wait():
    [scaler] = [each for name, each in of_kind(rendered(EVERYTHING), "HorizontalPodAutoscaler").items() if name == "din-chat"]
    [metric] = scaler["spec"]["metrics"]
    assert metric["external"]["metric"] == {"name": "din_queue_seconds", "selector": {"matchLabels": {"model": "sim-chat"}}}
    assert scaler["spec"]["scaleTargetRef"]["name"] == "vllm"

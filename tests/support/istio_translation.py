"""Istio's own translation of the rendered resources, as a configuration for an Envoy that is not Istio's.

Rule: the translator is Istio's code, built from its Go module (`tests/tools/istio_translate`); only what needs Istio's Envoy or its
control plane is taken out: private filters, discovery, certificates of the mesh.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_PRIVATE = "istio."
_MANAGER = "envoy.filters.network.http_connection_manager"


def translated(
    program: str, mode: str, rendered: Sequence[Mapping[str, Any]], service: str, ports: Iterable[int]
) -> dict[str, list[dict[str, Any]]]:
    """Return listeners, routes and clusters that Istio sends a proxy that the resources patch.

    Args:
        program: The translator.
        mode: `gateway` or `sidecar`.
        rendered: The resources.
        service: The sidecar's host in the mesh.
        ports: The service's ports.
    """
    [envoy_filter] = [each for each in rendered if each["kind"] == "EnvoyFilter"]
    [[name, value]] = envoy_filter["spec"]["workloadSelector"]["labels"].items()
    namespace = envoy_filter["metadata"]["namespace"]
    with tempfile.TemporaryDirectory(prefix="din-istio-") as folder:
        resources, out = Path(folder) / "resources.yaml", Path(folder) / "out.json"
        resources.write_text(yaml.safe_dump_all([*_mesh(namespace, service, ports, {name: value}), *rendered]))
        command = [program, mode, namespace, f"{name}={value}", str(resources), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())


def _mesh(namespace: str, service: str, ports: Iterable[int], selector: dict[str, str]) -> list[dict[str, Any]]:
    """Return what the cluster already has: a Gateway, and the sidecar's Service."""
    named = [{"number": number, "name": f"grpc-{number}", "protocol": "GRPC"} for number in ports]
    entry = {"hosts": [f"{service}.cluster.local"], "location": "MESH_INTERNAL", "ports": named, "resolution": "STATIC"}
    server = {"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": ["*"]}
    specs = {
        "Gateway": ("istio-ingressgateway", {"selector": selector, "servers": [server]}),
        "ServiceEntry": ("din-extproc-service", {**entry, "endpoints": [{"address": "127.0.0.1"}]}),
    }
    return [
        {"apiVersion": "networking.istio.io/v1", "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        for kind, (name, spec) in specs.items()
    ]


def bootstrap(parts: Mapping[str, list[dict[str, Any]]], *, port: int, listen: int, admin: int, ports: Mapping[str, int]) -> dict[str, Any]:
    """Return a static bootstrap.

    Args:
        parts: From `translated`.
        port: The mesh's port of the host.
        listen: Where Envoy listens instead.
        admin: The port of Envoy's administration.
        ports: The local port of each of the sidecar's clusters.
    """
    [listener] = [each for each in parts["listeners"] if each["name"] == f"0.0.0.0_{port}"]
    network = next(each for chain in listener["filter_chains"] for each in chain["filters"] if each["name"] == _MANAGER)
    manager = network["typed_config"]
    manager["http_filters"] = [each for each in manager["http_filters"] if not each["name"].startswith(_PRIVATE)]
    name = manager.pop("rds")["route_config_name"]
    [manager["route_config"]] = [each for each in parts["routes"] if each["name"] == name]
    [host] = [each for each in manager["route_config"]["virtual_hosts"] if each["routes"][-1].get("name") == "din-closed"]
    manager["route_config"]["virtual_hosts"] = [{**host, "domains": ["*"]}]
    for private in ("tracing", "request_id_extension"):
        manager.pop(private, None)
    own = {
        "name": listener["name"],
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
        "per_connection_buffer_limit_bytes": listener["per_connection_buffer_limit_bytes"],
        "filter_chains": [{"filters": [network]}],
    }
    clusters = [_local(each, ports[each["name"]]) if each["name"] in ports else each for each in parts["clusters"]]
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [own], "clusters": [each for each in clusters if each["type"] == "STATIC"]},
    }


def _local(cluster: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Return one of the sidecar's clusters without discovery, certificates of the mesh and private filters."""
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
    taken_out = {"eds_cluster_config", "transport_socket_matches", "filters"}
    kept = {key: value for key, value in cluster.items() if key not in taken_out}
    return {**kept, "type": "STATIC", "load_assignment": {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": [endpoint]}]}}

"""Hosted APIs behind Envoy Gateway: its resources for DNS and TLS, and the internal listeners through which requests leave its proxies.

Invariant: DNS and TLS are Envoy Gateway's, by a Backend and a BackendTLSPolicy for each API; path, credential and headers are those of the
standalone rendering. No resource holds a credential: the proxies mount the Secret `din-credentials` where `envoy.credentials_folder` says.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from envoy_data_plane.envoy.extensions.bootstrap.internal_listener.v3 import InternalListener

from din_extproc.control.egress import CONNECT_MS, find_remote_nodes, make_egress_listener
from din_extproc.control.gateway_resources import CORE, NO_LIMITS, OWN, STANDARD, format_duration, make_patch, make_resource, make_target
from din_extproc.control.packing import pack_extension, to_plain
from din_extproc.control.routes import CLUSTER_HEADER
from din_extproc.control.topology import SocketAddress, Topology
from din_extproc.domain.identity import SYSTEM_CA
from din_extproc.domain.node import Node, RemoteApi

_SECRET = "din-credentials"  # noqa: S105 - its name
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?").fullmatch
_NOWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737). A patch puts the internal listener into its place; without the patch nothing leaves."""


def check_hosts(topology: Topology) -> None:
    """Check what Envoy Gateway can't express.

    Raises:
        ValueError: an API is on the proxy's own machine, or has an address instead of a name; or a node's name is none of Kubernetes.
    """
    for node, api in find_remote_nodes(topology):
        if not api.tls:
            raise ValueError(f"node {node.id}: http://{api.host} would be each proxy's own machine; give an https:// URL")
        if SocketAddress(api.host, api.port).is_ip:
            raise ValueError(f"node {node.id}: Envoy Gateway verifies names only, and {api.host} is an address; give a URL with a name")
        if _NAME(node.id) is None:
            raise ValueError(f"node {node.id}: a Kubernetes name has lower-case letters, digits, '-' and '.' only; rename the node")


def describe_proxy(topology: Topology) -> dict[str, Any]:
    """Return the spec of an EnvoyProxy for hosted APIs: internal listeners, and the mounted credentials; {} without hosted APIs."""
    apis = [api for _, api in find_remote_nodes(topology)]
    if not apis:
        return {}
    extension = to_plain(pack_extension("envoy.bootstrap.internal_listener", InternalListener()))
    spec: dict[str, Any] = {"bootstrap": {"type": "Merge", "value": json.dumps({"bootstrap_extensions": [extension]})}}
    if any(api.credential is not None for api in apis):
        volume = {"name": _SECRET, "secret": {"secretName": _SECRET}}
        mount = {"name": _SECRET, "mountPath": topology.credentials_folder, "readOnly": True}
        deployment = {"pod": {"volumes": [volume]}, "container": {"volumeMounts": [mount]}}
        spec["provider"] = {"type": "Kubernetes", "kubernetes": {"envoyDeployment": deployment}}
    return spec


def describe_hosts(topology: Topology, parent: Mapping[str, str], host: str, authorities: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the resources of each API.

    Its route is what makes Envoy Gateway define a cluster: no request takes it, because the sidecar names no such cluster.

    Args:
        topology: Whose APIs.
        parent: The listener that the routes join.
        host: That clients call.
        authorities: The certificates of authorities, PEM, by the name of their file.
    """
    for node, api in find_remote_nodes(topology):
        name = _name(node)
        yield make_resource(OWN, "Backend", name, {"endpoints": [{"fqdn": {"hostname": api.host, "port": api.port}}]})
        validation: dict[str, Any] = {"hostname": api.host}
        if api.ca == SYSTEM_CA:
            validation["wellKnownCACertificates"] = "System"
        else:
            validation["caCertificateRefs"] = [make_target("ConfigMap", name, CORE)]
            yield make_resource(CORE, "ConfigMap", name, {"ca.crt": authorities[api.ca]}, field="data")
        tls = {"targetRefs": [make_target("Backend", name, OWN)], "validation": validation}
        yield make_resource(STANDARD, "BackendTLSPolicy", name, tls)
        match = {
            "path": {"type": "PathPrefix", "value": "/"},
            "headers": [{"type": "Exact", "name": CLUSTER_HEADER, "value": node.endpoint.host}],
        }
        rule = {"matches": [match], "backendRefs": [make_target("Backend", name, OWN)]}
        yield make_resource(STANDARD, "HTTPRoute", name, {"parentRefs": [parent], "hostnames": [host], "rules": [rule]})
        connect = format_duration(max(CONNECT_MS, topology.timeouts.connect_ms))
        traffic = {
            "targetRefs": [make_target("HTTPRoute", name)],
            "timeout": {"tcp": {"connectTimeout": connect}},
            "circuitBreaker": NO_LIMITS,
        }
        yield make_resource(OWN, "BackendTrafficPolicy", name, traffic)


def describe_listeners(topology: Topology, namespace: str) -> Iterator[dict[str, Any]]:
    """Yield the patches that add the internal listener of each API, toward the cluster that Envoy Gateway makes of its route."""
    for node, api in find_remote_nodes(topology):
        cluster = f"httproute/{namespace}/{_name(node)}/rule/0"
        listener = to_plain(make_egress_listener(node, api, topology, cluster=cluster))
        yield make_patch("listener.v3.Listener", node.endpoint.host, "", "", listener)


def make_placeholder(node: Node, api: RemoteApi) -> dict[str, Any]:
    """Return the endpoint that represents an API in a pool's Backend, until `describe_endpoint` replaces it."""
    return {"hostname": _name(node), "ip": {"address": _NOWHERE, "port": api.port}}


def find_placeholder(node: Node) -> str:
    """Return the condition under which an endpoint of Envoy is the node's placeholder."""
    return f"@.endpoint.hostname=='{_name(node)}'"


def describe_endpoint(node: Node) -> dict[str, Any]:
    """Return the endpoint that is the node's internal listener."""
    return {"address": {"envoy_internal_address": {"server_listener_name": node.endpoint.host}}}


def _name(node: Node) -> str:
    return f"din-egress.{node.id}"

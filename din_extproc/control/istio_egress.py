"""Hosted APIs in a mesh: what Istio itself connects to, and the internal listeners through which requests leave its proxies.

Invariant: DNS and TLS are Istio's, by a ServiceEntry and a DestinationRule for each host; path, credential and headers are those of the
standalone rendering. The proxies read the SDS files of credentials where `envoy.credentials_folder` says.
"""

from collections.abc import Iterator
from typing import Any

from din_extproc.control.egress import find_remote_nodes, make_egress_listener
from din_extproc.control.packing import to_plain
from din_extproc.control.topology import SocketAddress, Topology
from din_extproc.domain.node import RemoteApi


def describe_hosts(topology: Topology) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kind, name and spec of the resources for each host.

    Raises:
        ValueError: an API is on the proxy's own machine, or one host is trusted by two authorities.
    """
    for host, apis in _by_host(topology).items():
        name = f"din-egress-{host.replace(':', '-')}"
        numbers = sorted({api.port for api in apis})
        ports = [{"name": f"http-{number}", "number": number, "protocol": "HTTP"} for number in numbers]
        entry: dict[str, Any] = {"hosts": [_mesh_host(host)], "ports": ports, "location": "MESH_EXTERNAL", "resolution": "DNS"}
        if _is_ip(host):
            entry |= {"resolution": "STATIC", "addresses": [host], "endpoints": [{"address": host}]}
        yield "ServiceEntry", name, entry
        tls: dict[str, Any] = {"mode": "SIMPLE", "caCertificates": apis[0].ca, "subjectAltNames": [host]}
        if not _is_ip(host):
            tls["sni"] = host
        yield "DestinationRule", name, {"host": _mesh_host(host), "trafficPolicy": {"tls": tls}}


def describe_listeners(topology: Topology) -> Iterator[dict[str, Any]]:
    """Yield the internal listener of each hosted API, toward the cluster that Istio makes of its ServiceEntry."""
    for node, api in find_remote_nodes(topology):
        yield to_plain(make_egress_listener(node, api, topology, cluster=f"outbound|{api.port}||{_mesh_host(api.host)}"))


def _by_host(topology: Topology) -> dict[str, list[RemoteApi]]:
    found: dict[str, list[RemoteApi]] = {}
    for node, api in find_remote_nodes(topology):
        if not api.tls:
            raise ValueError(f"node {node.id}: http://{api.host} would be each proxy's own machine; give an https:// URL")
        others = found.setdefault(api.host, [])
        if others and others[0].ca != api.ca:
            raise ValueError(f"node {node.id}: Istio trusts one authority per host; give all nodes at {api.host} the same `ca`")
        others.append(api)
    return found


def _is_ip(host: str) -> bool:
    return SocketAddress(host, 1).is_ip


def _mesh_host(host: str) -> str:
    """Return the name that the mesh has for a host: an address has none of its own."""
    return f"{host.replace(':', '-').replace('.', '-')}.din-extproc.internal" if _is_ip(host) else host

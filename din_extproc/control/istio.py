"""A topology as Istio's resources: the same filters, routes and clusters, put into the Envoys that Istio runs.

Invariant: everything but what Istio itself has to know (a host, a gateway's routes, the sidecar's Service) is the standalone rendering as
patches, with the same guarantees. Importing this module takes seconds, like `bootstrap`.

In mode `gateway` the patches go to an ingress gateway; in mode `sidecar` to the proxies of clients, which then reach the pools directly.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.control.clusters import build_pool_clusters
from din_extproc.control.filters import build_http_filters
from din_extproc.control.istio_egress import describe_hosts, describe_listeners
from din_extproc.control.jwt import keys_for_cluster
from din_extproc.control.listener import build_connection_manager, compute_held_bytes
from din_extproc.control.packing import renamed, to_plain
from din_extproc.control.routes import build_route_configuration
from din_extproc.control.topology import ACCESS_LOG_CLUSTER, EXT_PROC_CLUSTER, SocketAddress, Topology
from din_extproc.domain.identity import JWT_AUTHN, RemoteJwks

_MANAGER = "envoy.filters.network.http_connection_manager"
_ROUTER = "envoy.filters.http.router"
_LIFTED = ("codec_type", "http_filters", "route_config", "server_header_transformation", "server_name", "stat_prefix", "use_remote_address")
"""Settings that are Istio's to decide."""
_JWT = "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3"
_LENIENT = "din"
"""The requirement of our host: an API key in the place of a token is no invalid token."""
_CLUSTER_DOMAIN = ".cluster.local"
_NAMELESS = "din-extproc.internal"
"""For a sidecar that has an address only."""
_UNAVAILABLE = 503
_LABELS = {"app.kubernetes.io/name": "din-extproc"}


class Mesh(Struct, frozen=True, kw_only=True):
    """Names, namespaces and port in the mesh."""

    mode: Literal["gateway", "sidecar"]
    host: str
    """That clients call."""
    namespace: str
    """Of the resources, and in mode `sidecar` of the clients."""
    gateway: str = "istio-ingressgateway"
    """The Gateway (`namespace/name` or a name) whose routes the host joins; mode `gateway`."""
    selector: tuple[tuple[str, str], ...] = (("istio", "ingressgateway"),)
    """Labels of the proxies that are patched."""
    port: int = 80
    """The port on which those proxies listen for the host."""


def build_istio(topology: Topology, mesh: Mesh) -> list[dict[str, Any]]:
    """The manifests, in the order in which they are applied.

    Raises:
        ValueError: the mesh can't reach the sidecar where the topology has it.
    """
    topology = replace(topology, fluentd_log=False)
    sidecar, log = _services(topology)
    empty = [pool.name for pool in topology.pools if not pool.nodes]
    if empty:
        raise ValueError(f"pool {empty[0]}: only nodes that din.yaml lists are rendered; those that register need `gateway.xds`")
    if mesh.mode == "sidecar" and (topology.identity.jwt or topology.identity.attributes):
        raise ValueError("`identity`: tokens and certificates are verified where clients arrive, so only mode `gateway` can render them")
    hosted = [pool.name for pool in topology.pools if pool.is_remote]
    if mesh.mode == "sidecar" and hosted:
        raise ValueError(f"pool {hosted[0]}: the credential of a hosted API would be in each client's pod; render it in mode `gateway`")
    resources = [_sidecar_rule(_host(sidecar), mesh)]
    if not _in_cluster(sidecar.host):
        resources.insert(0, _external(sidecar, log, mesh))
    if mesh.mode == "sidecar":
        resources.append(_host_entry(mesh))
    resources += [_resource(kind, "v1", name, mesh, spec) for kind, name, spec in describe_hosts(topology)]
    if topology.identity.jwt:
        resources.append(_request_authentication(topology, mesh))
    return [*resources, _virtual_service(mesh), _envoy_filter(topology, mesh, sidecar, log)]


def _services(topology: Topology) -> tuple[SocketAddress, SocketAddress]:
    reached = [*topology.ext_proc, topology.access_log]
    services = [SocketAddress(_qualified(each.host), each.port) for each in reached if isinstance(each, SocketAddress)]
    if len(services) != len(reached) or any(each.is_loopback for each in services):
        raise ValueError("set `gateway.reached_at`, the host under which the mesh reaches this sidecar, and `gateway.ext_proc.address`")
    return services[0], services[-1]


def _qualified(host: str) -> str:
    return host + _CLUSTER_DOMAIN if host.endswith(".svc") else host


def _in_cluster(host: str) -> bool:
    return host.endswith(_CLUSTER_DOMAIN)


def _resource(kind: str, version: str, name: str, mesh: Mesh, spec: dict[str, Any], *, group: str = "networking") -> dict[str, Any]:
    metadata = {"name": name, "namespace": mesh.namespace, "labels": _LABELS}
    return {"apiVersion": f"{group}.istio.io/{version}", "kind": kind, "metadata": metadata, "spec": spec}


def _external(sidecar: SocketAddress, log: SocketAddress, mesh: Mesh) -> dict[str, Any]:
    """A sidecar outside the cluster, which the mesh does not know by itself."""
    ports = [{"name": f"grpc-{what}", "number": each.port, "protocol": "GRPC"} for what, each in (("ext-proc", sidecar), ("log", log))]
    entry: dict[str, Any] = {"hosts": [sidecar.host], "ports": ports, "location": "MESH_EXTERNAL", "resolution": "DNS"}
    if sidecar.is_ip:
        entry |= {
            "hosts": ["din-extproc.internal"],
            "addresses": [sidecar.host],
            "resolution": "STATIC",
            "endpoints": [{"address": sidecar.host}],
        }
    return _resource("ServiceEntry", "v1", "din-extproc", mesh, entry)


def _sidecar_rule(host: str, mesh: Mesh) -> dict[str, Any]:
    """A worker that refuses connections has no requests open and would attract all: it is left out at its first failure."""
    policy = {
        "loadBalancer": {"simple": "LEAST_REQUEST"},
        "connectionPool": {"tcp": {"connectTimeout": "0.25s"}, "http": {"h2UpgradePolicy": "UPGRADE"}},
        "outlierDetection": {
            "splitExternalLocalOriginErrors": True,
            "consecutiveLocalOriginFailures": 1,
            "consecutive5xxErrors": 0,
            "interval": "0.1s",
            "baseEjectionTime": "0.2s",
            "maxEjectionPercent": 100,
            "minHealthPercent": 0,
        },
    }
    return _resource("DestinationRule", "v1", "din-extproc", mesh, {"host": host, "trafficPolicy": policy})


def _host_entry(mesh: Mesh) -> dict[str, Any]:
    """The host for clients inside: there is nothing behind it but what the patches put there."""
    port = {"name": "http", "number": mesh.port, "protocol": "HTTP"}
    entry = {"hosts": [mesh.host], "ports": [port], "location": "MESH_EXTERNAL", "resolution": "NONE", "addresses": ["240.240.0.10"]}
    return _resource("ServiceEntry", "v1", "din", mesh, entry)


def _request_authentication(topology: Topology, mesh: Mesh) -> dict[str, Any]:
    """Verify tokens. Istio refuses those that are invalid, at all hosts of the proxies; patches let them through to the sidecar at ours."""
    rules = []
    for issuer in topology.identity.jwt:
        keys = keys_for_cluster(issuer)
        source = {"jwksUri": keys.url} if isinstance(keys, RemoteJwks) else {"jwks": keys.text}
        header = {"name": "authorization", "prefix": "Bearer "}
        rules.append({"issuer": issuer.issuer, "audiences": list(issuer.audiences), **source, "fromHeaders": [header]})
    spec = {"selector": {"matchLabels": dict(mesh.selector)}, "jwtRules": rules}
    return _resource("RequestAuthentication", "v1", "din", mesh, spec, group="security")


def _virtual_service(mesh: Mesh) -> dict[str, Any]:
    """Opens the host. Its own route is the last one, behind those that the patches put before it, and leads nowhere."""
    gateway = "mesh" if mesh.mode == "sidecar" else mesh.gateway
    spec = {"hosts": [mesh.host], "gateways": [gateway], "http": [{"name": "din-closed", "directResponse": {"status": _UNAVAILABLE}}]}
    return _resource("VirtualService", "v1", "din", mesh, spec)


def _envoy_filter(topology: Topology, mesh: Mesh, sidecar: SocketAddress, log: SocketAddress) -> dict[str, Any]:
    names = {EXT_PROC_CLUSTER: _mesh_cluster(sidecar), ACCESS_LOG_CLUSTER: _mesh_cluster(log)}
    patches = [renamed(patch, names) for patch in _patches(topology, mesh)]
    spec = {"workloadSelector": {"labels": dict(mesh.selector)}, "configPatches": patches}
    return _resource("EnvoyFilter", "v1alpha3", "din", mesh, spec)


def _host(service: SocketAddress) -> str:
    return _NAMELESS if service.is_ip else service.host


def _mesh_cluster(service: SocketAddress) -> str:
    """Return Istio's name of the cluster of a service's port."""
    return f"outbound|{service.port}||{_host(service)}"


def _patches(topology: Topology, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Clusters first: Istio rejects a route to an unknown cluster."""
    context = "GATEWAY" if mesh.mode == "gateway" else "SIDECAR_OUTBOUND"
    for cluster in build_pool_clusters(topology):
        yield {"applyTo": "CLUSTER", "match": {"context": context}, "patch": {"operation": "ADD", "value": to_plain(cluster)}}
    for listener in describe_listeners(topology):
        yield {"applyTo": "LISTENER", "match": {"context": context}, "patch": {"operation": "ADD", "value": listener}}
    yield _patch("LISTENER", _on_port(context, mesh), "MERGE", {"per_connection_buffer_limit_bytes": compute_held_bytes(topology)})
    manager = {name: value for name, value in to_plain(build_connection_manager(topology)).items() if name not in _LIFTED}
    typed = {"@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager", **manager}
    yield _patch("NETWORK_FILTER", _on_filter(context, mesh), "MERGE", {"name": _MANAGER, "typed_config": typed})
    *before, router = [to_plain(each) for each in build_http_filters(topology) if each.name not in {"envoy.filters.http.cors", JWT_AUTHN}]
    for each in before:
        yield _patch("HTTP_FILTER", _on_filter(context, mesh, _ROUTER), "INSERT_BEFORE", each)
    yield _patch("HTTP_FILTER", _on_filter(context, mesh, _ROUTER), "MERGE", router)
    [host] = to_plain(build_route_configuration(topology))["virtual_hosts"]
    if topology.identity.jwt:
        lenient = {"@type": f"{_JWT}.JwtAuthentication", "requirement_map": {_LENIENT: {"allow_missing_or_failed": {}}}}
        yield _patch("HTTP_FILTER", _on_filter(context, mesh, JWT_AUTHN), "MERGE", {"name": JWT_AUTHN, "typed_config": lenient})
        own = {JWT_AUTHN: {"@type": f"{_JWT}.PerRouteConfig", "requirement_name": _LENIENT}}
        host["typed_per_filter_config"] = host.get("typed_per_filter_config", {}) | own
    where = {"context": context, "routeConfiguration": {"vhost": {"name": f"{mesh.host}:{mesh.port}"}}}
    if "typed_per_filter_config" in host:
        yield _patch("VIRTUAL_HOST", where, "MERGE", {"typed_per_filter_config": host["typed_per_filter_config"]})
    for route in reversed(host["routes"]):
        yield _patch("HTTP_ROUTE", where, "INSERT_FIRST", route)


def _patch(what: str, match: dict[str, Any], operation: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"applyTo": what, "match": match, "patch": {"operation": operation, "value": value}}


def _on_port(context: str, mesh: Mesh) -> dict[str, Any]:
    return {"context": context, "listener": {"portNumber": mesh.port}}


def _on_filter(context: str, mesh: Mesh, inner: str = "") -> dict[str, Any]:
    chain: dict[str, Any] = {"filter": {"name": _MANAGER, **({"subFilter": {"name": inner}} if inner else {})}}
    return {"context": context, "listener": {"portNumber": mesh.port, "filterChain": chain}}

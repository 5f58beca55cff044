"""A topology as Envoy Gateway's resources: what its own kinds can say in its own words, the rest as patches of what it makes of them.

Invariant: a patch finds its place by name, never by position. Importing this module takes seconds, like `bootstrap`.

Needs `extensionApis.enableEnvoyPatchPolicy` and `enableBackend` in the configuration of Envoy Gateway.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.control.access_log import LOG_NAME, REQUEST_HEADERS, RESPONSE_HEADERS
from din_extproc.control.break_limit import limits_breaks
from din_extproc.control.clusters import ENDPOINT_HEADER, build_discovered_pair, build_discovered_pool
from din_extproc.control.endpoint_metadata import NAMESPACE, make_endpoint_metadata
from din_extproc.control.filters import EXT_PROC, HEALTH_CHECK, METADATA_NAMESPACE, build_http_filters
from din_extproc.control.jwt import keys_for_cluster
from din_extproc.control.listener import build_connection_manager, compute_held_bytes
from din_extproc.control.packing import renamed, to_plain
from din_extproc.control.routes import ALLOWED, CLUSTER_HEADER, EXPOSED, METHODS, UNDECIDED, build_node_headers, removed_headers
from din_extproc.control.topology import EXT_PROC_CLUSTER, Address, HealthCheck, Outlier, SocketAddress, Topology
from din_extproc.domain.identity import JWT_AUTHN, JwtIssuer, RemoteJwks
from din_extproc.domain.node import Pool, in_flight_cluster

_OWN, _STANDARD = "gateway.envoyproxy.io", "gateway.networking.k8s.io"
_LABELS = {"app.kubernetes.io/name": "din-extproc"}
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,240}[a-z0-9])?").fullmatch
_MANAGER = "..filters[?(@.name=='envoy.filters.network.http_connection_manager')].typed_config"
_FROM_STANDALONE = ("common_http_protocol_options", "early_header_mutation_extensions", "http_protocol_options", "local_reply_config")
"""Parts of the connection manager that its own kinds can't say."""
_PROCESSING = ("mutation_rules", "max_message_timeout")
_HTTP2 = "gateway.envoyproxy.io/h2c"


class Placement(Struct, frozen=True, kw_only=True):
    """Names and namespaces in the Kubernetes cluster."""

    namespace: str
    """Of the resources, and of the Gateway."""
    host: str
    """That clients call."""
    gateway: str
    """The Gateway that the host joins."""
    listener: str = "http"
    """Its listener."""

    @property
    def listener_path(self) -> str:
        """Return Envoy Gateway's name of the listener and its routes."""
        return f"{self.namespace}/{self.gateway}/{self.listener}"


def build_envoy_gateway(topology: Topology, placement: Placement) -> list[dict[str, Any]]:
    """The manifests.

    Raises:
        ValueError: a part of the topology has no place in a cluster.
    """
    topology = replace(topology, fluentd_log=False)
    _check(topology)
    manifests = [*_proxy(topology), _clients(topology, placement), *_sidecar(topology)]
    for way in _ways(topology):
        manifests += [*way.backends(), _route(way.name, placement, way, removed_headers(topology)), _traffic(way, topology)]
    manifests.append(_route("din-closed", placement))
    security = _security(topology)
    if security:
        manifests.append(_resource(_OWN, "SecurityPolicy", "din", {"targetSelectors": [_our_routes()], **security}))
    manifests += [_extension(topology), _patches(topology, placement)]
    for manifest in manifests:
        manifest["metadata"] |= {"namespace": placement.namespace}
    return manifests


def _check(topology: Topology) -> None:
    for address in (*topology.ext_proc, topology.access_log):
        if not isinstance(address, SocketAddress) or address.is_loopback:
            raise ValueError(
                "set `gateway.reached_at`, the host under which the cluster reaches this sidecar, and `gateway.ext_proc.address`"
            )
    if topology.fail_open_pool is not None:
        raise ValueError("`fail_open`: Envoy Gateway's routes can't tell undecided from refused requests; use `render envoy`")
    for pool in topology.pools:
        if pool.is_remote:
            raise ValueError(f"pool {pool.name}: Envoy Gateway has no place for the listeners of hosted APIs; use `render envoy`")
        if not pool.nodes:
            raise ValueError(f"pool {pool.name}: only nodes that din.yaml lists are rendered; those that register need `gateway.xds`")
        if _NAME(pool.name) is None:
            raise ValueError(f"pool {pool.name}: a Kubernetes name has lower-case letters, digits, '-' and '.' only; rename the pool")
    ways = [way.name for way in _ways(topology)]
    if len(set(ways)) < len(ways):
        raise ValueError("pools: two pairs of a pool and its fallback get the same resource name; rename them without dots")


class _Way(Struct, frozen=True):
    """A destination of requests: a pool, or a pool with its fallback pool."""

    pool: Pool
    fallback: Pool | None = None

    @property
    def name(self) -> str:
        """Of its resources. Those of a pool alone have no dot behind `din`."""
        return f"din-{self.pool.name}" if self.fallback is None else f"din.{self.pool.name}.{self.fallback.name}"

    @property
    def cluster(self) -> str:
        """As the sidecar says it."""
        return self.pool.name if self.fallback is None else in_flight_cluster(self.pool.name, self.fallback.name)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """In the order in which they are asked."""
        return (self.pool,) if self.fallback is None else (self.pool, self.fallback)

    def backends(self) -> Iterator[dict[str, Any]]:
        """Its own: the second one of a pair is marked as what takes over, which gives its nodes the next priority."""
        pool = self.pools[-1]
        endpoints = [_at(SocketAddress(node.endpoint.host, node.endpoint.port)) for node in pool.nodes]
        spec: dict[str, Any] = {"endpoints": endpoints}
        yield _resource(_OWN, "Backend", self.name, spec if self.fallback is None else {**spec, "fallback": True})

    def backend_refs(self) -> list[dict[str, Any]]:
        """In the order in which they are asked."""
        return [_backend_ref(name) for name in dict.fromkeys((_Way(self.pool).name, self.name))]


def _ways(topology: Topology) -> list[_Way]:
    pools = {pool.name: pool for pool in topology.pools}
    return [*map(_Way, topology.pools), *(_Way(pools[pool], pools[fallback]) for pool, fallback in topology.moves)]


def _resource(group: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = "v1" if group == _STANDARD else "v1alpha1"
    return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name, "labels": _LABELS}, "spec": spec}


def _duration(milliseconds: int) -> str:
    """In the API's own spelling, of five digits a unit."""
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds // 1000}s{milliseconds % 1000}ms"


def _at(address: Address) -> dict[str, Any]:
    if not isinstance(address, SocketAddress):
        raise TypeError(address)
    return (
        {"ip": {"address": address.host, "port": address.port}}
        if address.is_ip
        else {"fqdn": {"hostname": address.host, "port": address.port}}
    )


def _sidecar(topology: Topology) -> Iterator[dict[str, Any]]:
    workers = [_at(address) for address in topology.ext_proc]
    yield _resource(_OWN, "Backend", "din-extproc", {"endpoints": workers, "appProtocols": [_HTTP2]})
    if topology.access_log is not None:
        yield _resource(_OWN, "Backend", "din-log", {"endpoints": [_at(topology.access_log)], "appProtocols": [_HTTP2]})


def _proxy(topology: Topology) -> Iterator[dict[str, Any]]:
    """Refer to it from the Gateway (`infrastructure.parametersRef`): finished exchanges are logged to the sidecar, and counted in order."""
    sink = {
        "type": "ALS",
        "als": {
            "type": "HTTP",
            "logName": LOG_NAME,
            "backendRefs": [_backend_ref("din-log")],
            "http": {"requestHeaders": REQUEST_HEADERS, "responseHeaders": RESPONSE_HEADERS},
        },
    }
    order = [{"name": "envoy.filters.http.lua", "before": EXT_PROC}]
    telemetry = {"accessLog": {"settings": [{"sinks": [sink]}]}} if topology.access_log is not None else {}
    yield _resource(_OWN, "EnvoyProxy", "din", {"filterOrder": order, "telemetry": telemetry})


def _backend_ref(name: str) -> dict[str, Any]:
    return {"group": _OWN, "kind": "Backend", "name": name}


def _clients(topology: Topology, placement: Placement) -> dict[str, Any]:
    target = {"group": _STANDARD, "kind": "Gateway", "name": placement.gateway, "sectionName": placement.listener}
    waits = {
        "requestReceivedTimeout": _duration(topology.timeouts.request_ms),
        "requestHeadersReceivedTimeout": "10s",
        "streamIdleTimeout": _duration(topology.timeouts.stream_idle_ms),
    }
    spec: dict[str, Any] = {
        "targetRefs": [target],
        "connection": {"bufferLimit": str(compute_held_bytes(topology)), "connectionLimit": {"value": topology.max_connections}},
        "headers": {"withUnderscoresAction": "DropHeader", "requestID": "Generate"},
        "path": {"escapedSlashesAction": "KeepUnchanged", "disableMergeSlashes": True},
        "http2": {
            "initialStreamWindowSize": str(compute_held_bytes(topology)),
            "initialConnectionWindowSize": str(compute_held_bytes(topology)),
        },
        "timeout": {"http": waits},
    }
    gateway = topology.identity.gateway
    if gateway is not None and gateway.client_certificate:
        spec["headers"]["xForwardedClientCert"] = {"mode": "AlwaysForwardOnly" if gateway.networks else "ForwardOnly"}
    if topology.health_path is not None:
        spec["healthCheck"] = {"path": topology.health_path}
    return _resource(_OWN, "ClientTrafficPolicy", "din", spec)


def _route(name: str, placement: Placement, way: _Way | None = None, removed: Sequence[str] = ()) -> dict[str, Any]:
    """To nodes, for a request that the sidecar sent there; without one, where a request stands until then.

    The endpoint's header stays on: it is read when a node is picked, after a route's own removals. (A pair's cluster takes it off.)
    """
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/"}}
    rule: dict[str, Any] = {"matches": [match]}
    if way is None:
        rule["backendRefs"] = [_backend_ref("din-extproc")]  # never asked: a patch makes a way that leads nowhere of it
    else:
        match["headers"] = [{"type": "Exact", "name": CLUSTER_HEADER, "value": way.cluster}]
        rule["filters"] = [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": list(removed)}}]
        rule["backendRefs"] = way.backend_refs()
    parent = {"name": placement.gateway, "sectionName": placement.listener}
    return _resource(_STANDARD, "HTTPRoute", name, {"parentRefs": [parent], "hostnames": [placement.host], "rules": [rule]})


def _traffic(way: _Way, topology: Topology) -> dict[str, Any]:
    """A pair's requests name their nodes, so that its health is asked in the pools' own clusters alone."""
    retry, check = topology.retry, topology.health_check if way.fallback is None else None
    jitter = _duration(retry.jitter_ms)
    spec: dict[str, Any] = {
        "targetRefs": [{"group": _STANDARD, "kind": "HTTPRoute", "name": way.name}],
        "loadBalancer": {"type": "LeastRequest", "endpointOverride": {"extractFrom": [{"header": ENDPOINT_HEADER}]}},
        "retry": {
            "numRetries": retry.attempts if way.fallback is None else retry.tries,
            "retryOn": {
                "triggers": ["connect-failure", "refused-stream", "reset", "retriable-status-codes"],
                "httpStatusCodes": list(retry.statuses),
            },
            "perRetry": {"backOff": {"baseInterval": jitter, "maxInterval": jitter}},
        },
        "timeout": {
            "tcp": {"connectTimeout": _duration(topology.timeouts.connect_ms)},
            "http": {"requestTimeout": _duration(topology.timeouts.total_ms), "connectionIdleTimeout": "4s"},
        },
        "circuitBreaker": dict.fromkeys(("maxConnections", "maxPendingRequests", "maxParallelRequests", "maxParallelRetries"), 1 << 20),
        "healthCheck": {
            "panicThreshold": 0,
            **({} if check is None else {"active": _health_check(check, way.pool)}),
            **({} if topology.outlier is None else {"passive": _watched(topology.outlier)}),
        },
    }
    return _resource(_OWN, "BackendTrafficPolicy", way.name, spec)


def _health_check(check: HealthCheck, pool: Pool) -> dict[str, Any]:
    return {
        "type": "HTTP",
        "http": {"path": check.engine_paths.get(pool.engine, check.path)},
        "interval": _duration(check.interval_ms),
        "timeout": _duration(check.timeout_ms),
        "unhealthyThreshold": check.unhealthy_after,
        "healthyThreshold": check.healthy_after,
    }


def _watched(outlier: Outlier) -> dict[str, Any]:
    return {
        "splitExternalLocalOriginErrors": True,
        "consecutiveLocalOriginFailures": outlier.consecutive_connect_failures,
        "consecutive5XxErrors": 0,
        "consecutiveGatewayErrors": 0,
        "interval": _duration(outlier.interval_ms),
        "baseEjectionTime": _duration(outlier.base_ejection_ms),
        "maxEjectionPercent": outlier.max_ejection_percent,
    }


def _security(topology: Topology) -> dict[str, Any]:
    """Return the spec of the SecurityPolicy of our routes; only one may apply to a route."""
    cors = {"cors": _cors(topology)} if topology.cors_origins else {}
    return cors | ({"jwt": _jwt(topology.identity.jwt)} if topology.identity.jwt else {})


def _jwt(issuers: Sequence[JwtIssuer]) -> dict[str, Any]:
    """Verify tokens, and leave every refusal to the sidecar: API keys come in the same header."""
    header = {"name": "authorization", "valuePrefix": "Bearer "}
    providers = []
    for index, issuer in enumerate(issuers):
        keys = keys_for_cluster(issuer)
        if isinstance(keys, RemoteJwks):
            source: dict[str, Any] = {"remoteJWKS": {"uri": keys.url, "cacheDuration": f"{keys.cache_s}s"}}
        else:
            source = {"localJWKS": {"type": "Inline", "inline": keys.text}}
        audience = {"issuer": issuer.issuer, "audiences": list(issuer.audiences)}
        providers.append({"name": f"din-{index}", **audience, **source, "extractFrom": {"headers": [header]}})
    return {"failOpen": True, "providers": providers}


def _cors(topology: Topology) -> dict[str, Any]:
    return {
        "allowOrigins": list(topology.cors_origins),
        "allowMethods": METHODS.split(","),
        "allowHeaders": list(ALLOWED),
        "exposeHeaders": list(EXPOSED),
        "maxAge": "600s",
    }


def _our_routes() -> dict[str, Any]:
    return {"group": _STANDARD, "kind": "HTTPRoute", "matchLabels": _LABELS}


def _extension(topology: Topology) -> dict[str, Any]:
    processor: dict[str, Any] = {
        "backendRefs": [_backend_ref("din-extproc")],
        "messageTimeout": _duration(topology.timeouts.message_ms),
        "failOpen": True,
        "processingMode": {"request": {"body": "Buffered"}, "allowModeOverride": True},
        "metadata": {"writableNamespaces": [METADATA_NAMESPACE]},
    }
    if topology.identity.attributes:
        processor["processingMode"]["request"]["attributes"] = list(topology.identity.attributes)
    if topology.identity.jwt:
        processor["metadata"]["accessibleNamespaces"] = [JWT_AUTHN]
    spec: dict[str, Any] = {"targetSelectors": [_our_routes()], "extProc": [processor]}
    if topology.usage_lua:
        spec["lua"] = [{"type": "Inline", "inline": topology.usage_lua}]
    return _resource(_OWN, "EnvoyExtensionPolicy", "din", spec)


def _patches(topology: Topology, placement: Placement) -> dict[str, Any]:
    target = {"group": _STANDARD, "kind": "Gateway", "name": placement.gateway}
    patches = [*_of_listener(topology, placement), *_of_routes(placement), *_of_nodes(topology, placement)]
    return _resource(_OWN, "EnvoyPatchPolicy", "din", {"targetRef": target, "type": "JSONPatch", "jsonPatches": patches})


def _patch(kind: str, name: str, place: str, path: str, value: Any) -> dict[str, Any]:
    operation = {"op": "add", **({"jsonPath": place} if place else {}), "path": path, "value": value}
    return {"type": f"type.googleapis.com/envoy.config.{kind}", "name": name, "operation": operation}


def _of_listener(topology: Topology, placement: Placement) -> Iterator[dict[str, Any]]:
    """Return the patches for the listener's protection, and for settings of ext_proc that Envoy Gateway's own kinds don't have."""
    manager = to_plain(build_connection_manager(topology))
    for part in _FROM_STANDALONE:
        yield _patch("listener.v3.Listener", placement.listener_path, _MANAGER, f"/{part}", manager[part])
    [extension] = [to_plain(each)["typed_config"] for each in build_http_filters(topology) if each.name == EXT_PROC]
    ours = f"..http_filters[?(@.name=='{EXT_PROC}/envoyextensionpolicy/{placement.namespace}/din/extproc/0')].typed_config"
    for part in _PROCESSING:
        yield _patch("listener.v3.Listener", placement.listener_path, ours, f"/{part}", extension[part])
    if topology.health_path is not None:
        health = f"..http_filters[?(@.name=='{HEALTH_CHECK}')].typed_config"
        yield _patch("listener.v3.Listener", placement.listener_path, health, "/pass_through_mode", True)


def _of_routes(placement: Placement) -> Iterator[dict[str, Any]]:
    """Patch the routes: headers with the responding node, and a route without a cluster for undecided requests.

    It is a way and no answer of Envoy's own, because CORS holds for ways only.
    """
    host = placement.host.replace(".", "_")
    virtual_host = f"..virtual_hosts[?(@.name=='{placement.listener_path}/{host}')]"
    node_headers = [to_plain(each) for each in build_node_headers()]
    yield _patch("route.v3.RouteConfiguration", placement.listener_path, virtual_host, "/response_headers_to_add", node_headers)
    closed = f"..routes[?(@.name=='httproute/{placement.namespace}/din-closed/rule/0/match/0/{host}')]"
    yield _patch("route.v3.RouteConfiguration", placement.listener_path, closed, "/route", {"cluster_header": CLUSTER_HEADER})
    yield _patch("route.v3.RouteConfiguration", placement.listener_path, closed, "/name", UNDECIDED)


def _of_nodes(topology: Topology, placement: Placement) -> Iterator[dict[str, Any]]:
    sidecar = f"envoyextensionpolicy/{placement.namespace}/din/extproc/0"
    for way in _ways(topology):
        cluster = f"httproute/{placement.namespace}/{way.name}/rule/0"
        ours = None
        if way.fallback is not None:
            ours = build_discovered_pair(way.pool, way.fallback, topology)
        elif limits_breaks(topology, moves=False):
            ours = build_discovered_pool(way.pool, topology)
        if ours is not None:
            options = renamed(to_plain(ours)["typed_extension_protocol_options"], {EXT_PROC_CLUSTER: sidecar})
            yield _patch("cluster.v3.Cluster", cluster, "", "/typed_extension_protocol_options", options)
        for pool, node in ((each, node) for each in way.pools for node in each.nodes):
            address = "@.endpoint.address.socket_address"
            this = f"{address}.address=='{node.endpoint.host}' && {address}.port_value=={node.endpoint.port}"
            facts = {"filter_metadata": {NAMESPACE: make_endpoint_metadata(node, pool.name, fail_open=False)}}
            yield _patch("endpoint.v3.ClusterLoadAssignment", cluster, f"..lb_endpoints[?({this})]", "/metadata", facts)

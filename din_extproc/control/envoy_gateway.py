"""A topology as Envoy Gateway's resources: what its own kinds can say in its own words, the rest as patches of what it makes of them.

Invariant: a patch finds its place by name, never by position. Importing this module takes seconds, like `bootstrap`.

Needs `extensionApis.enableEnvoyPatchPolicy` and `enableBackend` in the configuration of Envoy Gateway.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.control.access_log import LOG_NAME, REQUEST_HEADERS, RESPONSE_HEADERS
from din_extproc.control.break_limit import limits_breaks
from din_extproc.control.clusters import ENDPOINT_HEADER, build_discovered_pair, build_discovered_pool
from din_extproc.control.endpoint_metadata import NAMESPACE, make_endpoint_metadata
from din_extproc.control.envoy_gateway_egress import (
    check_hosts,
    describe_endpoint,
    describe_hosts,
    describe_listeners,
    describe_proxy,
    find_placeholder,
    make_placeholder,
)
from din_extproc.control.envoy_gateway_security import describe_security
from din_extproc.control.filters import EXT_PROC, HEALTH_CHECK, METADATA_NAMESPACE, build_http_filters
from din_extproc.control.gateway_resources import (
    LABELS,
    NO_LIMITS,
    OWN,
    STANDARD,
    format_duration,
    make_address,
    make_patch,
    make_resource,
    make_target,
)
from din_extproc.control.listener import build_connection_manager, compute_held_bytes
from din_extproc.control.packing import renamed, to_plain
from din_extproc.control.routes import CLUSTER_HEADER, UNDECIDED, build_node_headers, removed_headers
from din_extproc.control.topology import EXT_PROC_CLUSTER, HealthCheck, Outlier, SocketAddress, Topology
from din_extproc.domain.identity import JWT_AUTHN
from din_extproc.domain.node import Node, Pool, in_flight_cluster

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

    @property
    def parent(self) -> dict[str, str]:
        """How a route refers to the listener."""
        return {"name": self.gateway, "sectionName": self.listener}


def build_envoy_gateway(topology: Topology, placement: Placement, authorities: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The manifests.

    Args:
        topology: What is rendered.
        placement: Where in the cluster.
        authorities: The certificates of hosted APIs' authorities, PEM, by the name of their file.

    Raises:
        ValueError: a part of the topology has no place in a cluster.
    """
    topology = replace(topology, fluentd_log=False)
    _check(topology)
    manifests = [*_proxy(topology), _clients(topology, placement), *_sidecar(topology)]
    for way in _ways(topology):
        manifests += [*way.backends(), _route(way.name, placement, way, removed_headers(topology)), _traffic(way, topology)]
    manifests.append(_route("din-closed", placement))
    manifests += describe_hosts(topology, placement.parent, placement.host, authorities or {})
    security = describe_security(topology)
    if security:
        manifests.append(make_resource(OWN, "SecurityPolicy", "din", {"targetSelectors": [_our_routes()], **security}))
    manifests += [_extension(topology), _patches(topology, placement)]
    _check_names(manifests)
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
        if not pool.nodes:
            raise ValueError(f"pool {pool.name}: only nodes that din.yaml lists are rendered; those that register need `gateway.xds`")
        if _NAME(pool.name) is None:
            raise ValueError(f"pool {pool.name}: a Kubernetes name has lower-case letters, digits, '-' and '.' only; rename the pool")
    check_hosts(topology)


def _check_names(manifests: Sequence[Mapping[str, Any]]) -> None:
    for (kind, name), count in Counter((each["kind"], each["metadata"]["name"]) for each in manifests).items():
        if count > 1:
            raise ValueError(f"the names of two pools or nodes give the same {kind} {name}; rename one of them, and take the dots out")


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
        spec: dict[str, Any] = {"endpoints": [_endpoint(node) for node in self.pools[-1].nodes]}
        yield make_resource(OWN, "Backend", self.name, spec if self.fallback is None else {**spec, "fallback": True})

    def backend_refs(self) -> list[dict[str, Any]]:
        """In the order in which they are asked."""
        return [make_target("Backend", name, OWN) for name in dict.fromkeys((_Way(self.pool).name, self.name))]


def _ways(topology: Topology) -> list[_Way]:
    pools = {pool.name: pool for pool in topology.pools}
    return [*map(_Way, topology.pools), *(_Way(pools[pool], pools[fallback]) for pool, fallback in topology.moves)]


def _endpoint(node: Node) -> dict[str, Any]:
    if node.remote is not None:
        return make_placeholder(node, node.remote)
    return make_address(SocketAddress(node.endpoint.host, node.endpoint.port))


def _sidecar(topology: Topology) -> Iterator[dict[str, Any]]:
    workers = [make_address(address) for address in topology.ext_proc]
    yield make_resource(OWN, "Backend", "din-extproc", {"endpoints": workers, "appProtocols": [_HTTP2]})
    if topology.access_log is not None:
        yield make_resource(OWN, "Backend", "din-log", {"endpoints": [make_address(topology.access_log)], "appProtocols": [_HTTP2]})


def _proxy(topology: Topology) -> Iterator[dict[str, Any]]:
    """Refer to it from the Gateway (`infrastructure.parametersRef`): finished exchanges are logged to the sidecar, and counted in order."""
    sink = {
        "type": "ALS",
        "als": {
            "type": "HTTP",
            "logName": LOG_NAME,
            "backendRefs": [make_target("Backend", "din-log", OWN)],
            "http": {"requestHeaders": REQUEST_HEADERS, "responseHeaders": RESPONSE_HEADERS},
        },
    }
    order = [{"name": "envoy.filters.http.lua", "before": EXT_PROC}]
    telemetry = {"accessLog": {"settings": [{"sinks": [sink]}]}} if topology.access_log is not None else {}
    yield make_resource(OWN, "EnvoyProxy", "din", {"filterOrder": order, "telemetry": telemetry, **describe_proxy(topology)})


def _clients(topology: Topology, placement: Placement) -> dict[str, Any]:
    target = {**make_target("Gateway", placement.gateway), "sectionName": placement.listener}
    waits = {
        "requestReceivedTimeout": format_duration(topology.timeouts.request_ms),
        "requestHeadersReceivedTimeout": "10s",
        "streamIdleTimeout": format_duration(topology.timeouts.stream_idle_ms),
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
    return make_resource(OWN, "ClientTrafficPolicy", "din", spec)


def _route(name: str, placement: Placement, way: _Way | None = None, removed: Sequence[str] = ()) -> dict[str, Any]:
    """To nodes, for a request that the sidecar sent there; without one, where a request stands until then.

    The endpoint's header stays on: it is read when a node is picked, after a route's own removals. (A pair's cluster takes it off.)
    """
    match: dict[str, Any] = {"path": {"type": "PathPrefix", "value": "/"}}
    rule: dict[str, Any] = {"matches": [match]}
    if way is None:
        rule["backendRefs"] = [make_target("Backend", "din-extproc", OWN)]  # never asked: a patch makes a way that leads nowhere of it
    else:
        match["headers"] = [{"type": "Exact", "name": CLUSTER_HEADER, "value": way.cluster}]
        rule["filters"] = [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": list(removed)}}]
        rule["backendRefs"] = way.backend_refs()
    return make_resource(STANDARD, "HTTPRoute", name, {"parentRefs": [placement.parent], "hostnames": [placement.host], "rules": [rule]})


def _traffic(way: _Way, topology: Topology) -> dict[str, Any]:
    """A pair's requests name their nodes, so that its health is asked in the pools' own clusters alone; a hosted API is not asked."""
    retry, check = topology.retry, topology.health_check if way.fallback is None and not way.pool.is_remote else None
    jitter = format_duration(retry.jitter_ms)
    spec: dict[str, Any] = {
        "targetRefs": [make_target("HTTPRoute", way.name)],
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
            "tcp": {"connectTimeout": format_duration(topology.timeouts.connect_ms)},
            "http": {"requestTimeout": format_duration(topology.timeouts.total_ms), "connectionIdleTimeout": "4s"},
        },
        "circuitBreaker": NO_LIMITS,
        "healthCheck": {
            "panicThreshold": 0,
            **({} if check is None else {"active": _health_check(check, way.pool)}),
            **({} if topology.outlier is None else {"passive": _watched(topology.outlier)}),
        },
    }
    return make_resource(OWN, "BackendTrafficPolicy", way.name, spec)


def _health_check(check: HealthCheck, pool: Pool) -> dict[str, Any]:
    return {
        "type": "HTTP",
        "http": {"path": check.engine_paths.get(pool.engine, check.path)},
        "interval": format_duration(check.interval_ms),
        "timeout": format_duration(check.timeout_ms),
        "unhealthyThreshold": check.unhealthy_after,
        "healthyThreshold": check.healthy_after,
    }


def _watched(outlier: Outlier) -> dict[str, Any]:
    return {
        "splitExternalLocalOriginErrors": True,
        "consecutiveLocalOriginFailures": outlier.consecutive_connect_failures,
        "consecutive5XxErrors": 0,
        "consecutiveGatewayErrors": 0,
        "interval": format_duration(outlier.interval_ms),
        "baseEjectionTime": format_duration(outlier.base_ejection_ms),
        "maxEjectionPercent": outlier.max_ejection_percent,
    }


def _our_routes() -> dict[str, Any]:
    return {"group": STANDARD, "kind": "HTTPRoute", "matchLabels": LABELS}


def _extension(topology: Topology) -> dict[str, Any]:
    processor: dict[str, Any] = {
        "backendRefs": [make_target("Backend", "din-extproc", OWN)],
        "messageTimeout": format_duration(topology.timeouts.message_ms),
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
    return make_resource(OWN, "EnvoyExtensionPolicy", "din", spec)


def _patches(topology: Topology, placement: Placement) -> dict[str, Any]:
    patches = [*_of_listener(topology, placement), *describe_listeners(topology, placement.namespace)]
    patches += [*_of_routes(placement), *_of_nodes(topology, placement)]
    target = make_target("Gateway", placement.gateway)
    return make_resource(OWN, "EnvoyPatchPolicy", "din", {"targetRef": target, "type": "JSONPatch", "jsonPatches": patches})


def _of_listener(topology: Topology, placement: Placement) -> Iterator[dict[str, Any]]:
    """Return the patches for the listener's protection, and for settings of ext_proc that Envoy Gateway's own kinds don't have."""
    manager = to_plain(build_connection_manager(topology))
    for part in _FROM_STANDALONE:
        yield make_patch("listener.v3.Listener", placement.listener_path, _MANAGER, f"/{part}", manager[part])
    [extension] = [to_plain(each)["typed_config"] for each in build_http_filters(topology) if each.name == EXT_PROC]
    ours = f"..http_filters[?(@.name=='{EXT_PROC}/envoyextensionpolicy/{placement.namespace}/din/extproc/0')].typed_config"
    for part in _PROCESSING:
        yield make_patch("listener.v3.Listener", placement.listener_path, ours, f"/{part}", extension[part])
    if topology.health_path is not None:
        health = f"..http_filters[?(@.name=='{HEALTH_CHECK}')].typed_config"
        yield make_patch("listener.v3.Listener", placement.listener_path, health, "/pass_through_mode", True)


def _of_routes(placement: Placement) -> Iterator[dict[str, Any]]:
    """Patch the routes: headers with the responding node, and a route without a cluster for undecided requests.

    It is a way and no answer of Envoy's own, because CORS holds for ways only.
    """
    host = placement.host.replace(".", "_")
    virtual_host = f"..virtual_hosts[?(@.name=='{placement.listener_path}/{host}')]"
    node_headers = [to_plain(each) for each in build_node_headers()]
    yield make_patch("route.v3.RouteConfiguration", placement.listener_path, virtual_host, "/response_headers_to_add", node_headers)
    closed = f"..routes[?(@.name=='httproute/{placement.namespace}/din-closed/rule/0/match/0/{host}')]"
    yield make_patch("route.v3.RouteConfiguration", placement.listener_path, closed, "/route", {"cluster_header": CLUSTER_HEADER})
    yield make_patch("route.v3.RouteConfiguration", placement.listener_path, closed, "/name", UNDECIDED)


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
            yield make_patch("cluster.v3.Cluster", cluster, "", "/typed_extension_protocol_options", options)
        for pool, node in ((each, node) for each in way.pools for node in each.nodes):
            facts = {"filter_metadata": {NAMESPACE: make_endpoint_metadata(node, pool.name, fail_open=False)}}
            found = f"..lb_endpoints[?({_condition(node)})]"
            yield make_patch("endpoint.v3.ClusterLoadAssignment", cluster, found, "/metadata", facts)
            if node.remote is not None:  # last: it is found by what this replaces
                yield make_patch("endpoint.v3.ClusterLoadAssignment", cluster, found, "/endpoint", describe_endpoint(node))


def _condition(node: Node) -> str:
    """Return the condition under which an endpoint of Envoy is the node."""
    if node.remote is not None:
        return find_placeholder(node)
    address = "@.endpoint.address.socket_address"
    return f"{address}.address=='{node.endpoint.host}' && {address}.port_value=={node.endpoint.port}"

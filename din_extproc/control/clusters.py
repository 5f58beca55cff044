"""Envoy's clusters: one for each pool and each pair of pools between which requests move, and those of the sidecar's services.

Invariant: a request goes to the node that the sidecar named, and to another of the same pool only when that one can't answer. Envoy does
not check the health of a named node: health checks and ejection here only limit the alternatives.
"""

from collections.abc import Iterable, Sequence

from envoy_data_plane.envoy.config.cluster.v3 import (
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as RuleMutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import Address as EnvoyAddress
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    EnvoyInternalAddress,
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    Metadata,
    TcpKeepalive,
    TransportSocket,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.core.v3 import HealthCheck as EnvoyHealthCheck
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    ClusterLoadAssignmentPolicy,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.load_balancing_policies.common.v3 import SlowStartConfig
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost, OverrideHostOverrideHostSource
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamProtocolOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as PackedAny
from envoy_data_plane.google.protobuf import Struct as ProtoStruct

from din_extproc.control.break_limit import TRIED, build_break_limit, limits_breaks
from din_extproc.control.endpoint_metadata import NAMESPACE, WHOLE_WITH_ONE, make_endpoint_metadata
from din_extproc.control.fallback_filters import build_fallback_filters
from din_extproc.control.packing import (
    make_address,
    make_ads_source,
    make_unlimited_circuit_breakers,
    overwrite_header,
    pack_extension,
    to_duration,
)
from din_extproc.control.topology import (
    ACCESS_LOG_CLUSTER,
    AGENT_CLUSTER,
    EXT_PROC_CLUSTER,
    XDS_CLUSTER,
    Address,
    HealthCheck,
    Outlier,
    SlowStart,
    SocketAddress,
    Topology,
)
from din_extproc.domain.node import ATTEMPT_POOL, Node, Pool, in_flight_cluster

ENDPOINT_HEADER = "x-din-endpoint"
_ONLY_OURS = ("x-din-", "x-bxagent-", "x-ratelimit-", "anthropic-ratelimit-", "x-envoy-")
"""Families of answers' headers that a client takes for the gateway's own word, or Envoy for a wish of the node."""
_STATED = (
    ("x-din-stated-node", "x-din-node-id", "node-stated-id"),
    ("x-din-stated-version", "x-din-model-version", "node-stated-version"),
)
"""Headers of a node's own Envoy: the gateway's name for each, the node's name, and the place where it is kept meanwhile."""
_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_NODE_KEEPALIVE_MS = 4_000
"""Below the five seconds after which uvicorn and cpp-httplib close an idle connection, so that no request meets the closing."""
_NODES_MS = 5_000
"""A cluster without news of its nodes is taken as empty after that. It must end: until then Envoy answers to no cluster at all."""
_WORKER_CHECK_MS = 100
_WORKER_EJECTION_MS = 200
_WORKER_CONNECT_MS = 250


def build_clusters(topology: Topology) -> list[Cluster]:
    """Those that Envoy starts with, the gateway's own first. Pools are among them unless they come by discovery."""
    own = [_make_ext_proc(topology.ext_proc)]
    if topology.access_log is not None:
        own.append(_make_service(ACCESS_LOG_CLUSTER, [topology.access_log]))
    if topology.agent is not None:
        own.append(_make_agent(topology.agent))
    if topology.discovery is not None:
        return [*own, _make_service(XDS_CLUSTER, [topology.discovery.address])]
    return own + build_pool_clusters(topology)


def build_pool_clusters(topology: Topology) -> list[Cluster]:
    """The pools with the nodes that are listed, and the pairs between which requests move in flight."""
    pools = {pool.name: pool for pool in topology.pools}
    pairs = [_make_static(in_flight_cluster(*pair), [pools[name] for name in pair], topology) for pair in topology.moves]
    return [*(_make_static(pool.name, [pool], topology) for pool in topology.pools), *pairs]


def build_discovered_pool(pool: Pool, topology: Topology) -> Cluster:
    """A pool whose nodes come by discovery."""
    return _make_discovered(_make_cluster(pool.name, [pool], topology))


def build_discovered_pair(pool: Pool, fallback: Pool, topology: Topology) -> Cluster:
    """A pool and the one that takes over, whose nodes come by discovery."""
    return _make_discovered(_make_cluster(in_flight_cluster(pool.name, fallback.name), [pool, fallback], topology))


def _make_discovered(cluster: Cluster) -> Cluster:
    """A node that is taken away is gone at once: by default Envoy keeps it for as long as its health checks succeed."""
    cluster.type = ClusterDiscoveryType.EDS
    cluster.eds_cluster_config = ClusterEdsClusterConfig(eds_config=make_ads_source(initial_fetch_timeout_ms=_NODES_MS))
    cluster.ignore_health_on_host_removal = True
    return cluster


def _make_static(name: str, pools: Sequence[Pool], topology: Topology) -> Cluster:
    """With the nodes that are listed; those of the pool that takes over have the next priority."""
    cluster = _make_cluster(name, pools, topology)
    cluster.type = ClusterDiscoveryType.STATIC
    nodes = [[_make_node_endpoint(node, pool, fail_open=pool.name == topology.fail_open_pool) for node in pool.nodes] for pool in pools]
    cluster.load_assignment = _make_assignment(name, *nodes)
    cluster.load_assignment.policy = ClusterLoadAssignmentPolicy(overprovisioning_factor=WHOLE_WITH_ONE)
    return cluster


def _make_cluster(name: str, pools: Sequence[Pool], topology: Topology) -> Cluster:
    """Build the cluster of a pool, or of a pool and its fallback pool, without its endpoints.

    Only the pool's own cluster checks the health of nodes: requests of a pair name their nodes, so that health does not matter there.
    """
    [pool, *others] = pools
    protocol = UpstreamProtocolOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=to_duration(_NODE_KEEPALIVE_MS)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
        http_filters=_build_attempt_filters(pool, others, topology),
    )
    return Cluster(
        name=name,
        connect_timeout=to_duration(topology.timeouts.connect_ms),
        load_balancing_policy=_make_override_host(topology.slow_start),
        common_lb_config=_make_only_healthy(),
        circuit_breakers=make_unlimited_circuit_breakers(),
        health_checks=[_make_health_check(topology.health_check, pool)]
        if topology.health_check and not others and not pool.is_remote
        else [],
        outlier_detection=_make_outlier_detection(topology.outlier) if topology.outlier else None,
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=10)
        ),
        typed_extension_protocol_options={_PROTOCOL_OPTIONS: PackedAny.pack(protocol)},
    )


def _build_attempt_filters(pool: Pool, others: Sequence[Pool], topology: Topology) -> list[HttpFilter]:
    """The chain of an attempt at a node."""
    limited = limits_breaks(topology, moves=bool(others))
    chain = [
        *(build_break_limit(pool, topology) if limited else ()),
        *(each for other in others for each in build_fallback_filters(pool, other, topology)),
        *_make_node_options([TRIED] if limited else []),
    ]
    return [HttpFilter(name=each.name, typed_config=each.typed_config) for each in chain]


def _make_node_options(carried: Iterable[str]) -> list[TypedExtensionConfig]:
    """Return the headers to remove on the way to the chosen host and back from it.

    The endpoint header is read when a host is picked, so it can be taken off only after that. Of an answer's head, what only the gateway
    itself says is taken off before the gateway says it; what the node states of itself is kept under a name of its own, for comparison.
    """
    ours = [HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=family)) for family in _ONLY_OURS]
    answer = [
        *(RuleMutation(append=overwrite_header(aside, f"%RESP({named})%")) for _, named, aside in _STATED),
        *(RuleMutation(remove_on_match=each) for each in ours),
        *(RuleMutation(append=overwrite_header(stated, f"%RESP({aside})%")) for stated, _, aside in _STATED),
        *(RuleMutation(remove=aside) for _, _, aside in _STATED),
        RuleMutation(remove="set-cookie"),
    ]
    removed = [RuleMutation(remove=each) for each in (ENDPOINT_HEADER, ATTEMPT_POOL, *carried)]
    removal = HeaderMutation(mutations=Mutations(request_mutations=removed, response_mutations=answer))
    return [
        pack_extension("envoy.filters.http.header_mutation", removal),
        pack_extension("envoy.filters.http.upstream_codec", UpstreamCodec()),
    ]


def _make_node_endpoint(node: Node, pool: Pool, *, fail_open: bool) -> LbEndpoint:
    """A node with what its answers are marked with."""
    facts = make_endpoint_metadata(node, pool.name, fail_open=fail_open)
    return LbEndpoint(
        endpoint=Endpoint(address=_make_node_address(node)),
        metadata=Metadata(filter_metadata={NAMESPACE: ProtoStruct.from_dict(facts)}),
    )


def _make_node_address(node: Node) -> EnvoyAddress:
    """Return the address to which Envoy sends a node's requests: for a remote API, its egress listener."""
    if node.remote is not None:
        return EnvoyAddress(envoy_internal_address=EnvoyInternalAddress(server_listener_name=node.endpoint.host))
    return make_address(SocketAddress(node.endpoint.host, node.endpoint.port))


def _make_override_host(slow_start: SlowStart) -> LoadBalancingPolicy:
    """The node that the header names, else the one with the fewest requests; a new one comes to its weight slowly."""
    policy = OverrideHost(
        override_host_sources=[OverrideHostOverrideHostSource(header=ENDPOINT_HEADER)],
        fallback_policy=_make_least_request(slow_start),
    )
    return LoadBalancingPolicy(
        policies=[LoadBalancingPolicyPolicy(typed_extension_config=pack_extension("envoy.load_balancing_policies.override_host", policy))]
    )


def _make_least_request(slow_start: SlowStart | None = None) -> LoadBalancingPolicy:
    config = LeastRequest()
    if slow_start is not None:
        config.slow_start_config = SlowStartConfig(
            slow_start_window=to_duration(slow_start.window_ms), min_weight_percent=Percent(value=slow_start.least_percent)
        )
    policy = pack_extension("envoy.load_balancing_policies.least_request", config)
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=policy)])


def _make_only_healthy() -> ClusterCommonLbConfig:
    """By default Envoy sends to ejected hosts too when half of them are, and holds news of their return back for a second."""
    return ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0), update_merge_window=to_duration(0))


def _make_outlier_detection(outlier: Outlier) -> OutlierDetection:
    """Count connections in a row that could not be opened.

    Envoy counts the reset of an open connection as one of them, but begins anew with each that opens, so that no number of requests that
    break their connections ejects a node.
    """
    return OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=outlier.consecutive_connect_failures,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
        interval=to_duration(outlier.interval_ms),
        base_ejection_time=to_duration(outlier.base_ejection_ms),
        max_ejection_percent=outlier.max_ejection_percent,
    )


def _make_health_check(check: HealthCheck, pool: Pool) -> EnvoyHealthCheck:
    """Create the active health check, with the same interval with and without traffic.

    An Ollama that listens on loopback responds with 403 to other host names.
    """
    every = to_duration(check.interval_ms)
    return EnvoyHealthCheck(
        timeout=to_duration(check.timeout_ms),
        interval=every,
        no_traffic_interval=every,
        interval_jitter_percent=10,
        unhealthy_threshold=check.unhealthy_after,
        healthy_threshold=check.healthy_after,
        http_health_check=HealthCheckHttpHealthCheck(host="localhost", path=check.engine_paths.get(pool.engine, check.path)),
    )


def _make_ext_proc(workers: Iterable[Address]) -> Cluster:
    """The workers. One that refuses connections has no requests open and would attract all: it is left out at its first failure."""
    cluster = _make_service(EXT_PROC_CLUSTER, workers)
    cluster.load_balancing_policy = _make_least_request()
    cluster.common_lb_config = _make_only_healthy()
    cluster.outlier_detection = OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_local_origin_success_rate=0,
        interval=to_duration(_WORKER_CHECK_MS),
        base_ejection_time=to_duration(_WORKER_EJECTION_MS),
        max_ejection_time=to_duration(_WORKER_EJECTION_MS),
        max_ejection_percent=100,
    )
    return cluster


def _make_agent(address: Address) -> Cluster:
    """The node's agent, over HTTP/1.1."""
    return Cluster(
        name=AGENT_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=to_duration(_WORKER_CONNECT_MS),
        load_assignment=_make_assignment(AGENT_CLUSTER, [LbEndpoint(endpoint=Endpoint(address=make_address(address)))]),
        transport_socket=_make_tls([address], "http/1.1"),
    )


def _make_service(name: str, addresses: Iterable[Address]) -> Cluster:
    """A gRPC service of the sidecar. Pings notice a process that is stopped but not gone."""
    addresses = tuple(addresses)
    named = any(isinstance(address, SocketAddress) and not address.is_ip for address in addresses)
    options = Http2ProtocolOptions(connection_keepalive=KeepaliveSettings(interval=to_duration(10_000), timeout=to_duration(5_000)))
    protocol = UpstreamProtocolOptions(explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=options))
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STRICT_DNS if named else ClusterDiscoveryType.STATIC,
        connect_timeout=to_duration(_WORKER_CONNECT_MS),
        load_assignment=_make_assignment(name, [LbEndpoint(endpoint=Endpoint(address=make_address(address))) for address in addresses]),
        circuit_breakers=make_unlimited_circuit_breakers(),
        transport_socket=_make_tls(addresses, "h2"),
        typed_extension_protocol_options={_PROTOCOL_OPTIONS: PackedAny.pack(protocol)},
    )


def _make_tls(addresses: Iterable[Address], alpn: str) -> TransportSocket | None:
    """Return the TLS settings of the first address; all are of one kind. None: plain text."""
    trust = next((address.tls for address in addresses if isinstance(address, SocketAddress)), None)
    if trust is None:
        return None
    validation = CertificateValidationContext(trusted_ca=DataSource(filename=trust.ca))
    if trust.server_name is not None:
        name = SubjectAltNameMatcher(san_type=SubjectAltNameMatcherSanType.DNS, matcher=StringMatcher(exact=trust.server_name))
        validation.match_typed_subject_alt_names = [name]
    own = []
    if trust.cert is not None:
        own.append(TlsCertificate(certificate_chain=DataSource(filename=trust.cert), private_key=DataSource(filename=trust.key or "")))
    common = CommonTlsContext(alpn_protocols=[alpn], tls_certificates=own, validation_context=validation)
    context = UpstreamTlsContext(common_tls_context=common, sni=trust.server_name or "")
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedAny.pack(context))


def _make_assignment(name: str, *endpoints: list[LbEndpoint]) -> ClusterLoadAssignment:
    """The hosts of a cluster, by priority."""
    groups = [LocalityLbEndpoints(lb_endpoints=each, priority=priority) for priority, each in enumerate(endpoints)]
    return ClusterLoadAssignment(cluster_name=name, endpoints=groups)

"""The way out: for each node that is a remote API an internal listener, which has no socket, and the cluster of the API.

Invariant: routes, retries and access log treat a remote API like any other node. What only it needs (DNS, TLS, its path, its
host, its credential) is added behind the internal listener, and what only the gateway's own nodes may see is taken off there.
"""

from collections.abc import Iterator

from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as RuleMutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    DataSource,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    PathConfigSource,
    TransportSocket,
    TypedExtensionConfig,
    WatchedDirectory,
)
from envoy_data_plane.envoy.config.core.v3 import Node as EnvoyNode
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener, ListenerInternalListenerConfig
from envoy_data_plane.envoy.config.route.v3 import Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost
from envoy_data_plane.envoy.extensions.bootstrap.internal_listener.v3 import InternalListener
from envoy_data_plane.envoy.extensions.filters.http.credential_injector.v3 import CredentialInjector
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.injected_credentials.generic.v3 import Generic
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SdsSecretConfig,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamProtocolOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptionsAutoHttpConfig,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatchAndSubstitute, RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any as PackedAny

from din_extproc.control.packing import make_address, make_unlimited_circuit_breakers, overwrite_header, pack_extension, to_duration
from din_extproc.control.topology import SocketAddress, Topology
from din_extproc.domain.node import EGRESS_PREFIX, Node, RemoteApi

_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_NODE = "din"
"""The id of an Envoy that has none: Envoy reads no SDS file without one."""
CONNECT_MS = 5_000
"""At least, for a TCP and a TLS handshake across sites."""
_INSIDE = (
    *(f"x-{family}-" for family in ("din", "bxagent", "envoy", "forwarded")),
    *("x-request-id", "x-task-tier", "traceparent", "tracestate", "baggage"),
)
"""Beginnings of request headers that are internal and not sent to another site."""
_THEIRS = (
    *("x-request-id", "request-id", "openai-", "anthropic-", "x-ms-", "apim-", "azureml-"),
    *("cf-", "alt-svc", "strict-transport-security", "nel", "report-to"),
)
"""Beginnings of answers' headers that name the provider's account or its site."""
_LUA = """\
-- What a provider says of its account, as the gateway reads it: status 402 when it has no credit, `retry-after` in whole seconds.
-- Only members of the body count, not what a message quotes.
local NO_CREDIT = {
  '"code"%s*:%s*"insufficient_quota"', '"type"%s*:%s*"insufficient_quota"', '"type"%s*:%s*"billing_error"',
  '"code"%s*:%s*"billing_', '"message"%s*:%s*"Your credit balance is too low',
}
local UNITS = { ms = 0.001, s = 1, m = 60, h = 3600 }
local LOOKED_AT = 4096

local function has_no_credit(body)
  local text = body and body:getBytes(0, math.min(body:length(), LOOKED_AT)) or ""
  for _, member in ipairs(NO_CREDIT) do
    if string.find(text, member) then
      return true
    end
  end
end

local function seconds(duration) -- such as 1m2.5s or 120ms
  local total = 0
  for number, unit in string.gmatch(duration or "", "([%d.]+)(%a+)") do
    total = total + (tonumber(number) or 0) * (UNITS[unit] or 0)
  end
  return total
end

local function pause(headers)
  local longest = (tonumber(headers:get("retry-after-ms") or "") or 0) / 1000
  for _, what in ipairs({ "requests", "tokens" }) do
    if headers:get("x-ratelimit-remaining-" .. what) == "0" then
      longest = math.max(longest, seconds(headers:get("x-ratelimit-reset-" .. what)))
    end
  end
  return longest
end

function envoy_on_response(handle)
  local status = handle:headers():get(":status")
  if (status == "429" or status == "400") and has_no_credit(handle:body()) then
    handle:headers():replace(":status", "402")
  elseif (status == "429" or status == "529") and not handle:headers():get("retry-after") then
    local longest = pause(handle:headers())
    if longest > 0 then
      handle:headers():replace("retry-after", tostring(math.ceil(longest)))
    end
  end
end
"""


def find_remote_nodes(topology: Topology) -> Iterator[tuple[Node, RemoteApi]]:
    """Yield the nodes that are remote APIs."""
    return ((node, node.remote) for pool in topology.pools for node in pool.nodes if node.remote is not None)


def add_egress(bootstrap: Bootstrap, topology: Topology) -> None:
    """Add listeners and clusters for the remote APIs, if there are any."""
    static = bootstrap.static_resources
    for node, api in find_remote_nodes(topology):
        if not bootstrap.bootstrap_extensions:
            bootstrap.node = bootstrap.node or EnvoyNode(id=_NODE, cluster=_NODE)
            bootstrap.bootstrap_extensions.append(pack_extension("envoy.bootstrap.internal_listener", InternalListener()))
        if static is not None:
            static.listeners.append(make_egress_listener(node, api, topology, cluster=f"{EGRESS_PREFIX}{node.id}"))
            address = SocketAddress(api.host, api.port)
            static.clusters.append(remote_cluster(f"{EGRESS_PREFIX}{node.id}", address, topology, ca=api.ca if api.tls else None))


def make_egress_listener(node: Node, api: RemoteApi, topology: Topology, *, cluster: str) -> Listener:
    """Return the internal listener of a remote API. `cluster`: where it sends requests."""
    name = f"{EGRESS_PREFIX}{node.id}"
    manager = HttpConnectionManager(
        stat_prefix="din_egress",
        codec_type=HttpConnectionManagerCodecType.AUTO,
        route_config=RouteConfiguration(
            name=name,
            virtual_hosts=[VirtualHost(name=name, domains=["*"], routes=[_make_route(cluster, api)])],
            validate_clusters=False,  # a control plane may send the listener before the cluster
        ),
        http_filters=[HttpFilter(name=each.name, typed_config=each.typed_config) for each in _make_filters(node, api, topology)],
        generate_request_id=False,
        skip_xff_append=True,
        stream_idle_timeout=to_duration(topology.timeouts.stream_idle_ms),
    )
    packed = pack_extension("envoy.filters.network.http_connection_manager", manager)
    return Listener(
        name=name,
        internal_listener=ListenerInternalListenerConfig(),
        filter_chains=[FilterChain(filters=[Filter(name=packed.name, typed_config=packed.typed_config)])],
    )


def _make_route(cluster: str, api: RemoteApi) -> Route:
    """Only paths of the API leave; the base path takes the place of `/v1`, as in SDKs."""
    base = api.base_path.replace("\\", "\\\\")
    query = f"?{api.query}" if api.query else ""
    rewrite = RegexMatchAndSubstitute(pattern=RegexMatcher(regex=r"^/v1(/[^?]*).*$"), substitution=rf"{base}\1{query}")
    action = RouteAction(cluster=cluster, host_rewrite_literal=api.authority, regex_rewrite=rewrite, timeout=to_duration(0))
    return Route(
        name=cluster,
        match=RouteMatch(prefix="/v1/"),
        route=action,
        request_headers_to_add=[overwrite_header(name, value.replace("%", "%%")) for name, value in api.headers],
    )


def _make_filters(node: Node, api: RemoteApi, topology: Topology) -> list[TypedExtensionConfig]:
    """Return the filters: header removal, then the credential, without which no request leaves. Answers pass the chain backwards."""
    chain = [
        pack_extension("envoy.filters.http.header_mutation", HeaderMutation(mutations=_make_removals())),
        pack_extension("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=_LUA))),
    ]
    if api.credential is not None:
        source = ConfigSource(
            path_config_source=PathConfigSource(
                path=f"{topology.credentials_folder}/{node.id}.yaml",
                watched_directory=WatchedDirectory(path=topology.credentials_folder),  # Kubernetes replaces a link, not the file
            ),
            resource_api_version=ApiVersion.V3,
        )
        generic = Generic(credential=SdsSecretConfig(name=f"{EGRESS_PREFIX}{node.id}", sds_config=source), header=api.credential_header[0])
        injector = CredentialInjector(overwrite=True, credential=pack_extension("envoy.http.injected_credentials.generic", generic))
        chain.append(pack_extension("envoy.filters.http.credential_injector", injector))
    return [*chain, pack_extension("envoy.filters.http.router", Router(suppress_envoy_headers=True))]


def _make_removals() -> Mutations:
    def starting(families: tuple[str, ...]) -> list[RuleMutation]:
        matchers = (StringMatcher(prefix=family) for family in families)
        return [RuleMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=each)) for each in matchers]

    return Mutations(request_mutations=starting(_INSIDE), response_mutations=starting(_THEIRS))


def remote_cluster(name: str, address: SocketAddress, topology: Topology, *, ca: str | None) -> Cluster:
    """A server on another site. `ca`: PEM, who issues its certificate; None: plain text."""
    auto = HttpProtocolOptionsAutoHttpConfig(http_protocol_options=Http1ProtocolOptions(), http2_protocol_options=Http2ProtocolOptions())
    explicit = HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions())
    protocol = UpstreamProtocolOptions(auto_config=auto) if ca is not None else UpstreamProtocolOptions(explicit_http_config=explicit)
    hosts = [LocalityLbEndpoints(lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=make_address(address), hostname=address.host))])]
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if address.is_ip else ClusterDiscoveryType.LOGICAL_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.ALL,
        connect_timeout=to_duration(max(CONNECT_MS, topology.timeouts.connect_ms)),
        load_assignment=ClusterLoadAssignment(cluster_name=name, endpoints=hosts),
        circuit_breakers=make_unlimited_circuit_breakers(),
        transport_socket=None if ca is None else _tls(address, ca),
        typed_extension_protocol_options={_PROTOCOL_OPTIONS: PackedAny.pack(protocol)},
    )


def _tls(address: SocketAddress, ca: str) -> TransportSocket:
    kind = SubjectAltNameMatcherSanType.IP_ADDRESS if address.is_ip else SubjectAltNameMatcherSanType.DNS
    validation = CertificateValidationContext(
        trusted_ca=DataSource(filename=ca),
        match_typed_subject_alt_names=[SubjectAltNameMatcher(san_type=kind, matcher=StringMatcher(exact=address.host))],
    )
    common = CommonTlsContext(validation_context=validation)
    context = UpstreamTlsContext(common_tls_context=common, sni="" if address.is_ip else address.host)
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedAny.pack(context))

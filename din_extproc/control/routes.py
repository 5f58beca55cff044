"""Routes: to the pool that the sidecar has set, or to none.

Invariant: no spelling of a path reaches a node unless the sidecar chose one. The single exception is the fail-open route, and it is marked.
"""

from collections.abc import Iterator
from copy import deepcopy
from datetime import timedelta
from re import escape

from envoy_data_plane.envoy.config.core.v3 import HeaderValueOption
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    FilterConfig,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import CorsPolicy
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any as PackedAny

from din_extproc.control.early_headers import CLIENT_MAY_SEND
from din_extproc.control.endpoint_metadata import FAIL_OPEN
from din_extproc.control.filters import CORS, EXT_PROC
from din_extproc.control.packing import overwrite_header, pack_extension, to_duration
from din_extproc.control.topology import AGENT_CLUSTER, Topology
from din_extproc.domain.identity import FORWARDED_CERTIFICATE
from din_extproc.domain.node import POOL_SEPARATOR, Pool
from din_extproc.domain.request import OPERATIONS, Operation

CLUSTER_HEADER = "x-din-cluster"
ROUTE_CONFIGURATION = "din"
UNDECIDED = "undecided"
SECRETS = ["authorization", "x-api-key", "api-key", "proxy-authorization", "cookie"]
"""Headers that can hold a tenant's key or session: they are not sent to nodes."""
USERS = [f"x-openwebui-{name}" for name in ("user-name", "user-id", "user-email", "user-role")]
"""Headers in which chat UIs name the user: they are not sent to nodes either."""
WHOLE_HEADER = "x-din-whole"
"""Set for an answer that is complete when it begins: its node is silent for as long as it works."""
INSIDE = [CLUSTER_HEADER, WHOLE_HEADER, "accept-encoding", "x-envoy-external-address"]
"""Headers that nodes must not receive: a compressed answer can't be metered. (The clusters remove `x-din-endpoint`.)"""
_LONGEST_REGEX = 90
"""Characters: Envoy takes a regular expression whose program has at most 100 instructions."""
_NODE_CORS = [
    f"access-control-{name}"
    for name in ("allow-origin", "allow-credentials", "allow-methods", "allow-headers", "expose-headers", "max-age")
]
EXPOSED = [
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{kind}-{what}" for kind in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
    *(f"x-din-{name}" for name in ("node-id", "model-version", "exec-time-ms", "trace-id", "degraded-reason", "dropped-parameters")),
    "x-bxagent-degraded",
]
ALLOWED = ["authorization", "content-type", "x-api-key", "traceparent", "tracestate", "x-task-tier", *CLIENT_MAY_SEND]
METHODS = "GET,HEAD,POST"
_MAX_AGE_S = "600"
_OTHER_NODE_DRAWS = 32
"""Draws of another node before the failed one is accepted again: with few nodes the same one is drawn often."""


def build_route_configuration(topology: Topology) -> RouteConfiguration:
    """Create the route configuration with its only virtual host."""
    decided = [_chosen_pair(topology), _chosen_pool(topology)] if topology.moves else [_chosen_pool(topology)]
    routes = [*(_preflight(origin) for origin in topology.cors_origins), *map(_whole, decided), *decided]
    if topology.agent is not None:
        routes.insert(0, _health())
    for pool in topology.pools:
        if pool.name == topology.fail_open_pool:
            routes += [_fail_open(topology, pool.name, paths) for paths in _join_paths(pool)]
    routes.append(_undecided())
    host = VirtualHost(name="din", domains=["*"], routes=routes)
    if topology.cors_origins:
        host.typed_per_filter_config = {CORS: PackedAny.pack(_cors_policy(topology.cors_origins))}
    return RouteConfiguration(name=ROUTE_CONFIGURATION, virtual_hosts=[host])


def _preflight(origin: str) -> Route:
    """A browser's question, answered here: without a key, without the sidecar, and with 204 (Envoy's own CORS filter says 200)."""
    matchers = [
        HeaderMatcher(name=":method", string_match=StringMatcher(exact="OPTIONS")),
        HeaderMatcher(name="access-control-request-method", present_match=True),
        HeaderMatcher(name="origin", string_match=_origin(origin)),
    ]
    off = PackedAny.pack(FilterConfig(disabled=True))
    return Route(
        name="preflight",
        match=RouteMatch(prefix="/", headers=matchers),
        direct_response=DirectResponseAction(status=204),
        typed_per_filter_config={CORS: off, EXT_PROC: off},
        response_headers_to_add=[
            overwrite_header("access-control-allow-origin", "%REQ(origin)%"),
            overwrite_header("access-control-allow-methods", METHODS),
            overwrite_header("access-control-allow-headers", ",".join(ALLOWED)),
            overwrite_header("access-control-max-age", _MAX_AGE_S),
            overwrite_header("vary", "origin"),
        ],
    )


def removed_headers(topology: Topology) -> list[str]:
    """Headers that a node gets no sight of."""
    gateway = topology.identity.gateway
    forwarded = () if gateway is None else tuple(filter(None, (gateway.tenant_header, FORWARDED_CERTIFICATE)))
    return list(dict.fromkeys((*SECRETS, *INSIDE, *USERS, *forwarded)))


def _chosen_pool(topology: Topology) -> Route:
    return Route(
        name="pool",
        match=RouteMatch(prefix="/", headers=[HeaderMatcher(name=CLUSTER_HEADER, present_match=True)]),
        route=_toward_node(topology, RouteAction(cluster_header=CLUSTER_HEADER)),
        request_headers_to_remove=removed_headers(topology),
        response_headers_to_add=build_node_headers() if topology.agent is None else [*build_node_headers(), _node_times()],
        response_headers_to_remove=_NODE_CORS,
    )


def _chosen_pair(topology: Topology) -> Route:
    """Return the route of requests that may move to another pool: they name a node of that pool after all nodes that are tried before."""
    route = _chosen_pool(topology)
    route.name = "moving"
    route.match = RouteMatch(prefix="/", headers=[HeaderMatcher(name=CLUSTER_HEADER, string_match=StringMatcher(contains=POOL_SEPARATOR))])
    if route.route is not None and route.route.retry_policy is not None:
        route.route.retry_policy.num_retries = topology.retry.tries
    return route


def _whole(streams: Route) -> Route:
    """The same for whole answers: without a limit for silence, after which another node would begin the same work anew."""
    route = deepcopy(streams)
    route.name += "-whole"
    if route.match is not None and route.route is not None and route.route.retry_policy is not None:
        route.match.headers.append(HeaderMatcher(name=WHOLE_HEADER, present_match=True))
        route.route.retry_policy.per_try_idle_timeout = None
    return route


def _health() -> Route:
    """Create the health route, which the agent answers."""
    return Route(
        name="health",
        match=RouteMatch(path="/health"),
        route=RouteAction(cluster=AGENT_CLUSTER),
        typed_per_filter_config={EXT_PROC: PackedAny.pack(FilterConfig(disabled=True))},
    )


def _join_paths(pool: Pool) -> Iterator[str]:
    """Yield regular expressions for the paths of the pool's operations and of its model list, as few as Envoy takes."""
    joined = Operation.MODELS.value
    for operation in sorted(OPERATIONS if pool.operations is None else pool.operations):
        path = escape(operation.value)
        if len(joined) + len(path) >= _LONGEST_REGEX:
            yield joined
            joined = path
        else:
            joined = f"{joined}|{path}"
    yield joined


def _fail_open(topology: Topology, pool: str, paths: str) -> Route:
    """Only the operations of the pool, exactly spelled: a default pool is no open proxy.

    The marks come from the node that answered, because this is also the route of a request that the sidecar refused.
    """
    return Route(
        name=FAIL_OPEN,
        match=RouteMatch(safe_regex=RegexMatcher(regex=paths)),
        route=_toward_node(topology, RouteAction(cluster=pool)),
        request_headers_to_remove=removed_headers(topology),
        response_headers_to_add=[
            *build_node_headers(),
            overwrite_header("x-request-id", "%REQ(X-DIN-TRACE-ID?X-REQUEST-ID)%"),
            overwrite_header("x-bxagent-degraded", f"%UPSTREAM_METADATA(din:{FAIL_OPEN}:degraded)%"),
            overwrite_header("x-din-degraded-reason", f"%UPSTREAM_METADATA(din:{FAIL_OPEN}:reason)%"),
        ],
        response_headers_to_remove=_NODE_CORS,
    )


def _undecided() -> Route:
    """Create the route of undecided requests.

    It has no cluster, so Envoy responds with 503. A direct response would too, but the CORS filter passes those by.
    """
    return Route(name=UNDECIDED, match=RouteMatch(prefix="/"), route=RouteAction(cluster_header=CLUSTER_HEADER))


def _toward_node(topology: Topology, action: RouteAction) -> RouteAction:
    action.timeout = to_duration(topology.timeouts.total_ms)
    action.retry_policy = _retry_policy(topology)
    return action


def _retry_policy(topology: Topology) -> RetryPolicy:
    """`reset` holds until the first byte of an answer has left, so it covers the dead, the refusing and the silent node."""
    jitter: timedelta = to_duration(topology.retry.jitter_ms)
    predicate = pack_extension("envoy.retry_host_predicates.previous_hosts", PreviousHostsPredicate())
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset,retriable-status-codes",
        retriable_status_codes=list(topology.retry.statuses),
        num_retries=topology.retry.attempts,
        retry_back_off=RetryPolicyRetryBackOff(base_interval=jitter, max_interval=jitter),
        retry_host_predicate=[RetryPolicyRetryHostPredicate(name=predicate.name, typed_config=predicate.typed_config)],
        host_selection_retry_max_attempts=_OTHER_NODE_DRAWS,
        per_try_idle_timeout=to_duration(topology.timeouts.node_idle_ms),
    )


def build_node_headers() -> list[HeaderValueOption]:
    """Named by Envoy, because only Envoy knows which node answered after a retry."""
    return [
        overwrite_header("x-din-node-id", "%UPSTREAM_METADATA(din:node_id)%"),
        overwrite_header("x-din-model-version", "%UPSTREAM_METADATA(din:version)%"),
        overwrite_header("x-din-exec-time-ms", "%COMMON_DURATION(US_TX_BEG:US_RX_BEG:ms)%"),
    ]


def _node_times() -> HeaderValueOption:
    """Of a node's own Envoy: when the request came by the node's clock, and how long the engine took to begin. Gateways pass it on."""
    return overwrite_header("server-timing", 'node;dur=%RESPONSE_DURATION%;desc="%START_TIME(%s.%6f)%"')


def _cors_policy(origins: tuple[str, ...]) -> CorsPolicy:
    return CorsPolicy(
        allow_origin_string_match=[_origin(origin) for origin in origins],
        expose_headers=",".join(EXPOSED),
    )


def _origin(pattern: str) -> StringMatcher:
    if "*" not in pattern:
        return StringMatcher(exact=pattern)
    literal = (part.replace(".", r"\.") for part in pattern.split("*"))
    return StringMatcher(safe_regex=RegexMatcher(regex=".*".join(literal)))

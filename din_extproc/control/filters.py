"""The HTTP filters, in the order in which a request meets them: health check, CORS, usage (Lua), the sidecar (ext_proc), the router.

Invariant: an answer passes them backwards, so CORS marks every answer, local ones too, and Lua sees what the sidecar left in metadata.
"""

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    BackoffStrategy,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RetryPolicy,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher
from envoy_data_plane.envoy.extensions.filters.http.cors.v3 import Cors
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.health_check.v3 import HealthCheck
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode

from din_extproc.control.access_log import build_attempt_log
from din_extproc.control.jwt import build_jwt_authentication
from din_extproc.control.packing import pack_extension, to_duration
from din_extproc.control.topology import EXT_PROC_CLUSTER, Topology
from din_extproc.domain.identity import JWT_AUTHN

CORS = "envoy.filters.http.cors"
EXT_PROC = "envoy.filters.http.ext_proc"
HEALTH_CHECK = "envoy.filters.http.health_check"
METADATA_NAMESPACE = "din"


def build_http_filters(topology: Topology) -> list[HttpFilter]:
    """The chain."""
    chain = [] if topology.health_path is None else [_make_health_check(topology.health_path)]
    if topology.cors_origins:
        chain.append(pack_extension(CORS, Cors()))
    if topology.usage_lua:
        chain.append(pack_extension("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=topology.usage_lua))))
    if topology.identity.jwt:
        chain.append(pack_extension(JWT_AUTHN, build_jwt_authentication(topology.identity.jwt)))
    chain.append(sidecar_filter(topology))
    chain.append(pack_extension("envoy.filters.http.router", Router(suppress_envoy_headers=True, upstream_log=build_attempt_log(topology))))
    return [HttpFilter(name=each.name, typed_config=each.typed_config) for each in chain]


def _make_health_check(path: str) -> TypedExtensionConfig:
    """Envoy answers 503 here while it drains, and leaves the answer to a worker otherwise."""
    path_matcher = HeaderMatcher(name=":path", string_match=StringMatcher(exact=path))
    return pack_extension(HEALTH_CHECK, HealthCheck(pass_through_mode=True, headers=[path_matcher]))


def _make_worker_retry() -> RetryPolicy:
    """For a worker that is just being restarted. Envoy's own pause before a retry would be up to a second."""
    pause = BackoffStrategy(base_interval=to_duration(5), max_interval=to_duration(20))
    return RetryPolicy(retry_on="connect-failure,refused-stream", num_retries=2, retry_back_off=pause)


def sidecar_filter(topology: Topology, *, of_attempts: bool = False) -> TypedExtensionConfig:
    """The sidecar is asked twice, about the request's headers and its whole body, and by its own reply a third time.

    Its reply to the request's headers switches the response's headers and trailers on (`wire/encode.py`). Switched on from the start,
    they would bring Envoy's own answers to a head that it refuses (431, 426, 400) to the sidecar, and lose them: Envoy ends such a stream
    before the sidecar has replied. Request headers are sent and not skipped, because a request whose headers have left can't be routed by
    its body.

    A sidecar that fails is passed by. That lets nothing through: the route of a request without a decision leads nowhere (or, where the
    operator says so, to the fail-open pool). But an answer that is under way goes on to its end, which Envoy would otherwise cut off.

    For attempts, the filter is in a cluster's chain and sees requests only: Envoy 1.36 crashes where an attempt's answer waits there for
    the sidecar and is then retried. Without the sidecar such an attempt fails, because the node could not read the request.
    """
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    service = GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER),
        retry_policy=_make_worker_retry(),
    )
    processor = ExternalProcessor(
        grpc_service=service,
        failure_mode_allow=not of_attempts,
        message_timeout=to_duration(topology.timeouts.message_ms),
        max_message_timeout=to_duration(topology.timeouts.max_message_ms),
        processing_mode=ProcessingMode(
            request_header_mode=send,
            request_body_mode=ProcessingModeBodySendMode.BUFFERED,
            request_trailer_mode=skip,
            response_header_mode=skip,
            response_body_mode=ProcessingModeBodySendMode.NONE,
            response_trailer_mode=skip,
        ),
        request_attributes=list(topology.identity.attributes),
        allow_mode_override=not of_attempts,
        mutation_rules=HeaderMutationRules(allow_envoy=True),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[JWT_AUTHN]) if topology.identity.jwt else None,
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE]),
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )
    return pack_extension(EXT_PROC, processor)

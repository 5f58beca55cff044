"""The access log: every finished exchange, local replies too, told to the sidecar that settles it, or written to standard output.

Invariant: no header that can hold a key or a prompt is logged.
"""

from collections.abc import Mapping

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    OrFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RuntimeUInt32,
    SubstitutionFormatString,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.access_loggers.fluentd.v3 import FluentdAccessLogConfig, FluentdAccessLogConfigRetryOptions
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.google.protobuf import Struct as ProtoStruct

from din_extproc.control.packing import pack_extension, to_duration
from din_extproc.control.topology import ACCESS_LOG_CLUSTER, Topology
from din_extproc.domain.access_log import (
    ATTEMPT_FLAGS,
    ATTEMPT_RECORD,
    ATTEMPT_TAG,
    EXCHANGE_RECORD,
    EXCHANGE_TAG,
    NODE_REFUSALS,
)

LOG_NAME = "din"
ATTEMPTS_NAME = "din_attempts"
_HELD_BYTES = 8 << 20
"""Entries that Envoy holds at most while the sidecar is slow, about 8,000. Past that it drops them, and their tokens are not settled;
Envoy's own default of 16 KiB drops some whenever a burst comes before the connection has opened its window."""
_REFUSALS = [
    ComparisonFilter(op=ComparisonFilterOp.EQ, value=RuntimeUInt32(default_value=status, runtime_key=f"din.refused_{status}"))
    for status in NODE_REFUSALS
]
"""A node that refuses the gateway's credentials, or whose account has no credit, or its name of the model, has failed as much."""
REQUEST_HEADERS = ["x-din-trace-id"]
ATTEMPT_HEADERS = ["traceparent", "x-din-origin", "x-din-adapter"]
"""Request headers that identify a failed attempt: its parent span, the origin of the request, and the adapter."""
_LINE = {
    "time": "%START_TIME%",
    "trace_id": "%REQ(X-DIN-TRACE-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ:PATH)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "bytes_in": "%BYTES_RECEIVED%",
    "bytes_out": "%BYTES_SENT%",
}
RESPONSE_HEADERS = [
    "x-din-node-id",
    "x-din-model-version",
    "x-din-trace-id",
    "x-bxagent-degraded",
    "retry-after",
    "x-din-stated-node",
    "x-din-stated-version",
]


def build_access_log(topology: Topology) -> AccessLog:
    """The logger of the listener."""
    if topology.access_log is None:
        return _build_line_logger()
    if topology.fluentd_log:
        logger = _build_fluentd_logger(EXCHANGE_TAG, EXCHANGE_RECORD, topology)
    else:
        config = HttpGrpcAccessLogConfig(
            common_config=_build_grpc_config(LOG_NAME, topology),
            additional_request_headers_to_log=REQUEST_HEADERS,
            additional_response_headers_to_log=RESPONSE_HEADERS,
        )
        logger = pack_extension("envoy.access_loggers.http_grpc", config)
    return AccessLog(name=logger.name, typed_config=logger.typed_config)


def build_attempt_log(topology: Topology) -> list[AccessLog]:
    """The router's logger of attempts that failed, each when it did: an exchange that another node then answers tells nothing of them.

    Attempts that went well are not told: they would double what every exchange costs.
    """
    if topology.access_log is None:
        return []
    at_least = ComparisonFilter(op=ComparisonFilterOp.GE, value=RuntimeUInt32(default_value=500, runtime_key="din.failed_attempts"))
    bad = OrFilter(
        filters=[
            *(AccessLogFilter(status_code_filter=StatusCodeFilter(comparison=each)) for each in (at_least, *_REFUSALS)),
            AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(ATTEMPT_FLAGS))),
        ]
    )
    if topology.fluentd_log:
        logger = _build_fluentd_logger(ATTEMPT_TAG, ATTEMPT_RECORD, topology)
    else:
        config = HttpGrpcAccessLogConfig(
            common_config=_build_grpc_config(ATTEMPTS_NAME, topology),
            additional_request_headers_to_log=ATTEMPT_HEADERS,
            additional_response_headers_to_log=["retry-after"],
        )
        logger = pack_extension("envoy.access_loggers.http_grpc", config)
    return [AccessLog(name=logger.name, filter=AccessLogFilter(or_filter=bad), typed_config=logger.typed_config)]


def _build_fluentd_logger(tag: str, record: Mapping[str, str], topology: Topology) -> TypedExtensionConfig:
    """Return a logger that reconnects for ever (Envoy's default) and holds entries meanwhile."""
    config = FluentdAccessLogConfig(
        cluster=ACCESS_LOG_CLUSTER,
        tag=tag,
        stat_prefix=tag,
        buffer_flush_interval=to_duration(topology.access_log_flush_ms),
        buffer_size_bytes=_HELD_BYTES,
        record=ProtoStruct.from_dict(dict(record)),
        retry_options=FluentdAccessLogConfigRetryOptions(
            backoff_options=BackoffStrategy(base_interval=to_duration(50), max_interval=to_duration(1000))
        ),
    )
    return pack_extension("envoy.access_loggers.fluentd", config)


def _build_grpc_config(name: str, topology: Topology) -> CommonGrpcAccessLogConfig:
    return CommonGrpcAccessLogConfig(
        log_name=name,
        transport_api_version=ApiVersion.V3,
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=ACCESS_LOG_CLUSTER)),
        buffer_flush_interval=to_duration(topology.access_log_flush_ms),
        buffer_size_bytes=_HELD_BYTES,
    )


def _build_line_logger() -> AccessLog:
    """One JSON object per exchange, found by its trace id."""
    text = SubstitutionFormatString(json_format=ProtoStruct.from_dict(_LINE))
    logger = pack_extension("envoy.access_loggers.stdout", StdoutAccessLog(log_format=text))
    return AccessLog(name=logger.name, typed_config=logger.typed_config)

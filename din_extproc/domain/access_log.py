"""The records of Envoy's Fluentd access logger: their keys, and the command operators that fill them.

`control` renders them into Envoy's configuration, `observe` reads them. Operators: Envoy's "Command Operators" reference. Times are
microseconds since the request's first byte; a value that Envoy does not have is null.
"""

EXCHANGE_TAG = "din"
ATTEMPT_TAG = "din_attempts"

ATTEMPT_FLAGS = ("UF", "UR", "UC", "UT", "SI", "UPE")
"""Response flags of a failed attempt at a node: connection, resets, silence."""
NODE_REFUSALS = (401, 402, 403, 404)
"""Statuses below 500 that are the node's fault: the gateway chose the account and the model's name."""

EXCHANGE_RECORD = {
    "m": "%DYNAMIC_METADATA(din)%",
    "z": "%DYNAMIC_METADATA(envoy.filters.http.ext_authz)%",
    "s": "%RESPONSE_CODE%",
    "f": "%RESPONSE_FLAGS%",
    "u": "%UPSTREAM_REMOTE_ADDRESS%",
    "t": "%START_TIME(%s.%6f)%",
    "d": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    "l": "%DURATION%",
    "r": "%COMMON_DURATION(DS_RX_BEG:DS_RX_END:us)%",
    "w": "%COMMON_DURATION(DS_RX_BEG:US_TX_BEG:us)%",
    "a": "%COMMON_DURATION(DS_RX_BEG:US_RX_BEG:us)%",
    "e": "%COMMON_DURATION(DS_RX_BEG:US_RX_END:us)%",
    "n": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "b": "%BYTES_SENT%",
    "c": "%RESPONSE_CODE_DETAILS%",
    "g": "%RESP(x-bxagent-degraded)%",
    "v": "%RESP(x-din-model-version)%",
    "h": "%UPSTREAM_METADATA(din:node_id)%",
    "i": "%RESP(x-din-stated-node)%",
    "j": "%RESP(x-din-stated-version)%",
    "y": "%RESP(retry-after)%",
}
"""One finished exchange. `l` (whole milliseconds) is known where an exchange ended before an answer was sent whole."""

ATTEMPT_RECORD = {
    "s": "%RESPONSE_CODE%",
    "f": "%RESPONSE_FLAGS%",
    "u": "%UPSTREAM_HOST%",
    "h": "%UPSTREAM_METADATA(din:node_id)%",
    "t": "%START_TIME(%s.%6f)%",
    "l": "%DURATION%",
    "p": "%REQ(traceparent)%",
    "y": "%RESP(retry-after)%",
    "o": "%REQ(x-din-origin)%",
    "k": "%REQ(x-din-adapter)%",
}
"""One attempt that failed at a node."""

FLAG_NAMES = {
    "failed_local_healthcheck": "LH",
    "no_healthy_upstream": "UH",
    "upstream_request_timeout": "UT",
    "local_reset": "LR",
    "upstream_remote_reset": "UR",
    "upstream_connection_failure": "UF",
    "upstream_connection_termination": "UC",
    "upstream_overflow": "UO",
    "no_route_found": "NR",
    "delay_injected": "DI",
    "fault_injected": "FI",
    "rate_limited": "RL",
    "unauthorized_details": "UAEX",
    "rate_limit_service_error": "RLSE",
    "downstream_connection_termination": "DC",
    "upstream_retry_limit_exceeded": "URX",
    "stream_idle_timeout": "SI",
    "invalid_envoy_request_headers": "IH",
    "downstream_protocol_error": "DPE",
    "upstream_max_stream_duration_reached": "UMSDR",
    "response_from_cache_filter": "RFCF",
    "no_filter_config_found": "NFCF",
    "duration_timeout": "DT",
    "upstream_protocol_error": "UPE",
    "no_cluster_found": "NC",
    "overload_manager": "OM",
    "dns_resolution_failure": "DF",
    "downstream_remote_reset": "DR",
}
"""Envoy's response flags in the access log service, and their short names."""

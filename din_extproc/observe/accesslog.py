"""Envoy's access log, read: one record per exchange that the gateway decided about, and one per attempt that failed at a node.

Rule: a record is made from whatever is there. What is missing or has the wrong type counts as not told, never as an error.

Dynamic metadata, namespace `din`: of a request that it has read, the gateway leaves `labels` (`domain.usage.Labels` as JSON: one field,
because every field costs both sides); of one that it answered itself, `trace_id` and `refusal`,
and `sensitive` (`Sensitive` as JSON) where that is why. What the node's answer cost comes from `envoy/lua/usage.lua`, see its head.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value

from din_extproc._proto.envoy.config.core.v3.address_pb2 import Address
from din_extproc._proto.envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon, HTTPAccessLogEntry, ResponseFlags, UpstreamEnd
from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.node import Endpoint, Node
from din_extproc.domain.request import Operation
from din_extproc.domain.usage import ANSWER_TOO_LARGE, ExchangeRecord, FailedAttempt, Labels, Sensitive
from din_extproc.observe.outcome import ExchangeEnding, outcome, usage

NAMESPACE = "din"
_PERMITS = "envoy.filters.http.ext_authz"
"""Where Envoy keeps what the gateway leaves when it is only asked whether a request may pass."""
_FLAGS = {
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
_TOTAL_TIMEOUT = "response_timeout"
"""Envoy's word for the end of the whole request's time; that of one attempt is another."""
_WITHOUT_OUTPUT = frozenset({Operation.EMBEDDINGS, Operation.RERANK})
_NOT_HELD = "response_payload_too_large"
"""Envoy's word for an answer that is waited for and outgrows what it holds."""
_NO_FLAGS: tuple[str, ...] = ()
_OURS = NAMESPACE, _PERMITS
_decode = msgspec.json.Decoder(Labels).decode
_decode_sensitive = msgspec.json.Decoder(Sensitive).decode
_UNLABELLED = Labels()
_ABSENT = Value()
_EXACT = 2.0**53
"""Larger numbers are not whole tokens any more."""
_SECONDS_DIGITS = 10
_NOBODY: Mapping[str, Node] = {}
_Fields = Mapping[str, Value]
"""The namespace's fields, those that are there."""


def records(message: bytes, nodes: Mapping[str, str], described: Mapping[str, Node] = _NOBODY) -> Iterator[ExchangeRecord | FailedAttempt]:
    """Read one `StreamAccessLogsMessage`, record by record as they are asked for.

    Args:
        message: As it came over gRPC.
        nodes: Node ids by endpoint, as `10.0.0.7:8000` or `[fd00::10]:8000`. An endpoint that is not there stands for itself.
        described: Nodes by id, as far as they are known.

    Returns:
        Finished exchanges that the gateway decided about, in the log's order. Others, such as Envoy's own answer to a broken
        request, leave no record. Between them, attempts at nodes that failed; of an exchange that failed for good, too.

    Raises:
        ValueError: These bytes are no such message.
    """
    try:
        entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    except DecodeError as error:
        raise ValueError("not an access log message") from error
    return _each(entries, nodes, described)


def _each(
    entries: Iterable[HTTPAccessLogEntry], nodes: Mapping[str, str], described: Mapping[str, Node]
) -> Iterator[ExchangeRecord | FailedAttempt]:
    for entry in entries:
        common = entry.common_properties
        if common.access_log_type == UpstreamEnd:
            yield _attempt(entry, common, nodes)
        elif any(name in common.metadata.filter_metadata for name in _OURS) and not common.intermediate_log_entry:
            yield _record(entry, common, nodes, described)


def _attempt(entry: HTTPAccessLogEntry, common: AccessLogCommon, nodes: Mapping[str, str]) -> FailedAttempt:
    endpoint = _endpoint(common.upstream_remote_address) if common.HasField("upstream_remote_address") else ""
    flags = _flags(common.response_flags) if common.HasField("response_flags") else _NO_FLAGS
    return FailedAttempt(
        node_id=nodes.get(endpoint, endpoint),
        reason=",".join(flags) or str(entry.response.response_code.value),
        duration_ms=_ms(common.duration),
        started_at=common.start_time.seconds + common.start_time.nanos / 1e9,
        traceparent=entry.request.request_headers.get("traceparent", ""),
    )


def _record(entry: HTTPAccessLogEntry, common: AccessLogCommon, nodes: Mapping[str, str], described: Mapping[str, Node]) -> ExchangeRecord:
    told = _told(common.metadata.filter_metadata)
    labels = _labels(told)
    flags = _flags(common.response_flags) if common.HasField("response_flags") else _NO_FLAGS
    endpoint = _endpoint(common.upstream_remote_address) if common.HasField("upstream_remote_address") else ""
    node_id = nodes.get(endpoint, endpoint)
    headers = entry.response.response_headers
    ending = _ending(entry, told, labels, flags, described.get(node_id), reached=bool(endpoint))
    ended_as = outcome(ending)
    start = common.start_time
    started_us = start.seconds * 1_000_000 + start.nanos // 1000
    moved = _text(told, "moved_to")
    return ExchangeRecord(
        request_id=labels.request_id,
        trace_id=labels.trace_id or _text(told, "trace_id"),
        tenant=labels.tenant,
        key_id=labels.key_id,
        model=_text(told, "moved_model") or labels.model,
        alias=labels.alias,
        pool=moved or labels.pool,
        rule=labels.rule,
        node_id=node_id,
        status=ending.status,
        outcome=ended_as,
        stream=labels.stream,
        usage=usage(ending, ended_as),
        reserved_tokens=labels.reserved_tokens,
        prompt_estimate=labels.prompt_estimate,
        features=labels.features,
        fixed=labels.fixed,
        attempts=common.upstream_request_attempt_count,
        degraded=labels.degraded or headers.get("x-bxagent-degraded") == "true",
        started_at=started_us / 1e6,
        duration_ms=_ms(common.duration) if common.HasField("duration") else None,
        first_token_ms=_since(started_us, told, "first_token_us"),
        last_token_ms=_since(started_us, told, "last_token_us"),
        response_flags=flags,
        refusal=ending.refusal,
        error=ending.error or (ANSWER_TOO_LARGE if entry.response.response_code_details == _NOT_HELD else ""),
        bad_events=_count(told, "bad_events"),
        retry_after_s=_seconds(headers.get("retry-after", "")),
        operation=labels.operation,
        span=labels.span or _text(told, "span"),
        version=headers.get("x-din-model-version", ""),
        received_ms=_ms(common.time_to_last_rx_byte) if common.HasField("time_to_last_rx_byte") else None,
        sent_ms=_ms(common.time_to_first_upstream_tx_byte) if common.HasField("time_to_first_upstream_tx_byte") else None,
        node_ended_ms=_ms(common.time_to_last_upstream_rx_byte) if common.HasField("time_to_last_upstream_rx_byte") else None,
        decided_ms=labels.decided_us / 1e3 if labels.decided_us else None,
        waited_ms=labels.waited_us / 1e3,
        would_refuse=labels.would_refuse,
        tags=labels.tags,
        sensitive=labels.sensitive or (_sensitive(told["sensitive"].string_value) if "sensitive" in told else None),
        moved_from=labels.pool if moved else "",
        deadline_exceeded=entry.response.response_code_details == _TOTAL_TIMEOUT,
    )


def _told(spaces: Mapping[str, Struct]) -> _Fields:
    """What the gateway left: in one namespace as a rule, and then its fields as they are."""
    names = [name for name in _OURS if name in spaces]
    if len(names) == 1:
        return spaces[names[0]].fields
    return {name: value for space in names for name, value in spaces[space].fields.items()}


def _since(started_us: int, told: _Fields, name: str) -> float | None:
    """Milliseconds from the start to a moment that was told."""
    return max(0.0, (_count(told, name) - started_us) / 1e3) if name in told else None


def _ms(duration: Duration) -> float:
    return duration.seconds * 1e3 + duration.nanos / 1e6


def _ending(
    entry: HTTPAccessLogEntry, told: _Fields, labels: Labels, flags: tuple[str, ...], node: Node | None, *, reached: bool
) -> ExchangeEnding:
    response = entry.response
    return ExchangeEnding(
        status=response.response_code.value,
        flags=frozenset(flags),
        reached=reached,
        answered=entry.common_properties.HasField("time_to_first_upstream_rx_byte"),
        refusal=_text(told, "refusal"),
        error=_text(told, "error"),
        finish_reason=_text(told, "finish_reason"),
        done=told.get("done", _ABSENT).bool_value,
        deltas=_count(told, "deltas") if "deltas" in told else None,
        delta_bytes=_count(told, "delta_bytes"),
        body_bytes=response.response_body_bytes,
        prompt_tokens=_count(told, "prompt_tokens") if "prompt_tokens" in told else None,
        completion_tokens=_count(told, "completion_tokens") if "completion_tokens" in told else None,
        cached_tokens=_count(told, "cached_tokens"),
        prompt_estimate=labels.prompt_estimate,
        context=0 if node is None else node.max_seq_len,
        output_asked=0 if labels.tags is None else labels.tags.output_tokens or 0,
        one_prompt=labels.operation == Operation.CHAT,
        generates=labels.operation not in _WITHOUT_OUTPUT,
        unread=told.get("unread", _ABSENT).bool_value,
        open_choices=_count(told, "open_choices"),
        total_tokens=_count(told, "total_tokens") if "total_tokens" in told else None,
        bad_usage=told.get("bad_usage", _ABSENT).bool_value,
        media=labels.media > 0,
    )


def _flags(flags: ResponseFlags) -> tuple[str, ...]:
    return tuple(_FLAGS[field.name] for field, _ in flags.ListFields() if field.name in _FLAGS)


def _endpoint(address: Address) -> str:
    if address.HasField("pipe"):
        return address.pipe.path
    return str(Endpoint(address.socket_address.address, address.socket_address.port_value))


def _count(told: _Fields, name: str) -> int:
    found = told.get(name)
    if found is None:
        return 0
    value = found.number_value
    return int(value) if 0.0 <= value < _EXACT else 0


def _text(told: _Fields, name: str) -> str:
    return told.get(name, _ABSENT).string_value


def _labels(told: _Fields) -> Labels:
    found = told.get("labels")
    if found is None:
        return _UNLABELLED
    try:
        return _decode(found.string_value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _UNLABELLED


def _sensitive(text: str) -> Sensitive | None:
    try:
        return _decode_sensitive(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _seconds(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < _SECONDS_DIGITS else None

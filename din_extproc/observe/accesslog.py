"""Envoy's access log -> one record per exchange that the gateway decided about, and one per attempt that failed at a node.

It comes in two forms: Fluentd records (`domain/access_log.py`, the cheaper one), and messages of the gRPC access log service for meshes
that can't set the other. Both become a `LogEntry`. Invariant: a record is made from what is there; a missing value or one of the wrong
type counts as not reported, never as an error.

Dynamic metadata, namespace `din`: of a request that it has read, the gateway leaves `labels` (`domain.usage.Labels` as JSON: one field,
because every field costs both sides); of one that it answered itself, `trace_id` and `refusal`,
and `sensitive` (`Sensitive` as JSON) where that is why. The usage of the node's answer comes from `envoy/lua/usage.lua`, see its head.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value
from msgspec import Struct

from din_extproc._proto.envoy.config.core.v3.address_pb2 import Address
from din_extproc._proto.envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon, HTTPAccessLogEntry, ResponseFlags, UpstreamEnd
from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.access_log import ATTEMPT_TAG, FLAG_NAMES
from din_extproc.domain.node import Endpoint, InternalEndpoint, Node
from din_extproc.domain.request import Metering, Operation
from din_extproc.domain.usage import ANSWER_TOO_LARGE, ExchangeRecord, FailedAttempt, Labels, Sensitive
from din_extproc.observe.outcome import ExchangeEnding, classify_outcome, compute_usage

NAMESPACE = "din"
_PERMITS = "envoy.filters.http.ext_authz"
"""Namespace of what the gateway leaves as an ext_authz service."""
_TOTAL_TIMEOUT = "response_timeout"
"""Envoy's word for the end of the whole request's time; that of one attempt is another."""
_NOT_HELD = "response_payload_too_large"
"""Envoy's word for an answer that is waited for and outgrows what it holds."""
_STOPPED = "lua_response"
"""Envoy's word for an answer of the script that sends a request to no third node (`control/break_limit.py`)."""
_NO_FLAGS: tuple[str, ...] = ()
_BROKEN = ("UC",)
_OURS = _PERMITS, NAMESPACE
_SCALARS = frozenset({"number_value", "string_value", "bool_value"})
_decode = msgspec.json.Decoder(Labels).decode
_decode_sensitive = msgspec.json.Decoder(Sensitive).decode
_UNLABELLED = Labels()
_EXACT = 2.0**53
"""Larger numbers are not whole tokens any more."""
_SECONDS_DIGITS = 10
_NO_NODES: Mapping[str, Node] = {}
_Logged = ExchangeRecord | FailedAttempt
_Fields = Mapping[str, Any]
"""The namespace's fields, those that are there."""


class LogEntry(Struct, gc=False):
    """One finished exchange as Envoy logged it. Times in milliseconds since its start; None: Envoy has none."""

    fields: _Fields
    """Dynamic metadata of the gateway and of the usage filter."""
    status: int
    flags: tuple[str, ...]
    endpoint: str
    """Address of the node; "" when no node was reached."""
    named: str
    """The id of the node at that address in the cluster that was asked: one address can be in two pools. "" where Envoy has none."""
    started_us: int
    duration_ms: float | None
    received_ms: float | None
    """The request's last byte."""
    sent_ms: float | None
    """The first byte toward the node."""
    answered: bool
    """Whether a byte of the node's response was received."""
    node_ended_ms: float | None
    attempts: int
    body_bytes: int
    details: str
    degraded: bool
    version: str
    stated_node: str
    stated_version: str
    retry_after: str


def read_records(message: bytes, nodes: Mapping[str, str], described: Mapping[str, Node] = _NO_NODES) -> Iterator[_Logged]:
    """Read one `StreamAccessLogsMessage`, record by record as they are asked for.

    Args:
        message: The serialised message.
        nodes: Node ids by endpoint, such as `10.0.0.7:8000` or `[fd00::10]:8000`. An unknown endpoint is used as the node's id.
        described: Nodes by id, as far as they are known.

    Returns:
        Finished exchanges that the gateway decided about, in the log's order. Others, such as Envoy's own answer to a broken
        request, leave no record. Between them, attempts at nodes that failed, also those of an exchange that failed for good.

    Raises:
        ValueError: These bytes are no such message.
    """
    try:
        entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    except DecodeError as error:
        raise ValueError("not an access log message") from error
    return _each(entries, nodes, described)


def read_fluentd_records(
    tag: str,
    entries: Iterable[Any],
    nodes: Mapping[str, str],
    described: Mapping[str, Node] = _NO_NODES,
    *,
    unreadable: Callable[[], None] = lambda: None,
) -> Iterator[_Logged]:
    """Read the entries `[time, record]` of one Fluentd message, in the same way and order as `records`.

    `unreadable` is called for each entry that is no record of ours.
    """
    for entry in entries:
        try:
            _, found = entry
            if tag == ATTEMPT_TAG:
                yield _fluentd_attempt(found, nodes, described)
                continue
            fields = found["m"] or found["z"]
            if fields:
                yield _record(_fluentd_entry(found, fields), nodes, described)
        except (TypeError, KeyError, ValueError, AttributeError):
            unreadable()


def _fluentd_entry(found: Mapping[str, Any], fields: _Fields) -> LogEntry:
    flags, answered = found["f"], found["a"]
    duration = found["d"]
    return LogEntry(
        fields={**found["z"], **fields} if found["z"] and fields is not found["z"] else fields,
        status=found["s"] or 0,
        flags=_NO_FLAGS if flags == "-" else tuple(flags.split(",")),
        endpoint=found["u"] or "",
        named=found.get("h") or "",
        started_us=int(found["t"].replace(".", "")),
        duration_ms=found["l"] if duration is None else duration / 1e3,
        received_ms=_scaled(found["r"]),
        sent_ms=_scaled(found["w"]),
        answered=answered is not None,
        node_ended_ms=_scaled(found["e"]),
        attempts=found["n"] or 0,
        body_bytes=found["b"] or 0,
        details=found["c"] or "",
        degraded=found["g"] == "true",
        version=found["v"] or "",
        stated_node=found.get("i") or "",
        stated_version=found.get("j") or "",
        retry_after=found["y"] or "",
    )


def _fluentd_attempt(found: Mapping[str, Any], nodes: Mapping[str, str], described: Mapping[str, Node]) -> FailedAttempt:
    return FailedAttempt(
        node_id=_node_id(found["u"] or "", found.get("h") or "", nodes, described),
        reason=str(found["s"] or 0) if found["f"] == "-" else found["f"],
        duration_ms=float(found["l"] or 0),
        started_at=float(found["t"]),
        traceparent=found["p"] or "",
        retry_after_s=_seconds(found.get("y") or ""),
        origin=found.get("o") or "",
        adapter=found.get("k") or "",
    )


def _node_id(endpoint: str, named: str, nodes: Mapping[str, str], described: Mapping[str, Node]) -> str:
    """Return the node that was asked: the named one if it is at this address, else the one that is known there."""
    found = nodes.get(endpoint, endpoint)
    if found == named or not named:
        return found
    known = described.get(named)
    return named if known is not None and str(known.endpoint) == endpoint else found


def _scaled(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e3


def _each(entries: Iterable[HTTPAccessLogEntry], nodes: Mapping[str, str], described: Mapping[str, Node]) -> Iterator[_Logged]:
    for entry in entries:
        common = entry.common_properties
        if common.access_log_type == UpstreamEnd:
            yield _attempt(entry, common, nodes)
        elif any(name in common.metadata.filter_metadata for name in _OURS) and not common.intermediate_log_entry:
            yield _record(_grpc_entry(entry, common), nodes, described)


def _attempt(entry: HTTPAccessLogEntry, common: AccessLogCommon, nodes: Mapping[str, str]) -> FailedAttempt:
    endpoint = _endpoint(common.upstream_remote_address) if common.HasField("upstream_remote_address") else ""
    flags = _flags(common.response_flags) if common.HasField("response_flags") else _NO_FLAGS
    return FailedAttempt(
        node_id=nodes.get(endpoint, endpoint),
        reason=",".join(flags) or str(entry.response.response_code.value),
        duration_ms=_ms(common.duration),
        started_at=common.start_time.seconds + common.start_time.nanos / 1e9,
        traceparent=entry.request.request_headers.get("traceparent", ""),
        retry_after_s=_seconds(entry.response.response_headers.get("retry-after", "")),
        origin=entry.request.request_headers.get("x-din-origin", ""),
        adapter=entry.request.request_headers.get("x-din-adapter", ""),
    )


def _grpc_entry(entry: HTTPAccessLogEntry, common: AccessLogCommon) -> LogEntry:
    spaces, response, has = common.metadata.filter_metadata, entry.response, common.HasField
    headers = response.response_headers
    return LogEntry(
        fields={name: _plain(value) for space in _OURS if space in spaces for name, value in spaces[space].fields.items()},
        status=response.response_code.value,
        flags=_flags(common.response_flags) if has("response_flags") else _NO_FLAGS,
        endpoint=_endpoint(common.upstream_remote_address) if has("upstream_remote_address") else "",
        named=headers.get("x-din-node-id", ""),
        started_us=common.start_time.seconds * 1_000_000 + common.start_time.nanos // 1000,
        duration_ms=_ms(common.duration) if has("duration") else None,
        received_ms=_ms(common.time_to_last_rx_byte) if has("time_to_last_rx_byte") else None,
        sent_ms=_ms(common.time_to_first_upstream_tx_byte) if has("time_to_first_upstream_tx_byte") else None,
        answered=has("time_to_first_upstream_rx_byte"),
        node_ended_ms=_ms(common.time_to_last_upstream_rx_byte) if has("time_to_last_upstream_rx_byte") else None,
        attempts=common.upstream_request_attempt_count,
        body_bytes=response.response_body_bytes,
        details=response.response_code_details,
        degraded=headers.get("x-bxagent-degraded") == "true",
        version=headers.get("x-din-model-version", ""),
        stated_node=headers.get("x-din-stated-node", ""),
        stated_version=headers.get("x-din-stated-version", ""),
        retry_after=headers.get("retry-after", ""),
    )


def _plain(value: Value) -> float | str | bool | None:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind in _SCALARS else None


def _record(entry: LogEntry, nodes: Mapping[str, str], described: Mapping[str, Node]) -> ExchangeRecord:
    fields, started_us = entry.fields, entry.started_us
    labels = _labels(fields)
    node_id = _node_id(entry.endpoint, entry.named, nodes, described)
    if entry.details == _STOPPED:
        node_id, entry.flags = "", _BROKEN
    ending = _ending(entry, labels, described.get(node_id))
    ended_as = classify_outcome(ending)
    moved = _text(fields, "moved_to")
    return ExchangeRecord(
        request_id=labels.request_id,
        trace_id=labels.trace_id or _text(fields, "trace_id"),
        tenant=labels.tenant,
        key_id=labels.key_id,
        unlisted=labels.unlisted,
        model=_text(fields, "moved_model") or labels.model,
        alias=labels.alias,
        pool=moved or labels.pool,
        rule=labels.rule,
        node_id=node_id,
        status=ending.status,
        outcome=ended_as,
        stream=labels.stream,
        usage=compute_usage(ending, ended_as),
        reserved_tokens=labels.reserved_tokens,
        prompt_estimate=labels.prompt_estimate,
        features=labels.features,
        fixed=labels.fixed,
        attempts=entry.attempts,
        degraded=labels.degraded or entry.degraded,
        started_at=started_us / 1e6,
        duration_ms=entry.duration_ms,
        first_token_ms=_since(started_us, fields, "first_token_us"),
        last_token_ms=_since(started_us, fields, "last_token_us"),
        response_flags=entry.flags,
        refusal=ending.refusal,
        error=ending.error or (ANSWER_TOO_LARGE if entry.details == _NOT_HELD else ""),
        bad_events=_count(fields, "bad_events"),
        retry_after_s=_seconds(entry.retry_after),
        operation=labels.operation,
        span=labels.span or _text(fields, "span"),
        version=entry.version,
        stated_node=entry.stated_node,
        stated_version=entry.stated_version,
        received_ms=entry.received_ms,
        sent_ms=entry.sent_ms,
        node_ended_ms=entry.node_ended_ms,
        decided_ms=labels.decided_us / 1e3 if labels.decided_us else None,
        waited_ms=labels.waited_us / 1e3,
        would_refuse=labels.would_refuse,
        tags=labels.tags,
        inspected=labels.inspected,
        origin=labels.origin,
        sensitive=labels.sensitive or _sensitive(_text(fields, "sensitive")),
        moved_from=labels.pool if moved else "",
        left_site=entry.sent_ms is not None and (labels.left_site or _is_remote(described.get(node_id))),
        deadline_exceeded=entry.details == _TOTAL_TIMEOUT,
        media=labels.media,
    )


def _is_remote(node: Node | None) -> bool:
    return node is not None and node.remote is not None


def _since(started_us: int, fields: _Fields, name: str) -> float | None:
    """Return the milliseconds from the start to a reported moment."""
    return max(0.0, (_count(fields, name) - started_us) / 1e3) if name in fields else None


def _ms(duration: Duration) -> float:
    return duration.seconds * 1e3 + duration.nanos / 1e6


def _ending(entry: LogEntry, labels: Labels, node: Node | None) -> ExchangeEnding:
    fields = entry.fields
    return ExchangeEnding(
        status=entry.status,
        flags=frozenset(entry.flags),
        reached=bool(entry.endpoint) or entry.details == _STOPPED,
        answered=entry.answered,
        refusal=_text(fields, "refusal"),
        error=_text(fields, "error"),
        fault=_text(fields, "fault"),
        finish_reason=_text(fields, "finish_reason"),
        done=fields.get("done") is True,
        deltas=_count(fields, "deltas") if "deltas" in fields else None,
        delta_bytes=_count(fields, "delta_bytes"),
        body_bytes=entry.body_bytes,
        prompt_tokens=_count(fields, "prompt_tokens") if "prompt_tokens" in fields else None,
        completion_tokens=_count(fields, "completion_tokens") if "completion_tokens" in fields else None,
        cached_tokens=_count(fields, "cached_tokens"),
        prompt_estimate=labels.prompt_estimate,
        context=0 if node is None else node.max_seq_len,
        output_asked=0 if labels.tags is None else labels.tags.output_tokens or 0,
        one_prompt=labels.operation == Operation.CHAT,
        charged=labels.metering != Metering.REQUEST,
        generates=not labels.metering,
        images=labels.images,
        audio_estimate=labels.audio_seconds,
        audio_seconds=_count(fields, "audio_seconds") if labels.metering == Metering.SECONDS else 0,
        unread=fields.get("unread") is True,
        open_choices=_count(fields, "open_choices"),
        total_tokens=_count(fields, "total_tokens") if "total_tokens" in fields else None,
        bad_usage=fields.get("bad_usage") is True,
        media=labels.media > 0,
    )


def _flags(flags: ResponseFlags) -> tuple[str, ...]:
    return tuple(FLAG_NAMES[field.name] for field, _ in flags.ListFields() if field.name in FLAG_NAMES)


def _endpoint(address: Address) -> str:
    if address.HasField("envoy_internal_address"):
        return str(InternalEndpoint(address.envoy_internal_address.server_listener_name, 0))
    socket = address.socket_address
    return address.pipe.path or str(Endpoint(socket.address, socket.port_value))


def _count(fields: _Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is int or type(value) is float:
        return int(value) if 0 <= value < _EXACT else 0
    return 0


def _text(fields: _Fields, name: str) -> str:
    value = fields.get(name)
    return value if type(value) is str else ""


def _labels(fields: _Fields) -> Labels:
    text = _text(fields, "labels")
    try:
        return _decode(text) if text else _UNLABELLED
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _UNLABELLED


def _sensitive(text: str) -> Sensitive | None:
    try:
        return _decode_sensitive(text) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _seconds(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < _SECONDS_DIGITS else None

"""Bytes of Envoy's access log -> records."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from din_extproc._proto.envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry, UpstreamEnd
from din_extproc._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from din_extproc.domain.access_log import EXCHANGE_RECORD, FLAG_NAMES
from din_extproc.domain.usage import FailedAttempt, Labels, Outcome, Tags, Usage
from din_extproc.observe.accesslog import read_fluentd_records, read_records

SENT = Labels(
    request_id="r-1",
    trace_id="t-1",
    tenant="finance",
    key_id="k",
    model="m",
    alias="bx",
    pool="p",
    rule="fast",
    reserved_tokens=300,
    prompt_estimate=44,
    features=(1.0, 2.5, 0.0),
    fixed=3,
    stream=True,
    decided_us=2500,
    waited_us=2000,
)


def labels(**changed: Any) -> dict[str, Any]:
    """The gateway's metadata of a request that it sent on."""
    sent = replace(SENT, **changed)
    return {"request_id": sent.request_id, "labels": msgspec.json.encode(sent).decode(), "strip_usage": True}


LABELS = labels()
COUNTS: dict[str, Any] = {
    "prompt_tokens": 40,
    "completion_tokens": 10,
    "cached_tokens": 8,
    "deltas": 10,
    "delta_bytes": 40,
    "first_token_us": 1_700_000_000_250_500,
    "last_token_us": 1_700_000_000_850_500,
    "finish_reason": "stop",
    "done": True,
    "bad_events": 1,
}


def entry(metadata: dict[str, Any], *flags: str, port: int = 8000) -> HTTPAccessLogEntry:
    made = HTTPAccessLogEntry()
    common = made.common_properties
    common.start_time.FromMicroseconds(1_700_000_000_000_500)
    common.duration.FromMicroseconds(912_345)
    common.time_to_first_upstream_rx_byte.FromMicroseconds(3_000)
    common.time_to_last_upstream_rx_byte.FromMicroseconds(912_000)
    common.upstream_remote_address.socket_address.address = "10.0.0.7"
    common.upstream_remote_address.socket_address.port_value = port
    common.upstream_request_attempt_count = 2
    for flag in flags:
        setattr(common.response_flags, flag, True)
    common.metadata.filter_metadata["din"].update(metadata)
    made.response.response_code.value = 200
    made.response.response_body_bytes = 4000
    return made


def message(*entries: HTTPAccessLogEntry) -> bytes:
    made = StreamAccessLogsMessage()
    made.http_logs.log_entry.extend(entries)
    return made.SerializeToString()


def test_everything_that_was_left_for_it_comes_back_in_the_record() -> None:
    [record] = read_records(message(entry({**LABELS, **COUNTS})), {"10.0.0.7:8000": "gpu-07"})
    assert (record.request_id, record.trace_id, record.tenant, record.key_id) == ("r-1", "t-1", "finance", "k")
    assert (record.model, record.alias, record.pool, record.rule, record.node_id) == ("m", "bx", "p", "fast", "gpu-07")
    assert (record.outcome, record.status, record.stream, record.attempts) == (Outcome.COMPLETED, 200, True, 2)
    assert record.usage == Usage(40, 10, 8)
    assert (record.reserved_tokens, record.prompt_estimate, record.features, record.fixed) == (300, 44, (1.0, 2.5, 0.0), 3)
    assert (record.duration_ms, record.first_token_ms, record.last_token_ms) == (912.345, 250.0, 850.0)
    assert (record.decided_ms, record.waited_ms, record.node_ended_ms) == (2.5, 2.0, 912.0)
    assert record.started_at == pytest.approx(1_700_000_000.0005, abs=1e-6)
    assert (record.response_flags, record.degraded, record.refusal, record.error, record.bad_events) == ((), False, "", "", 1)


def test_a_batch_gives_its_records_in_order_and_skips_what_the_gateway_did_not_decide() -> None:
    foreign, running = entry({}), entry(labels(request_id="r-2"))
    del foreign.common_properties.metadata.filter_metadata["din"]
    running.common_properties.intermediate_log_entry = True
    last = entry(labels(request_id="r-3"))
    assert [record.request_id for record in read_records(message(entry(LABELS), foreign, running, last), {})] == ["r-1", "r-3"]


def test_a_node_that_nobody_knows_is_named_by_its_endpoint() -> None:
    six = entry(LABELS)
    six.common_properties.upstream_remote_address.socket_address.address = "fd00::10"
    found = list(read_records(message(entry(LABELS, port=9), six), {"[fd00::10]:8000": "gpu-10"}))
    assert [record.node_id for record in found] == ["10.0.0.7:9", "gpu-10"]


def test_a_refusal_has_no_node_and_costs_nothing() -> None:
    refused = entry({"trace_id": "t-1", "refusal": "invalid_api_key"})
    refused.common_properties.ClearField("upstream_remote_address")
    refused.response.response_code.value = 401
    [record] = read_records(message(refused), {})
    assert (record.outcome, record.refusal, record.node_id, record.usage) == (Outcome.REFUSED, "invalid_api_key", "", Usage(0, 0))


def test_a_refusal_brings_back_whose_it_is_and_what_was_asked() -> None:
    sent_labels = Labels(
        tenant="finance", key_id="k", operation="/v1/chat/completions", prompt_estimate=7, tags=Tags("bx", 64, ">=1", "light")
    )
    refused = entry({"trace_id": "t-1", "refusal": "rate_limit_exceeded", "labels": msgspec.json.encode(sent_labels).decode()})
    refused.response.response_code.value = 429
    [record] = read_records(message(refused), {})
    assert (record.tenant, record.key_id, record.outcome, record.usage) == ("finance", "k", Outcome.REFUSED, Usage(0, 0))
    assert (record.tags, record.prompt_estimate, record.operation) == (sent_labels.tags, 7, "/v1/chat/completions")


def test_flags_come_back_as_envoys_short_codes() -> None:
    [record] = read_records(message(entry(LABELS, "upstream_connection_failure", "upstream_retry_limit_exceeded")), {})
    assert record.response_flags == ("UF", "URX")


def test_every_flag_that_is_read_has_a_code() -> None:
    fields = {
        field.name
        for field in HTTPAccessLogEntry.DESCRIPTOR.fields_by_name["common_properties"]
        .message_type.fields_by_name["response_flags"]
        .message_type.fields
    }
    assert set(FLAG_NAMES) == fields


def test_the_headers_of_a_fallback_and_of_a_busy_node_are_read() -> None:
    busy = entry(LABELS)
    busy.response.response_code.value = 429
    busy.response.response_headers.update({"retry-after": "7", "x-bxagent-degraded": "true"})
    odd = entry(LABELS)
    odd.response.response_headers["retry-after"] = "Sun, 29 Nov 2026 20:00:00 GMT"
    first, second = read_records(message(busy, odd), {})
    assert (first.outcome, first.retry_after_s, first.degraded) == (Outcome.UPSTREAM_BUSY, 7, True)
    assert (second.retry_after_s, second.degraded) == (None, False)


@pytest.mark.parametrize("odd", ["x", True, -5.0, float("nan"), float("inf"), [1], {"a": 1}, None])
def test_metadata_of_the_wrong_type_counts_as_missing(odd: Any) -> None:
    [record] = read_records(message(entry(dict.fromkeys([*LABELS, *COUNTS], odd))), {})
    assert record.usage.total_tokens == 0
    assert (record.request_id, record.features) == ("", ())


@pytest.mark.parametrize("odd", ["", "{", "[]", "null", '{"tenant":7}', '{"features":["x"]}', '{"reserved_tokens":1.5}'])
def test_invalid_labels_count_as_missing(odd: str) -> None:
    made = entry({})
    made.common_properties.metadata.filter_metadata["din"].fields["labels"].string_value = odd
    [record] = read_records(message(made), {})
    assert (record.request_id, record.tenant, record.reserved_tokens, record.features) == ("", "", 0, ())


def test_an_entry_without_anything_is_a_record_of_nothing() -> None:
    bare = HTTPAccessLogEntry()
    bare.common_properties.metadata.filter_metadata["din"].SetInParent()
    [record] = read_records(message(bare), {})
    assert (record.outcome, record.status, record.duration_ms, record.first_token_ms) == (Outcome.NOT_DISPATCHED, 0, None, None)


def test_bytes_that_are_no_log_are_refused() -> None:
    assert list(read_records(b"", {})) == []
    with pytest.raises(ValueError, match="not an access log message"):
        read_records(b"\xff\xff\xff", {})


def test_attempts_that_failed_come_between_with_node_and_reason() -> None:
    refused, broken = entry({}, "upstream_connection_failure"), entry({}, port=9)
    for each in (refused, broken):
        each.request.request_headers["traceparent"] = "00-a-b-01"
        del each.common_properties.metadata.filter_metadata["din"]
        each.common_properties.access_log_type = UpstreamEnd
    broken.response.response_code.value = 503
    first, second, record = read_records(message(refused, broken, entry(LABELS)), {"10.0.0.7:8000": "gpu-07"})
    assert first == FailedAttempt("gpu-07", "UF", 912.345, first.started_at, "00-a-b-01")
    assert first.started_at == pytest.approx(1_700_000_000.0005, abs=1e-6)
    assert second == FailedAttempt("10.0.0.7:9", "503", 912.345, first.started_at, "00-a-b-01")
    assert record.request_id == "r-1"


def test_a_request_that_moved_in_flight_is_the_other_pools() -> None:
    [record] = read_records(message(entry({**LABELS, "moved_to": "light", "moved_model": "small"})), {})
    assert (record.pool, record.model, record.moved_from) == ("light", "small", "p")


def test_an_answer_that_was_too_large_to_be_held_is_named() -> None:
    large = entry(LABELS)
    large.response.response_code_details = "response_payload_too_large"
    assert [record.error for record in read_records(message(large, entry(LABELS)), {})] == ["answer_too_large", ""]


def test_the_end_of_the_whole_requests_time_is_distinguished_from_that_of_one_attempt() -> None:
    late, silent = entry(LABELS, "upstream_request_timeout"), entry(LABELS, "upstream_request_timeout")
    late.response.response_code_details, silent.response.response_code_details = "response_timeout", "upstream_per_try_timeout"
    assert [record.deadline_exceeded for record in read_records(message(late, silent), {})] == [True, False]


def fluentd(metadata: dict[str, Any] | None, **changed: Any) -> list[Any]:
    """One entry of Envoy's Fluentd logger, like `entry`."""
    record = {
        **dict.fromkeys(EXCHANGE_RECORD),
        "m": metadata,
        "s": 200,
        "f": "-",
        "u": "10.0.0.7:8000",
        "t": "1700000000.000500",
        "d": 912_345,
        "l": 912,
        "r": 500,
        "w": 900,
        "a": 3_000,
        "e": 912_000,
        "n": 2,
        "b": 4000,
        "c": "via_upstream",
    }
    return [1_700_000_000, record | changed]


def test_both_forms_of_the_log_give_the_same_record() -> None:
    flags = ("upstream_connection_failure", "upstream_retry_limit_exceeded")
    for metadata in ({**LABELS, **COUNTS}, {"trace_id": "t-1", "refusal": "invalid_api_key"}):
        logged = entry(metadata, *flags)
        logged.common_properties.time_to_last_rx_byte.FromMicroseconds(500)
        logged.common_properties.time_to_first_upstream_tx_byte.FromMicroseconds(900)
        logged.response.response_headers.update({"retry-after": "7", "x-bxagent-degraded": "true", "x-din-model-version": "1.2"})
        same = fluentd(metadata, f="UF,URX", y="7", g="true", v="1.2")
        nodes = {"10.0.0.7:8000": "gpu-07"}
        assert list(read_fluentd_records("din", [same], nodes)) == list(read_records(message(logged), nodes))


def test_entries_that_the_gateway_did_not_decide_leave_no_record() -> None:
    entries = [fluentd(None), fluentd(LABELS), fluentd({})]
    assert [record.request_id for record in read_fluentd_records("din", entries, {})] == ["r-1"]


def test_metadata_of_ext_authz_is_read_too() -> None:
    [record] = read_fluentd_records("din", [fluentd(COUNTS, z=LABELS)], {})
    assert (record.request_id, record.usage) == ("r-1", Usage(40, 10, 8))


@pytest.mark.parametrize("odd", [[1], 7, [1, None], [1, {}], fluentd(LABELS, t=None), fluentd(LABELS, f=None), fluentd(LABELS, m=[1])])
def test_an_entry_that_is_no_record_is_counted_and_the_others_are_read(odd: Any) -> None:
    seen: list[int] = []
    found = list(read_fluentd_records("din", [odd, fluentd(LABELS)], {}, unreadable=lambda: seen.append(1)))
    assert [record.request_id for record in found] == ["r-1"]
    assert seen == [1]


def test_a_failed_attempt_of_the_fluentd_log_names_its_node_and_reason() -> None:
    attempt = {"s": 0, "f": "UF", "u": "10.0.0.7:8000", "t": "1700000000.5", "l": 12, "p": "00-a-b-01"}
    answered = attempt | {"s": 503, "f": "-", "p": None}
    found = list(read_fluentd_records("din_attempts", [[1, attempt], [1, answered]], {"10.0.0.7:8000": "gpu-07"}))
    assert found == [
        FailedAttempt(node_id="gpu-07", reason="UF", duration_ms=12.0, started_at=1_700_000_000.5, traceparent="00-a-b-01"),
        FailedAttempt(node_id="gpu-07", reason="503", duration_ms=12.0, started_at=1_700_000_000.5, traceparent=""),
    ]


@pytest.mark.parametrize("endpoint", ["10.0.0.9:8000", None])
def test_a_request_that_was_stopped_on_its_way_to_a_third_node_ended_by_its_breaks_and_names_no_node(endpoint) -> None:
    [record] = read_fluentd_records("din", [fluentd(LABELS, s=502, c="lua_response", u=endpoint, a=None)], {"10.0.0.9:8000": "gpu-9"})
    assert (record.node_id, record.outcome, record.ended_by_break) == ("", Outcome.UPSTREAM_ERROR, True)
    assert record.usage.total_tokens == 0

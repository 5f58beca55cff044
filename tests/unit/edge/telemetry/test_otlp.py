"""Spans and metrics as a collector gets them."""

import ssl

import pytest
from msgspec.structs import replace

from din_extproc.domain.usage import ExchangeRecord, FailedAttempt, Outcome, Usage
from din_extproc.edge.telemetry.otlp import OtlpExporter
from din_extproc.edge.tls import ClientFiles
from din_extproc.observe.exchange_metrics import ExchangeMetrics
from din_extproc.observe.spans import build_attempt_span, build_spans, derive_node_span_id
from tests.support.certificates import Authority
from tests.support.collector import Collector

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "00000000000000a1", "b7ad6b7169203331"
RECORD = ExchangeRecord(
    request_id="r", trace_id="client-trace", tenant="acme", key_id="k", model="m", alias="a", pool="p", rule="r1", node_id="gpu-7",
    status=200, outcome=Outcome.COMPLETED, stream=True, usage=Usage(100, 11, 40), reserved_tokens=300, prompt_estimate=110, features=(),
    fixed=0, attempts=2, degraded=False, started_at=1_700_000_000.0, duration_ms=1300.0, first_token_ms=300.0,
    operation="/v1/chat/completions", received_ms=2.0, sent_ms=10.0, span=f"{TRACE}-{SPAN}-{PARENT}", version="2025.3.1",
)  # fmt: skip


@pytest.fixture
def collector():
    with Collector() as running:
        yield running


def exporter(collector: Collector, metrics: ExchangeMetrics | None = None) -> OtlpExporter:
    families = (metrics or ExchangeMetrics()).collect_families
    return OtlpExporter(collector.endpoint, {"authorization": "Bearer t"}, {"service.name": "din"}, 2.0, families)


async def test_an_exchange_becomes_four_spans_that_hang_together(collector):
    exports = exporter(collector)
    exports.on_exchange(RECORD)
    exports.on_exchange(replace(RECORD, span=""))
    await exports.push_spans()
    found = {span["name"]: span for span in collector.spans}
    assert list(found) == ["chat m", "din.admission", "din.node", "din.stream"]
    assert {span["trace_id"] for span in found.values()} == {TRACE}
    root, node = found["chat m"], found["din.node"]
    assert (root["span_id"], root["parent_id"], root["kind"], root["error"]) == (SPAN, PARENT, 2, "")
    assert found["din.admission"]["parent_id"] == node["parent_id"] == SPAN
    assert node["span_id"] == derive_node_span_id(SPAN) == found["din.stream"]["parent_id"]
    start = 1_700_000_000 * 10**9
    assert (root["start_ns"] - start, root["end_ns"] - start) == (0, 1_300_000_000)
    assert (found["din.admission"]["start_ns"] - start, found["din.admission"]["end_ns"] - start) == (2_000_000, 10_000_000)
    assert node["events"] == [("first_token", start + 300_000_000)]
    assert (found["din.stream"]["start_ns"] - start, found["din.stream"]["end_ns"] - start) == (300_000_000, 1_300_000_000)
    assert root["attributes"]["din.trace_id"] == "client-trace"
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 11
    assert (node["attributes"]["din.attempts"], node["attributes"]["din.node.id"]) == (2, "gpu-7")
    assert collector.resource["service.name"] == "din"
    assert collector.headers[0]["authorization"] == "Bearer t"
    assert exports.exported == 4


async def test_attempts_that_failed_are_spans_of_their_own_in_the_exchange_s_trace(collector):
    exports = exporter(collector)
    sent = f"00-{TRACE}-{derive_node_span_id(SPAN)}-01"
    exports.on_attempt_failed(FailedAttempt("gpu-1", "UF", 20.0, 1_700_000_000.02, sent))
    exports.on_attempt_failed(FailedAttempt("gpu-2", "503", 30.0, 1_700_000_000.05, sent))
    exports.on_exchange(replace(RECORD, sent_ms=80.0, attempts=3))
    exports.on_attempt_failed(FailedAttempt("gpu-1", "UF", 20.0, 1_700_000_000.02))
    await exports.push_spans()
    first, second = (span for span in collector.spans if span["name"] == "din.attempt")
    assert {span["trace_id"] for span in collector.spans} == {TRACE}
    assert len({span["span_id"] for span in collector.spans}) == 6
    assert (first["parent_id"], first["kind"], first["error"], first["attributes"]["din.node.id"]) == (SPAN, 3, "UF", "gpu-1")
    assert (second["error"], second["end_ns"] - second["start_ns"]) == ("503", 30_000_000)
    (way,) = (span for span in collector.spans if span["name"] == "din.node")
    assert first["end_ns"] <= second["start_ns"] < second["end_ns"] <= way["start_ns"]


@pytest.mark.parametrize("given", ["", "x", f"00-{TRACE}-{PARENT}-00", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"])
def test_an_attempt_of_an_exchange_without_spans_has_none(given):
    assert build_attempt_span(FailedAttempt("gpu-1", "UF", 1.0, 1.0, given)) is None


def test_a_refusal_is_one_span_with_its_code():
    refused = replace(RECORD, outcome=Outcome.REFUSED, refusal="rate_limit_exceeded", model="", operation="", sent_ms=None, node_id="")
    (span,) = build_spans(refused)
    assert (span.name, span.error, span.attributes["error.type"]) == ("refused", "rate_limit_exceeded", "rate_limit_exceeded")


async def test_a_collector_that_takes_nothing_costs_spans_and_nothing_else(collector):
    exports = exporter(collector)
    collector.status = 503
    for _ in range(3):
        exports.on_exchange(RECORD)
    await exports.push_spans()
    assert (exports.exported, exports.dropped) == (0, 3)
    collector.status = 200
    exports.on_exchange(RECORD)
    await exports.push_spans()
    assert (exports.exported, exports.dropped) == (4, 3)
    for _ in range(5000):
        exports.on_exchange(RECORD)
    assert exports.dropped == 3 + 5000 - 4096
    gone = OtlpExporter("http://127.0.0.1:9", {}, {}, 0.5, ExchangeMetrics().collect_families)
    gone.on_exchange(RECORD)
    await gone.push_spans()
    await gone.push_metrics()
    assert gone.dropped == 1


async def test_a_collector_behind_mutual_tls_is_reached_with_the_right_files_only(tmp_path):
    authority, other_authority = Authority(tmp_path), Authority(tmp_path, "other")
    port = authority.issue("collector", "127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(port["cert"], port["key"])
    server.load_verify_locations(str(authority.file))
    server.verify_mode = ssl.CERT_REQUIRED
    own = authority.issue("din", "din")
    with Collector(server) as behind:
        for files, taken in (
            (None, 0),
            (ClientFiles(str(authority.file)), 0),
            (ClientFiles(str(other_authority.file), **own), 0),
            (ClientFiles(str(authority.file), **own, server_name="another"), 0),
            (ClientFiles(str(authority.file), **own), 4),
        ):
            exports = OtlpExporter(behind.endpoint, {}, {"service.name": "din"}, 5.0, ExchangeMetrics().collect_families, files)
            exports.on_exchange(RECORD)
            await exports.push_spans()
            assert exports.exported == taken, files
    assert len(behind.spans) == 4


async def test_metrics_are_pushed_under_their_names_with_units_and_buckets(collector):
    metrics = ExchangeMetrics()
    metrics.on_exchange(RECORD)
    metrics.on_exchange(RECORD)
    await exporter(collector, metrics).push_metrics()
    (tokens,) = collector.metrics["din.tokens"]
    assert (tokens.unit, tokens.sum.is_monotonic) == ("{token}", True)
    assert {point.as_double or point.as_int for point in tokens.sum.data_points} == {200, 22, 80}
    (first,) = collector.metrics["gen_ai.server.time_to_first_token"]
    (point,) = first.histogram.data_points
    assert (point.count, point.sum, list(point.bucket_counts).index(2)) == (2, pytest.approx(0.6), 9)
    assert list(point.explicit_bounds)[9] == 0.5
    assert {pair.key: pair.value.string_value for pair in point.attributes} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "din.tenant.id": "acme",
    }

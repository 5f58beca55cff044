"""Finished exchanges -> families -> a page that Prometheus reads."""

import math
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.observe import instruments as of
from din_extproc.observe.exchange_metrics import ExchangeMetrics, time_per_output_token_s
from din_extproc.observe.exposition import render_slices
from din_extproc.observe.families import Counts, Distributions, Family, make_family, make_labelled_family
from tests.support.promql import sample_names


def record(**fields: Any) -> ExchangeRecord:
    pairs = {
        "request_id": "r", "trace_id": "t", "tenant": "acme", "key_id": "k", "model": "m", "alias": "a", "pool": "p", "rule": "r1",
        "node_id": "n", "status": 200, "outcome": Outcome.COMPLETED, "stream": True, "usage": Usage(100, 11, 40), "reserved_tokens": 300,
        "prompt_estimate": 110, "features": (), "fixed": 0, "attempts": 1, "degraded": False, "started_at": 1.0, "duration_ms": 1300.0,
        "first_token_ms": 300.0, "last_token_ms": 1300.0, "operation": "/v1/chat/completions", "received_ms": 2.0, "sent_ms": 10.0,
    }  # fmt: skip
    return ExchangeRecord(**{**pairs, **fields})


def page(families) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The page as a parser that is not ours reads it."""
    read: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(b"".join(render_slices(families)).decode()):
        for sample in family.samples:
            read.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return read


def labels(**pairs: str) -> frozenset[tuple[str, str]]:
    return frozenset(pairs.items())


def test_tenants_that_are_not_listed_share_one_name_and_leave_room_for_others():
    metrics = ExchangeMetrics(cap=50)
    for number in range(1000):
        metrics.on_exchange(record(tenant=f"team-{number}", key_id=f"jwt:user-{number}", unlisted=True))
    metrics.on_exchange(record())
    read = page(metrics.collect_families())
    requests = read["din_requests_identified_total"]
    assert requests[labels(din_tenant_id="(unlisted)", din_identity="jwt")] == 1000
    assert requests[labels(din_tenant_id="acme", din_identity="key")] == 1
    assert "team-" not in str(read)
    assert "user-" not in str(read)
    assert sum(read["din_metrics_folded_total"].values()) == 0


def test_an_exchange_is_counted_by_tenant_model_and_node_under_the_conventions_names():
    metrics = ExchangeMetrics()
    metrics.on_exchange(record())
    metrics.on_exchange(record(outcome=Outcome.UPSTREAM_ERROR, usage=Usage(5, 0, estimated=True), first_token_ms=None, attempts=3))
    read = page(metrics.collect_families())
    who = {"din_tenant_id": "acme", "gen_ai_request_model": "m"}
    chat = {**who, "gen_ai_operation_name": "chat"}
    assert read["din_tokens_total"][labels(**who, gen_ai_token_type="input", din_usage_estimated="false")] == 100
    assert read["din_tokens_total"][labels(**who, gen_ai_token_type="output", din_usage_estimated="false")] == 11
    assert read["din_tokens_total"][labels(**who, gen_ai_token_type="cached", din_usage_estimated="false")] == 40
    assert read["din_tokens_total"][labels(**who, gen_ai_token_type="input", din_usage_estimated="true")] == 5
    assert read["din_requests_total"][labels(**who, din_pool_name="p", din_outcome="upstream_error")] == 1
    assert read["din_requests_retries_total"][labels(gen_ai_request_model="m", din_pool_name="p")] == 2
    assert read["gen_ai_server_time_to_first_token_seconds_sum"][labels(**chat)] == pytest.approx(0.3)
    assert read["gen_ai_server_time_to_first_token_seconds_bucket"][labels(**chat, le="0.25")] == 0
    assert read["gen_ai_server_time_to_first_token_seconds_bucket"][labels(**chat, le="0.5")] == 1
    assert read["gen_ai_server_time_per_output_token_seconds_sum"][labels(**chat)] == pytest.approx(0.1)
    assert read["gen_ai_client_token_usage_sum"][labels(**chat, gen_ai_token_type="input")] == 105
    assert read["gen_ai_server_request_duration_seconds_count"][labels(**chat, error_type="upstream_error")] == 1
    assert read["gen_ai_server_request_duration_seconds_count"][labels(**chat)] == 1
    assert read["din_node_tokens_total"][labels(din_node_id="n", gen_ai_request_model="m", gen_ai_token_type="output")] == 11
    assert read["din_node_time_to_first_token_seconds_sum"][labels(din_node_id="n", gen_ai_request_model="m")] == pytest.approx(0.29)
    assert read["din_request_queue_duration_seconds_sum"][labels(**who)] == pytest.approx(0.016)
    assert read["din_prompt_estimate_error_sum"][labels(gen_ai_request_model="m")] == pytest.approx(0.1)
    assert read["din_tokens_reserved_total"][labels(**who)] == 600


def test_a_refusal_counts_for_its_tenant_and_has_neither_tokens_nor_times():
    metrics = ExchangeMetrics()
    metrics.on_exchange(record(outcome=Outcome.REFUSED, refusal="rate_limit_exceeded", model="", pool="", usage=Usage(0, 0)))
    read = page(metrics.collect_families())
    assert read["din_requests_total"] == {labels(din_tenant_id="acme", din_outcome="refused"): 1}
    assert "din_tokens_total" not in read
    assert "gen_ai_server_request_duration_seconds_count" not in read


def test_only_completed_streams_have_a_time_per_token():
    assert time_per_output_token_s(record()) == pytest.approx(0.1)
    for other in (
        record(outcome=Outcome.CLIENT_CANCELLED), record(first_token_ms=None), record(last_token_ms=None), record(usage=Usage(9, 1)),
    ):  # fmt: skip
        assert time_per_output_token_s(other) is None


def test_a_family_past_its_cap_counts_as_other_and_says_so():
    counts = Counts(of.NODE_REQUESTS, cap=3)
    for at in range(10):
        counts.add((f"node-{at}", "m", "completed"), 2)
    counts.add(("node-0", "m", "completed"))
    read = page([counts.family()])["din_node_requests_total"]
    other = labels(din_node_id="other", gen_ai_request_model="other", din_outcome="other")
    assert read[other] == 14
    assert read[labels(din_node_id="node-0", gen_ai_request_model="m", din_outcome="completed")] == 3
    assert len(read) == 4
    assert counts.folded == 7
    spread = Distributions(of.NODE_DURATION, cap=1)
    spread.record(("a", "m"), 1.0)
    spread.record(("b", "m"), 1.0)
    spread.record(("c", "m"), 1.0)
    assert len(spread.values) == 2
    assert spread.folded == 2
    metrics = ExchangeMetrics(cap=1)
    metrics.on_exchange(record())
    metrics.on_exchange(record(node_id="another", tenant="another"))
    read = page(metrics.collect_families())
    assert read["din_metrics_folded_total"][labels()] > 5
    assert sum(read["din_requests_total"].values()) == 2


def test_odd_names_are_shortened_and_escaped_and_the_page_still_parses():
    name = 'a"b\\c\nd' + "x" * 300
    counts = Counts(of.BAD_EVENTS)
    counts.add((name,))
    counts.add((name,))
    ((read, value),) = page([counts.family()])["din_node_bad_events_total"].items()
    assert dict(read)["din_node_id"] == name[:128]
    assert value == 2


def test_names_with_percent_signs_and_other_alphabets_stand_in_histograms_as_they_are():
    spread = Distributions(of.NODE_FIRST_TOKEN)
    for name in ("100%d %s", "узел-7", 'a"b\\c'):
        spread.record((name, ""), 0.3)
    read = page([spread.family()])["din_node_time_to_first_token_seconds_count"]
    assert read == {labels(din_node_id=name): 1 for name in ("100%d %s", "узел-7", 'a"b\\c')}


def test_a_family_that_grows_while_it_is_shown_is_shown_as_it_was():
    counts = Counts(of.BAD_EVENTS)
    counts.add(("a",))
    counts.add(("b",))
    remaining = iter(counts.family().points)
    assert next(remaining) == (("a",), 1)
    counts.add(("c",))
    assert list(remaining) == [(("b",), 1)]


def test_what_is_not_reported_or_no_number_is_left_out():
    pairs = make_labelled_family(of.NODE_KV, (("a", 0.5), ("b", None), ("c", math.nan), ("d", math.inf)))
    assert page([pairs]) == {"din_node_kv_cache_usage_ratio": {labels(din_node_id="a"): 0.5}}
    assert page([Family(of.NODE_KV, ())]) == {}


def test_a_page_comes_in_slices_that_end_with_a_line():
    spread = Distributions(of.NODE_DURATION)
    for at in range(200):
        spread.record((f"n{at}", "m"), 0.1)
    parts = list(render_slices([spread.family(), make_family(of.READY, 1)]))
    assert len(parts) > 5
    assert all(part.endswith(b"\n") and part.count(b"\n") < 450 for part in parts)
    assert b"".join(parts).count(b"# TYPE") == 2


def test_every_instrument_has_one_name_and_the_names_that_prometheus_derives():
    assert len({each.prometheus for each in of.ALL}) == len(of.ALL)
    assert of.TIME_TO_FIRST_TOKEN.prometheus == "gen_ai_server_time_to_first_token_seconds"
    assert of.TOKENS.prometheus == "din_tokens_total"
    assert of.NODE_TRUST.prometheus == "din_node_trust_ratio"
    assert sample_names(of.TOKEN_USAGE) == (
        "gen_ai_client_token_usage_bucket",
        "gen_ai_client_token_usage_sum",
        "gen_ai_client_token_usage_count",
    )
    assert all(each.bounds == tuple(sorted(each.bounds)) for each in of.ALL)
    assert all((each.kind is of.InstrumentKind.HISTOGRAM) == bool(each.bounds) for each in of.ALL)

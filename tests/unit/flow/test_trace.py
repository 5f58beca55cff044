"""Trace ids: sortable, tellable, never twice."""

import pytest

from din_extproc.flow.trace import Sampler, SpanContext, TraceIds, is_trace_id


def test_an_id_tells_when_and_where_it_was_made():
    made = TraceIds(node_number=7, start=41).make(1_795_982_112.25)
    assert len(made) == 32
    assert int(made[:12], 16) == 1_795_982_112_250
    assert int(made[12:16], 16) == 7
    assert int(made[16:], 16) == 42


def test_ids_sort_by_time_and_never_repeat_even_where_the_count_wraps():
    ids = TraceIds(node_number=65535, start=(1 << 64) - 3)
    made = [ids.make(1000.0 + n / 1000) for n in range(10)]
    assert made == sorted(made)
    assert len(set(made)) == 10
    assert is_trace_id(made[0])


def test_a_clients_id_is_kept_only_when_it_is_harmless():
    assert is_trace_id("req-2026.11:29_abc")
    for bad in ("", "short", "has space in it", "a\r\nb-injected", "x" * 129, "-starts-with-dash", "ünïcode-id-1"):
        assert not is_trace_id(bad)


GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = "0192f0c1d2e300010000000000000abc"


def test_a_client_s_trace_is_kept_as_the_parent_and_passed_on():
    context = Sampler(0.0).context(REQUEST, REQUEST, GIVEN)
    assert context == SpanContext("0af7651916cd43dd8448eb211c80319c", "0000000000000abc", "b7ad6b7169203331")
    assert context.traceparent == "00-0af7651916cd43dd8448eb211c80319c-8000000000000abc-01"
    assert context.text == "0af7651916cd43dd8448eb211c80319c-0000000000000abc-b7ad6b7169203331"
    assert Sampler(0.0).context(REQUEST, REQUEST, GIVEN.replace("00-", "cc-") + "-what-a-later-version-adds") == context
    assert Sampler(1.0).context(REQUEST, REQUEST, GIVEN[:-2] + "00") is None


NO_TRACE, NO_SPAN = "00-" + "0" * 32 + GIVEN[35:], GIVEN[:36] + "0" * 16 + "-01"


@pytest.mark.parametrize("odd", ["", "00-x", GIVEN.upper(), GIVEN.replace("0af7", "zzzz"), NO_TRACE, NO_SPAN, "ff" + GIVEN[2:]])
def test_an_unsound_traceparent_begins_a_new_trace(odd):
    assert Sampler(1.0).context(REQUEST, REQUEST, odd) == SpanContext(REQUEST, "0000000000000abc")
    assert Sampler(0.0).context(REQUEST, REQUEST, odd) is None


def test_the_trace_takes_the_id_of_x_din_trace_id_where_that_is_one():
    assert Sampler(1.0).context(REQUEST, "0af7651916cd43dd8448eb211c80319c", "").trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert Sampler(1.0).context(REQUEST, "client-trace-1", "").trace_id == REQUEST


def test_the_share_of_requests_is_chosen_though_their_ids_count_on():
    ids = TraceIds(1, 2**63)
    chosen = [Sampler(0.1).context(made := ids.make(1.0), made, "") is not None for _ in range(5000)]
    assert 350 < sum(chosen) < 650
    assert sum(chosen[:500]) > 10

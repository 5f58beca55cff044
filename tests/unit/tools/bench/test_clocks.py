"""Clock offsets are found by cause and effect alone, and the clock that is off is named."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import NodeTimes, TimedAnswer
from din_extproc.tools.bench.clocks import ClockOffset, TimedExchange, check_clocks, measure_gateway, measure_nodes

START = 1_800_000_000.0
MOMENTS = [number * (10**0.5 - 3) for number in range(24)]


def exchange(at: float, *, gateway_ms: float = 0.0, node_ms: float = 0.0, node: str = "n", way_ms: float = 2.0, client_ms: float = 0.0):
    """A request of one token as everybody sees it; each clock is ahead of the true time by so much."""
    true = START + at
    written = true + (way_ms + 5.0 + 8.0) / 1000
    created = float(int(written + node_ms / 1000))
    answer = TimedAnswer(2 * way_ms + 20.0, way_ms + 18.0, way_ms + 18.0, 1, created=((created, way_ms + 18.0),))
    times = GatewayTimes(
        "t", true + (way_ms + gateway_ms) / 1000, "completed", node_id=node, attempts=1, received_ms=1.0, sent_ms=5.0, first_token_ms=14.0,
        node_ended_ms=19.0, ended_ms=19.5, decided_ms=1.0,
    )  # fmt: skip
    return TimedExchange(true + client_ms / 1000, answer, times)


def clocks(**off: float):
    asked = [exchange(at, node=node, **off) for at in MOMENTS for node in ("n", "m")]
    return check_clocks(measure_gateway(asked), measure_nodes(asked))


def offs(found) -> list[str]:
    return [clock.whose for clock in found if clock.off]


@pytest.mark.parametrize("ms", [0.0, 20.0, -20.0])
def test_clocks_that_agree_are_left_alone(ms):
    found = clocks(gateway_ms=ms, node_ms=-ms)
    assert offs(found) == []
    assert [clock.whose for clock in found] == ["gateway", "n", "m"]
    assert all(clock.low_ms <= 0.0 + abs(ms) and clock.high_ms >= -abs(ms) for clock in found)


@pytest.mark.parametrize("ms", [300.0, -300.0, 4000.0, -86_000.0])
def test_a_gateway_s_clock_that_is_off_is_named_with_the_nodes_as_witnesses(ms):
    found = clocks(gateway_ms=ms)
    assert offs(found) == ["gateway"]
    assert found[0].low_ms <= ms <= found[0].high_ms
    assert f"ms {'ahead' if ms > 0 else 'behind'} (between " in found[0].fault
    assert found[0].fault.endswith(" of the client's and of 2 nodes'")


@pytest.mark.parametrize("ms", [300.0, -300.0])
def test_a_client_s_clock_that_is_off_is_named_not_the_gateway_s(ms):
    found = clocks(client_ms=ms)
    assert offs(found) == ["client"]
    assert f"ms {'ahead' if ms > 0 else 'behind'} (between " in found[0].fault


@pytest.mark.parametrize("ms", [300.0, -300.0])
def test_one_node_s_clock_that_is_off_is_named(ms):
    asked = [exchange(at, node=node, node_ms=ms if node == "m" else 0.0) for at in MOMENTS for node in ("n", "m")]
    found = check_clocks(measure_gateway(asked), measure_nodes(asked))
    assert offs(found) == ["m"]
    assert found[2].low_ms <= ms <= found[2].high_ms
    assert found[2].high_ms - found[2].low_ms < 150.0


def test_without_a_witness_both_are_named():
    asked = [exchange(at, gateway_ms=300.0) for at in MOMENTS]
    (found,) = check_clocks(measure_gateway(asked), {})
    assert found.off
    assert "either may be off" in found.fault


def test_a_clock_that_writes_no_time_is_not_known():
    offset = ClockOffset().narrow(-1.8e12, -1.8e12 + 1000)
    (_, found) = check_clocks(ClockOffset(-1, 1), {"n": offset})
    assert (found.low_ms, found.high_ms, found.off) == (None, None, False)


def test_an_answer_after_a_retry_tells_nothing_of_the_node():
    one = exchange(0.0)
    again = TimedExchange(one.began_at, one.answer, GatewayTimes("t", START, "completed", node_id="n", attempts=2, sent_ms=500.0))
    assert measure_nodes([again]) == {}
    assert measure_nodes([TimedExchange(one.began_at, TimedAnswer(1.0), one.gateway)]) == {"n": ClockOffset(-inf, inf)}


@given(
    st.lists(st.floats(0.0, 900.0), min_size=1, max_size=30),
    st.floats(-5000.0, 5000.0),
    st.floats(-5000.0, 5000.0),
    st.floats(0.0, 40.0),
)
def test_the_truth_lies_within_the_bounds_whatever_the_ways_take(moments, gateway_ms, node_ms, way_ms):
    asked = [exchange(at, gateway_ms=gateway_ms, node_ms=node_ms, way_ms=way_ms) for at in moments]
    found, node = measure_gateway(asked), measure_nodes(asked)["n"]
    assert found.low_ms - 0.01 <= gateway_ms <= found.high_ms + 0.01
    assert node.low_ms - 0.01 <= node_ms <= node.high_ms + 0.01


@given(st.floats(-5000.0, 5000.0), st.floats(0.0, 40.0))
def test_a_node_s_own_envoy_bounds_its_clock_with_one_request(node_ms, way_ms):
    one = exchange(0.0, node_ms=node_ms, way_ms=way_ms)
    came = START + (way_ms + 6.0 + node_ms) / 1000
    node_times = NodeTimes(came, answered_ms=7.0, seen_ms=14.0, head_ms=2 * way_ms + 14.0)
    offset = measure_nodes([TimedExchange(one.began_at, TimedAnswer(99.0, node=node_times), one.gateway)])["n"]
    assert offset.low_ms - 0.01 <= node_ms <= offset.high_ms + 0.01
    assert offset.high_ms - offset.low_ms == pytest.approx(2 * way_ms + 14.0 - 5.0 - 7.0, abs=0.01)

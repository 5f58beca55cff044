"""The parts of a request add up to the total if clocks are right; otherwise the gap shows it."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import NodeTimes, TimedAnswer
from din_extproc.tools.bench.clocks import ClockOffset, MeasuredClock, TimedExchange
from din_extproc.tools.bench.plot import draw_svg
from din_extproc.tools.bench.split_parts import PARTS, Split, SplitReport, split_request

START = 1_800_000_000.0
KNOWN = ClockOffset(-1.0, 1.0)
SPANS = {name: 10.0 * number for number, name in enumerate(PARTS, 1)}


def exchange(spans: dict[str, float], *, gateway_ms: float = 0.0, node_says: bool = True, works: float = 1.0, receive_ms: float = 0.0):
    """A request that took so long in each part. `works`: what the engine says, as a share of the truth."""
    received = receive_ms
    sent = received + spans["queue"] + spans["decision"] + spans["gateway"]
    node_ended = sent + spans["way"] + spans["node"]
    ended = node_ended + spans["forward"]
    ahead = spans["transfer"] - receive_ms
    total = ahead + ended + spans["back"]
    executed = spans["node"] * works if node_says else None
    answer = TimedAnswer(total, total / 2, total, 10, executed)
    times = GatewayTimes(
        "t-1", START + (ahead + gateway_ms) / 1000, "completed", node_id="n", received_ms=received, sent_ms=sent, node_ended_ms=node_ended,
        ended_ms=ended, decided_ms=spans["queue"] + spans["decision"], waited_ms=spans["queue"],
    )  # fmt: skip
    return TimedExchange(START, answer, times)


def taken(one: TimedExchange, gateway: ClockOffset = KNOWN) -> Split:
    found = split_request(one, gateway)
    assert isinstance(found, Split), found
    return found


@given(st.lists(st.floats(0.0, 20_000.0), min_size=8, max_size=8), st.booleans(), st.floats(0.0, 1.0))
def test_the_parts_are_what_they_were_and_add_up_to_the_whole(spans, node_says, share):
    truth = dict(zip(PARTS, spans, strict=True))
    found = taken(exchange(truth, node_says=node_says, receive_ms=share * truth["transfer"]))
    if not node_says:
        truth |= {"way": 0.0, "node": truth["way"] + truth["node"]}
    assert found.parts == pytest.approx(truth, abs=0.01)
    assert sum(found.parts.values()) == pytest.approx(found.total_ms, abs=0.01)
    assert abs(found.gap_ms) < 0.01
    assert not found.suspect
    assert found.node_says == node_says


@given(st.floats(100.0, 5000.0), st.sampled_from([-1, 1]), st.lists(st.floats(0.0, 40.0), min_size=8, max_size=8))
def test_a_clock_that_is_off_leaves_a_gap_and_is_put_right(ms, sign, spans):
    truth = dict(zip(PARTS, spans, strict=True))
    found = taken(exchange(truth, gateway_ms=sign * ms), ClockOffset(sign * ms - 1.0, sign * ms + 1.0))
    short = truth["forward"] + truth["back"] if sign > 0 else truth["transfer"]
    assert found.gap_ms == pytest.approx(ms - short, abs=0.01)
    assert bool(found.suspect) == (found.gap_ms > 50.0)
    assert found.parts == pytest.approx(truth, abs=0.01)


def test_three_hundred_milliseconds_are_found():
    found = taken(exchange(dict.fromkeys(PARTS, 1.0), gateway_ms=300.0))
    assert found.gap_ms == pytest.approx(298.0, abs=0.01)
    assert found.suspect == "back takes -298 ms: the clocks of client and gateway differ"


def test_an_engine_that_says_it_worked_longer_than_it_was_waited_for_is_named():
    found = taken(exchange({**SPANS, "node": 1000.0}, works=1.5))
    assert found.gap_ms == pytest.approx(450.0)
    assert found.suspect == "way takes -450 ms: n says that it worked longer than the gateway waited for it"


@pytest.mark.parametrize(("seen_ms", "way_ms"), [(110.0, 10.0), (95.0, 0.0), (9000.0, 110.0)])
def test_what_the_way_to_a_node_takes_is_known_when_its_own_envoy_tells(seen_ms, way_ms):
    one = exchange(SPANS, node_says=False)  # the request goes to the node after 90 ms and comes back 110 ms later
    answer = TimedAnswer(one.answer.total_ms, 1.0, 2.0, 10, node=NodeTimes(START, answered_ms=10.0, seen_ms=seen_ms, head_ms=1.0))
    found = taken(TimedExchange(START, answer, one.gateway))
    assert (found.parts["way"], found.parts["node"]) == (way_ms, 110.0 - way_ms)
    assert found.gap_ms == 0.0


def test_a_stopwatch_of_the_sidecar_that_runs_wild_is_named():
    one = exchange(SPANS)
    found = taken(TimedExchange(START, one.answer, GatewayTimes(**{**as_dict(one.gateway), "decided_ms": 500.0})))
    assert "the stopwatches of sidecar and Envoy differ" in found.suspect


def as_dict(times: GatewayTimes) -> dict:
    return {name: getattr(times, name) for name in times.__struct_fields__}


@pytest.mark.parametrize(
    ("missing", "words"),
    [("sent_ms", "does not know all its times (outcome completed)"), ("decided_ms", "does not say how long it decided")],
)
def test_what_is_missing_is_reported(missing, words):
    one = exchange(SPANS)
    found = split_request(TimedExchange(START, one.answer, GatewayTimes(**{**as_dict(one.gateway), missing: None})), KNOWN)
    assert isinstance(found, str)
    assert words in found
    assert split_request(TimedExchange(START, TimedAnswer(1.0, trouble="rate_limit_exceeded"), one.gateway), KNOWN) == "rate_limit_exceeded"


def apart(*splits: Split, clocks: tuple[MeasuredClock, ...] = (), failed: dict[str, int] | None = None) -> SplitReport:
    return SplitReport("2026-11-30T12:00:00+00:00", "http://g", "m<&>", 50.0, splits, clocks, failed or {})


def test_the_verdict_is_that_of_the_worst_request_and_of_the_clocks():
    good, bad = taken(exchange(SPANS)), taken(exchange(SPANS, gateway_ms=-300.0))
    off = MeasuredClock("node-b", 250.0, 350.0, off=True, fault="the clock of node-b is 300 ms ahead")
    assert apart(good).sound
    assert apart(good).verdict == "the parts add up within 50 ms: the largest gap of 1 requests is 0.0 ms"
    assert not apart(good, bad).sound
    assert apart(good, bad).verdict.startswith("the parts do not add up within 50 ms: the largest gap of 2 requests is 290.0 ms")
    assert not apart(good, clocks=(off,)).sound
    assert apart(good, clocks=(off,)).verdict.endswith("; a clock is off: node-b")
    assert not apart(good, failed={"502": 1}).sound
    assert "not taken apart: 1 (502)" in apart(good, failed={"502": 1}).lines()
    assert apart().lines()[-1] == "nothing could be taken apart"
    assert not apart().sound


def test_the_picture_is_whole_and_shows_every_part_that_took_time():
    text = draw_svg(apart(taken(exchange(SPANS)), taken(exchange({**SPANS, "queue": 0.0}, gateway_ms=400.0))))
    tree = ET.fromstring(text)
    titles = [found.text for found in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert [title for title in titles if title.startswith("queue:")] == ["queue: 20.0 ms"] * 2
    assert sum(title.startswith("node:") for title in titles) == 2
    assert "up to 530.0 ms" in text
    assert "m&lt;&amp;&gt;" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http://g", "")
    assert draw_svg(apart()).count("<svg") == 1
